"""Training: gradients with exact maxima, the update of parameters and state, and what a training loop needs besides."""

from .._jax.max_grad import fp32_max_grad as fp32_max_grad
from .._state.op_state import (
    AbstractOp as AbstractOp,
    OpState as OpState,
    OverwriteWithGradient as OverwriteWithGradient,
)
from ..layers.checks import check_not_modified as check_not_modified
from .calibration import calibrate as calibrate, fp8_states as fp8_states
from .cast import cast_params as cast_params, with_rounding_keys as with_rounding_keys
from .gradients import (
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
    with_max_gradients as with_max_gradients,
)
from .loss import exact_gradients as exact_gradients, scalar_loss as scalar_loss
from .microbatches import KernelQuantization as KernelQuantization, ReduceOnce as ReduceOnce
from .monitor import (
    CountedState as CountedState,
    Monitor as Monitor,
    NonFiniteStep as NonFiniteStep,
    require_finite_step as require_finite_step,
)
from .muon import muon_dimensions as muon_dimensions
from .phases import Phase as Phase
from .quantized_state import QuantizedState as QuantizedState, quantized_state as quantized_state
from .step import TrainStep as TrainStep
from .updates import (
    accumulate_gradients as accumulate_gradients,
    apply_updates as apply_updates,
    incremental_update as incremental_update,
    partition_for_grad_overwrite as partition_for_grad_overwrite,
    trainable as trainable,
    transfer_optimizer_state as transfer_optimizer_state,
)
