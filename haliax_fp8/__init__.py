"""FP8 training and serving for JAX models written in Equinox and Haliax.

    model = fp8_linear_layers(model)

converts a model; `partition_for_grad_overwrite` and `apply_updates` make its training step. See `docs/`.
"""

from . import (
    demo as demo,
    devices as devices,
    layers as layers,
    memory as memory,
    ops as ops,
    preflight as preflight,
    statistics as statistics,
    training as training,
)
from ._einsum import Fp8Einsum as Fp8Einsum
from ._jax.max_grad import fp32_max_grad as fp32_max_grad
from ._op import Fp8DotGeneral as Fp8DotGeneral
from ._state.marker import OverwriteWithGradient as OverwriteWithGradient
from ._state.op_state import OpState as OpState
from .devices import Device as Device, Efficiency as Efficiency
from .layers import (
    EquinoxLinear as EquinoxLinear,
    FasterOn as FasterOn,
    Fp8Config as Fp8Config,
    HaliaxEmbedding as HaliaxEmbedding,
    HaliaxLinear as HaliaxLinear,
    HaliaxMoELinear as HaliaxMoELinear,
    Kernel as Kernel,
    LayerDescription as LayerDescription,
    LayerRule as LayerRule,
    ModelDescription as ModelDescription,
    Prediction as Prediction,
    Refused as Refused,
    default_rules as default_rules,
    describe as describe,
    fp8_linear_layers as fp8_linear_layers,
    restore_linear_layers as restore_linear_layers,
)
from .memory import (
    JoinedLinear as JoinedLinear,
    KernelResidual as KernelResidual,
    compressed as compressed,
    join_linear as join_linear,
    projections as projections,
    rematerialized as rematerialized,
    save_fp8_operands as save_fp8_operands,
    save_nothing_but_fp8 as save_nothing_but_fp8,
    separate_input_scales as separate_input_scales,
    share_input_scales as share_input_scales,
    split_linear as split_linear,
)
from .recipes import (
    E2M1 as E2M1,
    E4M3 as E4M3,
    E4M3FNUZ as E4M3FNUZ,
    E5M2 as E5M2,
    E5M2FNUZ as E5M2FNUZ,
    AbstractAmaxCompute as AbstractAmaxCompute,
    AbstractRounding as AbstractRounding,
    AbstractScaling as AbstractScaling,
    AbstractStatefulScaling as AbstractStatefulScaling,
    BlockScaling as BlockScaling,
    CurrentScaling as CurrentScaling,
    DelayedScaling as DelayedScaling,
    Format as Format,
    HadamardScaling as HadamardScaling,
    HighPrecision as HighPrecision,
    MaxOfHistory as MaxOfHistory,
    MostRecent as MostRecent,
    MovingAverage as MovingAverage,
    MXFP8Scaling as MXFP8Scaling,
    NVFP4Scaling as NVFP4Scaling,
    OperandUse as OperandUse,
    Percentile as Percentile,
    Quantization as Quantization,
    QuantizedArray as QuantizedArray,
    Recipe as Recipe,
    RecoveringMax as RecoveringMax,
    RowwiseScaling as RowwiseScaling,
    StaticScaling as StaticScaling,
    Stochastic as Stochastic,
    Support as Support,
    ToNearest as ToNearest,
    aliases as aliases,
    quantize as quantize,
    recipe_by_name as recipe_by_name,
    recipes as recipes,
    saturating_cast as saturating_cast,
    supported as supported,
)
from .statistics import (
    ModelStatistics as ModelStatistics,
    OpStatistics as OpStatistics,
    quantization_statistics as quantization_statistics,
)
from .training import (
    TrainStep as TrainStep,
    accumulate_gradients as accumulate_gradients,
    apply_updates as apply_updates,
    calibrate as calibrate,
    cast_params as cast_params,
    exact_gradients as exact_gradients,
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
    fp8_states as fp8_states,
    partition_for_grad_overwrite as partition_for_grad_overwrite,
    require_own_state as require_own_state,
    trainable as trainable,
    transfer_optimizer_state as transfer_optimizer_state,
    with_max_gradients as with_max_gradients,
    with_rounding_keys as with_rounding_keys,
)


__version__ = "0.1.0"
