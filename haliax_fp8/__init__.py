"""FP8 training for JAX models written in Equinox and Haliax.

    model = fp8_linear_layers(model)

converts a model; `partition_for_grad_overwrite` and `apply_updates` make its training step. See `docs/`.
"""

# Modules: the rest of what is public, by subject.
from . import (
    attention as attention,
    checkpoints as checkpoints,
    devices as devices,
    layers as layers,
    memory as memory,
    models as models,
    ops as ops,
    preflight as preflight,
    recipes as recipes,
    serving as serving,
    sharding as sharding,
    statistics as statistics,
    training as training,
)

# The two ops, and their state.
from ._einsum import Fp8Einsum as Fp8Einsum
from ._jax.max_grad import fp32_max_grad as fp32_max_grad
from ._op import Fp8DotGeneral as Fp8DotGeneral
from ._state.marker import OverwriteWithGradient as OverwriteWithGradient

# Converting a model, its kernels alone for one step, and seeing what was converted.
from .layers import (
    Fp8Config as Fp8Config,
    describe as describe,
    fp8_linear_layers as fp8_linear_layers,
    quantize_kernels as quantize_kernels,
    restore_linear_layers as restore_linear_layers,
)

# What a layer runs.
from .recipes import DelayedScaling as DelayedScaling, Recipe as Recipe

# What its numbers became.
from .statistics import quantization_statistics as quantization_statistics

# Training it.
from .training import (
    TrainStep as TrainStep,
    accumulate_gradients as accumulate_gradients,
    apply_updates as apply_updates,
    calibrate as calibrate,
    cast_params as cast_params,
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
    partition_for_grad_overwrite as partition_for_grad_overwrite,
    trainable as trainable,
    transfer_optimizer_state as transfer_optimizer_state,
    with_rounding_keys as with_rounding_keys,
)


__version__ = "0.1.0"
