"""Functions that XLA's partitioner does not see: they are lowered after the program has been divided over devices.

Some of XLA's operations do not survive the way through Shardy, JAX's partitioner, whatever their sharding
(`lax.scaled_dot` is one). In the program they are a custom call that says which axes belong together. Once XLA has
divided the program, it asks what each device runs.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import Array

from .by_each_device import by_each_device
from .private import needs


with needs("the lowering of FP8 products"):
    from jax._src.sharding_impls import ShardingContext, SPMDAxisContext


# Takes what a device computes of its part, the mesh, and the arguments and result with their shapes and shardings.
# Returns the mesh, what each device runs, the sharding of its result and those of its arguments.
type Partition = Callable[
    [Callable[..., Array], Any, Sequence[Any], Any], tuple[Any, Callable[..., Array], Any, Sequence[Any]]
]


def lower_after_partitioning(
    context: Any,
    *operands: Any,
    name: str,
    function: Callable[..., Array],
    part: Callable[..., Array],
    rule: str,
    sizes: Any,
    partition: Partition,
    remedy: str,
    of_blocks: Collection[int] = (),
) -> Any:
    """Lowers a function of arrays; in a program for several devices, after XLA has divided the program.

    Args:
        context: The context of a primitive's lowering rule.
        *operands: The operands that the rule receives.
        name: What the function is called in messages.
        function: What one device computes from whole arrays, in a program that is not divided.
        part: The same function as one of several devices computes it, from its parts.
        rule: Which axes of arguments and result belong together, as `custom_partitioning` takes it.
        sizes: Keyword arguments of `custom_partitioning`: the sizes of factors that the rule does not show, and which
            factors are summed.
        partition: What each device computes from its parts.
        remedy: The alternative if the function cannot be divided, for messages; completes "or ...".
        of_blocks: Which operands have one element per block of another, so that their axes may be short.

    Raises:
        ValueError: Inside a `shard_map` over a part of the mesh, which XLA cannot divide further; if the mesh is
            unknown; or on several TPUs, whose compiler does not ask how to divide a call.
    """
    module = context.module_context
    axes = module.axis_context
    inline = mlir.lower_fun(function, multiple_results=False)
    if isinstance(axes, SPMDAxisContext):
        if automatic := _left_to_xla(axes):
            raise ValueError(
                f"{name} was called inside shard_map over {sorted(axes.manual_axes)}, so XLA would have to divide it "
                f"over {automatic} as well, which it cannot. Call it under shard_map over all axes of the mesh, or "
                f"under none; or {remedy}"
            )
        if axes.mesh.size == 1 or not can_divide_calls(context):
            return inline(context, *operands)
        return by_each_device(context, operands, part)
    if not isinstance(axes, ShardingContext) or axes.num_devices == 1:
        return inline(context, *operands)
    _registered()
    if axes.device_assignment is None or axes.abstract_mesh is None:
        raise ValueError(
            f"{name} is divided over {axes.num_devices} devices, but its lowering does not know the mesh. Give "
            f"the arguments of the outermost jax.jit NamedShardings of one mesh; or {remedy}"
        )
    if not can_divide_calls(context):
        raise ValueError(
            f"{name} cannot be divided over {axes.num_devices} TPUs: their compiler cannot divide custom calls. Call "
            f"it under jax.shard_map over all axes of the mesh; or {remedy}"
        )
    call = custom_partitioning(lambda *arrays: part(*arrays))

    def divided(*avals: Any) -> Any:
        mesh, on_each, *shardings = partition(part, *avals)
        return mesh, _outside_of_mesh(on_each), *shardings

    call.def_partition(partition=divided, sharding_rule=rule, **sizes)

    def on_whole_axes(*arrays: Array) -> Array:
        return call(*[_evenly(axes.abstract_mesh, x) if i in of_blocks else x for i, x in enumerate(arrays)])

    return mlir.lower_fun(on_whole_axes, multiple_results=False)(context, *operands)


def _evenly(mesh: Any, x: Array) -> Array:
    """An array whose axes XLA leaves whole if some mesh axis does not divide them.

    Otherwise XLA would divide them over a part of the mesh axis, for which JAX has no name.
    """
    uneven = [size > 1 and any(size % devices for devices in mesh.shape.values()) for size in x.shape]
    if not any(uneven):
        return x
    mesh = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    spec = P(*(None if is_uneven else P.UNCONSTRAINED for is_uneven in uneven))
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _outside_of_mesh(function: Callable[..., Array]) -> Callable[..., Array]:
    """`function`, called so that its arrays' types do not mention a mesh with explicit axes, even if one is set."""

    @functools.wraps(function)
    def call(*arrays: Array) -> Array:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return function(*arrays)

    return call


def lower_with_devices(*primitives: Primitive) -> None:
    """Declares primitives whose lowering contains calls that are divided over the devices of a program.

    JAX looks for such primitives in the traced program only, not within the lowering of others.

    Args:
        *primitives: The primitives that appear in a traced program.
    """
    # A program for one device does not need it; `_registered` raises for one that does.
    with contextlib.suppress(ImportError):
        _registered().update(primitives)


def _registered() -> set[Primitive]:
    """The primitives for whose lowering JAX provides the devices of a program."""
    with needs("a product that XLA divides over several devices"):
        from jax._src import dispatch

        return dispatch.prim_requires_devices_during_lowering


# --- What a program is lowered for, from the context of a primitive's lowering rule -----------------------------------


def platforms_of(context: Any) -> tuple[str, ...]:
    """The platforms that a program is lowered for: `cpu`, `cuda`, `rocm`, `tpu`; with `jax.export` perhaps several."""
    return tuple(context.platforms or context.module_context.platforms)


def devices_of(context: Any) -> int:
    """The number of devices that a program is lowered for, from the context of a primitive's lowering rule."""
    axes = context.module_context.axis_context
    if isinstance(axes, SPMDAxisContext):
        return axes.mesh.size
    return axes.num_devices if isinstance(axes, ShardingContext) else 1


def can_divide_calls(context: Any) -> bool:
    """Whether a program's compiler asks JAX how to divide a custom call; TPU compilers do not."""
    return "tpu" not in platforms_of(context)


def knows_devices(context: Any) -> bool:
    """Whether a primitive is lowered for several known devices, over which XLA will divide it as told."""
    if not is_divided_by_shardy(context):
        return False
    _registered()
    axes = context.module_context.axis_context
    return can_divide_calls(context) and axes.device_assignment is not None and axes.abstract_mesh is not None


def is_divided_by_shardy(context: Any) -> bool:
    """Whether a primitive is lowered for several devices, over which Shardy, XLA's partitioner, divides the program."""
    axes = context.module_context.axis_context
    return isinstance(axes, ShardingContext) and axes.num_devices > 1 and jax.config.jax_use_shardy_partitioner


def has_its_part(context: Any) -> bool:
    """Whether a primitive is lowered inside a `shard_map` over the whole mesh, where each device has its own arrays."""
    axes = context.module_context.axis_context
    return isinstance(axes, SPMDAxisContext) and not _left_to_xla(axes)


def _left_to_xla(axes: SPMDAxisContext) -> list[str]:
    return [axis for axis in axes.mesh.axis_names if axis not in axes.manual_axes and axes.mesh.shape[axis] > 1]
