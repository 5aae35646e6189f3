"""A barrier that some programs have and others do not, which is known when they are lowered, not before."""

import enum
from typing import Any

from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from .after_partitioning import devices_of


class Programs(enum.Enum):
    """Which programs have a barrier."""

    FOR_ONE_DEVICE = enum.auto()
    FOR_SEVERAL_DEVICES = enum.auto()
    FOR_NVIDIA_GPUS = enum.auto()

    def include(self, context: Any) -> bool:
        """Whether a program is one of them, from the context of a primitive's lowering rule."""
        if self is Programs.FOR_NVIDIA_GPUS:
            return lowered_for_cuda(context)
        return (devices_of(context) > 1) == (self is Programs.FOR_SEVERAL_DEVICES)


def barrier_in(programs: Programs, x: Array) -> Array:
    """The identity; in some programs a barrier.

    Args:
        programs: Which.
        x: Anything.
    """
    return barrier_p.bind(x, programs=programs)


def lowered_for_cuda(context: Any) -> bool:
    """Whether a program is lowered for NVIDIA GPUs alone, from the context of a primitive's lowering rule."""
    module = context.module_context
    return tuple(context.platforms or module.platforms) == ("cuda",)


barrier_p = Primitive("fp8_barrier")
barrier_p.def_impl(lambda x, programs: x)
barrier_p.def_abstract_eval(lambda x, programs: x)
batching.primitive_batchers[barrier_p] = lambda args, axes, programs: (barrier_in(programs, *args), *axes)
# As for `optimization_barrier`, but a tangent is not FP8 data and passes without one.
ad.primitive_jvps[barrier_p] = lambda primals, tangents, programs: (barrier_in(programs, *primals), *tangents)


def _lowered(context: Any, x: Any, *, programs: Programs) -> Any:
    # The operation itself: to trace `lax.optimization_barrier` for each takes JAX longer than the cast that it is for.
    return list(stablehlo.OptimizationBarrierOp([x]).results) if programs.include(context) else [x]


mlir.register_lowering(barrier_p, _lowered)
