"""Each device's part of a batch, and its gradients, as a vmapped axis that the mesh divides."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.partitioning import current_thread_local_mapping
from haliax.quantization import CustomGradientAccumulation
from jax.sharding import PartitionSpec

from .._jax.constraint import automatic_mesh, divided
from .._jax.errors import is_about_mapped_mesh_axis
from .._state.marker import OverwriteWithGradient
from .reduction import ReduceOnce


@dataclasses.dataclass(frozen=True)
class DeviceParts:
    """The devices' parts of a batch, whose gradients are reduced once.

    Args:
        choice: The mesh axes to reduce over, and the dtype.
    """

    choice: ReduceOnce

    def count(self) -> int:
        """The number of devices, or groups of them, that have their own rows.

        Raises:
            ValueError: If no mesh with automatic axes, including those of `over`, is set.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if not automatic_mesh():
            raise ValueError(
                f"{self._given} needs a mesh with automatic axes: call the step under jax.set_mesh(mesh), with "
                "axis_types=AxisType.Auto for all axes; on one device there is nothing to reduce"
            )
        for axis in self.choice.axes:
            if axis not in mesh.shape:
                names = ", ".join(map(repr, mesh.shape))
                raise ValueError(f"over={axis!r} is not an axis of the mesh, which has {names}")
        return int(np.prod([mesh.shape[axis] for axis in self.choice.axes]))

    def split(self, x: jax.Array) -> jax.Array:
        """The rows of an array, `[rows, ...]`, by device: `[parts, rows / parts, ...]`."""
        parts = self.count()
        if x.ndim == 0 or x.shape[0] % parts:
            raise ValueError(
                f"{self._given}: {parts} devices do not divide the leading axis of a batch array of shape {x.shape}, "
                "or of its microbatches"
            )
        return self.apart(x.reshape(parts, x.shape[0] // parts, *x.shape[1:]))

    def apart(self, x: jax.Array) -> jax.Array:
        """The array, divided so that each device has its own entry of the first axis."""
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        return divided(x, PartitionSpec(self.choice.axes, *(PartitionSpec.UNCONSTRAINED for _ in x.shape[1:])))

    def map(self, function: Callable[..., Any], parts: Any) -> Any:
        """The results of a function for each device's part, along the first axis."""
        # `jax.vmap` takes it, but Equinox's types do not declare it.
        for_jax: dict[str, Any] = {"spmd_axis_name": self.choice.axes}
        try:
            with self._mapping():
                return eqx.filter_vmap(function, **for_jax)(parts)
        except ValueError as error:
            if not is_about_mapped_mesh_axis(error):
                raise
            raise ValueError(
                f"loss_fn divides an array over the mesh axes of {self._given}, but inside it every device has its own "
                "rows. Leave these axes out of its sharding constraints; those that follow from Haliax's axis mapping "
                "leave them out already"
            ) from error

    def reduced[T](self, gradients: T) -> T:
        """The mean of gradients and the maximum of state over the first axis, that of the devices' parts."""

        def reduce(node: Any) -> Any:
            if isinstance(node, CustomGradientAccumulation):
                return _accumulated(node)
            # Not `jnp.sum`, which would compute 16-bit sums in float32.
            return jax.lax.reduce_sum((node / node.shape[0]).astype(self.choice.dtype), (0,))

        return jax.tree.map(reduce, gradients, is_leaf=lambda node: isinstance(node, CustomGradientAccumulation))

    @property
    def _given(self) -> str:
        """The user's choice, for messages."""
        return f"reduce_gradients=ReduceOnce(over={self.choice.over!r})"

    @contextlib.contextmanager
    def _mapping(self) -> Iterator[None]:
        """Haliax's axis mapping without the mesh axes over which the parts are divided."""
        mapping = current_thread_local_mapping()
        if mapping is None:
            yield
            return
        with hax.axis_mapping({name: kept for name, axes in mapping.items() if (kept := self._without(axes))}):
            yield

    def _without(self, axes: Any) -> Any:
        kept = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if axis not in self.choice.axes)
        return kept[0] if len(kept) == 1 else kept


def _accumulated(gradients: CustomGradientAccumulation) -> Any:
    if isinstance(gradients, OverwriteWithGradient):
        # In one reduction: our states accumulate by maximum.
        return jax.tree.map(lambda x: x.max(axis=0), gradients)
    parts = [jax.tree.map(lambda x: x[i], gradients) for i in range(jax.tree.leaves(gradients)[0].shape[0])]  # noqa: B023
    return functools.reduce(lambda total, part: total.accumulate(part), parts)
