"""When a training step reduces gradients over devices, and in which dtype: the user's choice."""

import dataclasses
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import DTypeLike


@dataclasses.dataclass(frozen=True)
class ReduceOnce:
    """Adds up gradients on each device, and over devices once per step, in a dtype of your choice.

    By default XLA decides, and gradients travel in the dtype of the products; if devices divide the weights (FSDP), in
    every microbatch. With this choice each device takes the gradients of its own rows and adds them up in float32 over
    the microbatches; then all devices reduce these sums. A weight's gradient travels once per step.

    Until then every device holds a whole gradient in float32: four bytes for each weight that the other mesh axes do
    not divide. Under FSDP that can exceed everything else on the device; see `docs/many-devices.md`.

    The rows of a device count as a microbatch of their own. The loss is the mean over devices, and `current` and
    `nvfp4` compute scales from the device's rows alone. Random keys are split for devices too, and arrays in `aux` have
    an entry for each microbatch and device. Kernels are quantized once per step, as with `quantize_kernels="once"`, so
    the loss must not cast them: convert with `compute_dtype=jnp.bfloat16` instead. Inside the loss, Haliax's axis
    mapping omits the mesh axes of `over`.

    Args:
        over: The mesh axis, or axes, over which the rows of the batch are divided: "data", or ("replica", "data").
        dtype: The dtype in which gradients travel and are added up: `jnp.float32` or `jnp.bfloat16`.

    Raises:
        ValueError: If `over` names nothing, or `dtype` is not a floating-point dtype of at least 16 bits. When the step
            is called: if no mesh with these axes as automatic axes is set, or they do not divide the batch.

    References:
        `MixedPrecisionPolicy(reduce_dtype=...)` and `set_requires_gradient_sync` of PyTorch's `fully_shard`.

    Example:
        >>> from haliax_fp8.training import ReduceOnce
        >>> once = ReduceOnce(over="data")
        >>> step = TrainStep(loss_fn, optax.adamw(1e-3), microbatches=4, reduce_gradients=once)
        >>> step.reduce_gradients.over
        ('data',)
    """

    over: str | tuple[str, ...]
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        over = (self.over,) if isinstance(self.over, str) else self.over
        if not isinstance(over, tuple | list) or not over or not all(isinstance(axis, str) for axis in over):
            raise ValueError(f"over={self.over!r} must be the name of a mesh axis, such as 'data', or a tuple of names")
        object.__setattr__(self, "over", tuple(over))
        object.__setattr__(self, "dtype", _dtype_to_travel_in(self.dtype))

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh axes in `over`."""
        return cast(tuple[str, ...], self.over)


def require_reduction(value: Any) -> None:
    """Raises a ValueError unless a value is a choice for `TrainStep(reduce_gradients=...)`.

    Args:
        value: The user's argument.
    """
    if value is not None and not isinstance(value, ReduceOnce):
        raise ValueError(
            f"reduce_gradients={value!r} must be None or haliax_fp8.training.ReduceOnce(over=...), with the mesh axis "
            "over which the rows of the batch are divided"
        )


def _dtype_to_travel_in(given: Any) -> np.dtype:
    try:
        dtype = np.dtype(given)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(f"dtype={given!r} must be a floating-point dtype, such as jnp.float32 or jnp.bfloat16")
    return dtype
