"""JAX's `custom_partitioning` inside `shard_map`, written by hand, because JAX has nothing public for it.

There each device has its part already, and `jax.experimental.custom_partitioning` lowers the call in place, where XLA's
partitioner sees it. So this writes the custom call itself, and enters what XLA will ask for in JAX's private table of
callbacks. Of all that is here, a new JAX is most likely to break this; no other file writes into JAX's tables for it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import mlir
from jax.sharding import Sharding
from jaxtyping import Array

from .private import needs


def by_each_device(context: Any, operands: Sequence[Any], function: Callable[..., Array]) -> Any:
    """Lowers a function, applied to each device's part and still hidden from the partitioner.

    Args:
        context: The context of a primitive's lowering rule, inside `shard_map`.
        operands: The operands that the rule receives.
        function: What each device computes.
    """
    with needs("a product in blocks inside shard_map"):
        from jax._src.custom_partitioning import (
            _CUSTOM_PARTITIONING_CALL_NAME,
            _sharding_callbacks,
            _ShardingCallbackInfo,
        )
        from jax._src.interpreters.mlir import custom_call
    module = context.module_context
    structure = jax.tree.structure(tuple(context.avals_in))
    call = _ShardingCallbackInfo(
        propagate_user_sharding=None,
        partition=lambda mesh, args, result: (mesh, function, result.sharding, tuple(x.sharding for x in args)),
        to_mesh_pspec_sharding=lambda sharding, ndim: _AsItIs(sharding),
        in_tree=structure,
        out_tree=jax.tree.structure(0),
        infer_sharding_from_operands=None,
        module_context=module,
        mesh=module.axis_context.mesh,
        static_args=(),
    )
    # XLA looks up this name for as long as the program lives.
    key = str(id(call))
    _sharding_callbacks[key.encode()] = call
    module.add_keepalive(call)
    types = [mlir.ir.RankedTensorType.get(x.shape, mlir.dtype_to_ir_type(x.dtype)) for x in context.avals_out]
    name = _CUSTOM_PARTITIONING_CALL_NAME
    return custom_call(name, result_types=types, operands=operands, backend_config=key).results


class _AsItIs(Sharding):
    """A sharding from XLA, which only XLA has to understand."""

    def __init__(self, sharding: Any) -> None:
        self.sharding = sharding

    def check_compatible_aval(self, aval_shape: Any) -> None:
        """Accepts any shape: XLA chose the sharding for it."""

    def _to_xla_hlo_sharding(self, num_dimensions: int) -> Any:
        return self.sharding
