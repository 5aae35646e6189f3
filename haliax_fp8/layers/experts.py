"""A grouped product that each device of a mesh computes of its rows, as `haliax.nn.MoELinear` with `use_gmm` does."""

from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax.partitioning import current_thread_local_mapping, physical_axis_name
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from .._op import Fp8DotGeneral


class MeshAxes(NamedTuple):
    """The axes of a mesh that the axes of a grouped product are divided over.

    Args:
        rows: The mesh axes of the rows.
        inputs: The mesh axes of the inputs, which are summed.
        outputs: The mesh axes of the outputs.
        experts: The mesh axes of the experts.
    """

    rows: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    experts: tuple[str, ...]

    @staticmethod
    def of(rows: hax.Axis, inputs: hax.Axis, outputs: hax.Axis, experts: hax.Axis) -> "MeshAxes | None":
        """The axes of Haliax's axis mapping; None without one, without a mesh, and where a device runs this alone."""
        mesh = jax.sharding.get_abstract_mesh()
        if current_thread_local_mapping() is None or mesh.empty or mesh.size == 1 or mesh.manual_axes:
            return None
        return MeshAxes(*(_names(physical_axis_name(axis)) for axis in (rows, inputs, outputs, experts)))


def product_on_each_device(
    op: Fp8DotGeneral,
    rows: Float[Array, "rows inputs"],
    kernel: Float[Array, "experts inputs outputs"],
    sizes: Int[Array, " experts"],
    axes: MeshAxes,
) -> Float[Array, "rows outputs"]:
    """`op.ragged_dot` under `shard_map`: a device's rows are sorted by expert, and group sizes are those of its rows.

    What `haliax.nn.MoELinear` with `use_gmm` computes. Sizes may differ among devices although no axis says so, as in
    Levanter's models. Two cases more are right here:

    - Inputs may be divided over any axes; each device's part of the sum is added up. Haliax does it for `"model"`.
    - Experts may be divided over axes that rows are not. Each device then has the sizes of all experts, and multiplies
      the rows of its own.

    Experts that are divided as rows are have rows that were sent to them: each device has the sizes of its experts.

    Args:
        op: The op. Its state is the same on all devices, or that of each expert where the expert is.
        rows: The rows of all devices.
        kernel: All kernels.
        sizes: How many rows each expert has.
        axes: What is divided over which axes of the mesh.
    """
    arrays, static = eqx.partition(op, eqx.is_array)
    come_to_experts = set(axes.experts) <= set(axes.rows)

    def local(arrays: Fp8DotGeneral, rows: Array, kernel: Array, sizes: Array) -> Array:
        op = eqx.combine(arrays, static)
        if come_to_experts:
            out, summed = op.ragged_dot(rows, kernel, sizes), axes.inputs
        else:
            first = lax.axis_index(axes.experts) * kernel.shape[0]
            begin = jnp.sum(jnp.where(jnp.arange(len(sizes)) < first, sizes, 0))
            local_sizes = lax.dynamic_slice_in_dim(sizes, first, kernel.shape[0])
            # The rows of this device's experts first; those after them give 0.
            out = jnp.roll(op.ragged_dot(jnp.roll(rows, -begin, 0), kernel, local_sizes), begin, 0)
            summed = (*axes.inputs, *axes.experts)
        return lax.psum(out, summed) if summed else out

    specs = (
        P(axes.experts if op.state_per_group else None),
        P(axes.rows, axes.inputs),
        P(axes.experts, axes.inputs, axes.outputs),
        P(axes.experts if come_to_experts else None),
    )
    # JAX has to know what varies over which axes: so the state gets the maximum over devices.
    on_devices = jax.shard_map(local, in_specs=specs, out_specs=P(axes.rows, axes.outputs), check_vma=True)
    return on_devices(arrays, rows, kernel, sizes)


def _names(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
