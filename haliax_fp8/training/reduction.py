"""When the gradients of a training step are reduced over devices, and in which dtype."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.partitioning import current_thread_local_mapping
from haliax.quantization import CustomGradientAccumulation
from jax.sharding import PartitionSpec
from jaxtyping import DTypeLike

from .._jax.constraint import automatic_mesh, divided
from .._state.marker import OverwriteWithGradient


@dataclasses.dataclass(frozen=True)
class ReduceOnce:
    """Gradients are added up on each device, and over devices once per step, in a dtype of your choice.

    By default XLA reduces the gradients of every microbatch, in the dtype of the products. With this choice each device
    takes the gradients of its own rows and adds them up in float32 over the microbatches; then all devices reduce these
    sums. A weight's gradient travels once per step, and is never rounded before it travels.

    Until then every device holds a whole gradient in float32: four bytes for each weight that the other mesh axes do
    not divide. Under FSDP that can be more than all else on the device; see `docs/traffic.md`.

    The rows of a device count as a microbatch of their own. The loss is the mean over devices, `current` and `nvfp4`
    take the scale of the device's rows alone, random keys are split for devices too, and arrays in `aux` have an entry
    for each microbatch and device. Kernels are quantized once per step, as with `quantize_kernels="once"`, so the loss
    must not cast them: convert with `compute_dtype=jnp.bfloat16` instead. Inside the loss, Haliax's axis mapping leaves
    out the mesh axes of `over`.

    Args:
        over: The mesh axis, or axes, over which the rows of the batch are divided: "data", or ("replica", "data").
        dtype: The dtype in which gradients travel and are added up: `jnp.float32` or `jnp.bfloat16`.

    Raises:
        ValueError: If `over` names nothing, or `dtype` is not a floating-point dtype of at least 16 bits. When the step
            is called: if no mesh with automatic axes is set that has these axes, or they do not divide the batch.

    References:
        `MixedPrecisionPolicy(reduce_dtype=...)` and `set_requires_gradient_sync` of PyTorch's `fully_shard`.

    Example:
        >>> from haliax_fp8.training import ReduceOnce
        >>> step = TrainStep(loss_fn, optax.adamw(1e-3), microbatches=4, reduce_gradients=ReduceOnce(over="data"))
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
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            dtype = np.dtype(np.int8)
        if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
            raise ValueError(
                f"dtype={self.dtype!r} must be a floating-point dtype, such as jnp.float32 or jnp.bfloat16"
            )
        object.__setattr__(self, "dtype", dtype)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes."""
        return cast(tuple[str, ...], self.over)

    def parts(self) -> int:
        """How many devices, or groups of them, have rows of their own.

        Raises:
            ValueError: Without a mesh with automatic axes that has those of `over`.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if not automatic_mesh():
            raise ValueError(
                f"reduce_gradients=ReduceOnce(over={self.over!r}) needs a mesh with automatic axes: set it where the "
                "step is called, jax.set_mesh(mesh), with axis_types=AxisType.Auto for all axes; on one device there "
                "is nothing to reduce"
            )
        for axis in self.axes:
            if axis not in mesh.shape:
                names = ", ".join(map(repr, mesh.shape))
                raise ValueError(f"over={axis!r} is not an axis of the mesh, which has {names}")
        return int(np.prod([mesh.shape[axis] for axis in self.axes]))

    def split(self, x: jax.Array) -> jax.Array:
        """The rows of an array, `[rows, ...]`, by device: `[parts, rows / parts, ...]`."""
        parts = self.parts()
        if x.ndim == 0 or x.shape[0] % parts:
            raise ValueError(
                f"reduce_gradients=ReduceOnce(over={self.over!r}): {parts} devices do not divide the leading axis of a "
                f"batch array of shape {x.shape}, or of its microbatches"
            )
        return self.apart(x.reshape(parts, x.shape[0] // parts, *x.shape[1:]))

    def apart(self, x: jax.Array) -> jax.Array:
        """An array of which each device has its own entry of the first axis."""
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return divided(x, PartitionSpec(self.axes, *(PartitionSpec.UNCONSTRAINED for _ in x.shape[1:])))

    def of_each(self, function: Callable[..., Any], parts: Any) -> Any:
        """The results of a function for each device's part, along a new first axis."""
        # `jax.vmap` takes it, but Equinox's types do not declare it.
        for_jax: dict[str, Any] = {"spmd_axis_name": self.axes}
        try:
            with self._mapping():
                return eqx.filter_vmap(function, **for_jax)(parts)
        except ValueError as error:
            if "spmd_axis_name" not in str(error):
                raise
            raise ValueError(
                f"loss_fn divides an array over the mesh axes of reduce_gradients=ReduceOnce(over={self.over!r}), but "
                "in it every device has its own rows. Leave these axes out of its sharding constraints; those that "
                "follow from Haliax's axis mapping leave them out already"
            ) from error

    def over_devices[T](self, gradients: T) -> T:
        """Mean gradients, and the maximum of state, over the first axis, of the devices' parts."""

        def reduce(node: Any) -> Any:
            if isinstance(node, CustomGradientAccumulation):
                return _accumulated(node)
            # Not `jnp.sum`, which would make sums of 16 bits in float32.
            return jax.lax.reduce_sum((node / node.shape[0]).astype(self.dtype), (0,))

        return jax.tree.map(reduce, gradients, is_leaf=lambda node: isinstance(node, CustomGradientAccumulation))

    @contextlib.contextmanager
    def _mapping(self) -> Iterator[None]:
        """Haliax's axis mapping without the axes that tell devices' parts from each other."""
        mapping = current_thread_local_mapping()
        if mapping is None:
            yield
            return
        with hax.axis_mapping({name: kept for name, axes in mapping.items() if (kept := self._without(axes))}):
            yield

    def _without(self, axes: Any) -> Any:
        kept = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if axis not in self.axes)
        return kept[0] if len(kept) == 1 else kept


def require_reduction(value: Any) -> None:
    """Raises a ValueError for what is no choice of `TrainStep(reduce_gradients=...)`.

    Args:
        value: What the user gave.
    """
    if value is not None and not isinstance(value, ReduceOnce):
        raise ValueError(
            f"reduce_gradients={value!r} must be None or haliax_fp8.training.ReduceOnce(over=...), with the mesh axis "
            "over which the rows of the batch are divided"
        )


def _accumulated(gradients: CustomGradientAccumulation) -> Any:
    if isinstance(gradients, OverwriteWithGradient):
        # In one reduction: ours accumulate by maximum.
        return jax.tree.map(lambda x: x.max(axis=0), gradients)
    parts = [jax.tree.map(lambda x: x[i], gradients) for i in range(jax.tree.leaves(gradients)[0].shape[0])]  # noqa: B023
    return functools.reduce(lambda total, part: total.accumulate(part), parts)
