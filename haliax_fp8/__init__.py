"""FP8 training and serving for JAX models written in Equinox and Haliax.

    model = fp8_linear_layers(model)

converts a model; `partition_for_grad_overwrite` and `apply_updates` make its training step. See `docs/`.
"""

from . import ops as ops, preflight as preflight
from ._calibrate import calibrate as calibrate, fp8_states as fp8_states
from ._checkpoint import save_fp8_operands as save_fp8_operands, save_nothing_but_fp8 as save_nothing_but_fp8
from ._compressed import compressed as compressed
from ._describe import LayerDescription as LayerDescription, ModelDescription as ModelDescription, describe as describe
from ._device import Device as Device
from ._einsum import Fp8Einsum as Fp8Einsum
from ._exact_gradients import exact_gradients as exact_gradients
from ._formats import (
    E2M1 as E2M1,
    E4M3 as E4M3,
    E4M3FNUZ as E4M3FNUZ,
    E5M2 as E5M2,
    E5M2FNUZ as E5M2FNUZ,
    Format as Format,
    saturating_cast as saturating_cast,
)
from ._fuse import (
    AbstractFusion as AbstractFusion,
    OneProduct as OneProduct,
    SharedInput as SharedInput,
    fuse_projections as fuse_projections,
    projections as projections,
    separate_projections as separate_projections,
)
from ._fused_projections import FusedProjections as FusedProjections
from ._kernel_residual import (
    AbstractKernelResidual as AbstractKernelResidual,
    KeepQuantized as KeepQuantized,
    Requantize as Requantize,
    RequantizeWhereCheap as RequantizeWhereCheap,
)
from ._keys import with_rounding_keys as with_rounding_keys
from ._layer_work import LayerSize as LayerSize
from ._layers import (
    EquinoxLinear as EquinoxLinear,
    HaliaxEmbedding as HaliaxEmbedding,
    HaliaxLinear as HaliaxLinear,
    HaliaxMoELinear as HaliaxMoELinear,
    LayerRule as LayerRule,
    Refused as Refused,
    default_layers as default_layers,
)
from ._op import Fp8DotGeneral as Fp8DotGeneral
from ._overwrite import OpState as OpState, OverwriteWithGradient as OverwriteWithGradient
from ._own_state import require_own_state as require_own_state
from ._prediction import Prediction as Prediction
from ._presets import aliases as aliases, recipe_by_name as recipe_by_name, recipes as recipes
from ._quantized_array import QuantizedArray as QuantizedArray, quantize as quantize
from ._recipe import Quantization as Quantization, Recipe as Recipe
from ._rematerialized import rematerialized as rematerialized
from ._roofline import Efficiency as Efficiency
from ._rounding import AbstractRounding as AbstractRounding, Stochastic as Stochastic, ToNearest as ToNearest
from ._scaling import (
    AbstractAmaxCompute as AbstractAmaxCompute,
    AbstractScaling as AbstractScaling,
    AbstractStatefulScaling as AbstractStatefulScaling,
    BlockScaling as BlockScaling,
    CurrentScaling as CurrentScaling,
    DelayedScaling as DelayedScaling,
    HadamardScaling as HadamardScaling,
    HighPrecision as HighPrecision,
    MaxOfHistory as MaxOfHistory,
    MostRecent as MostRecent,
    MovingAverage as MovingAverage,
    MXFP8Scaling as MXFP8Scaling,
    NVFP4Scaling as NVFP4Scaling,
    OperandUse as OperandUse,
    Percentile as Percentile,
    RecoveringMax as RecoveringMax,
    RowwiseScaling as RowwiseScaling,
    StaticScaling as StaticScaling,
)
from ._state import fp32_max_grad as fp32_max_grad
from ._statistics import (
    ModelStatistics as ModelStatistics,
    OpStatistics as OpStatistics,
    quantization_statistics as quantization_statistics,
)
from ._support import Support as Support, supported as supported
from ._train_step import (
    TrainStep as TrainStep,
    trainable as trainable,
    transfer_optimizer_state as transfer_optimizer_state,
)
from ._training import (
    accumulate_gradients as accumulate_gradients,
    apply_updates as apply_updates,
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
    partition_for_grad_overwrite as partition_for_grad_overwrite,
    with_max_gradients as with_max_gradients,
)
from ._transform import (
    Fp8Config as Fp8Config,
    fp8_linear_layers as fp8_linear_layers,
    restore_linear_layers as restore_linear_layers,
)
from ._where_pays import WherePays as WherePays


__version__ = "0.1.0"
