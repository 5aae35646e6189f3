"""Finds which arguments of a differentiated function receive a cotangent at all.

JAX fills in zeros for the others, indistinguishable from real zeros. An identity on each argument notices when a
cotangent passes during transposition: JAX skips the transposition of equations without one.
"""

from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Shaped


class Reached:
    """The indices of the arguments that received a cotangent."""

    def __init__(self) -> None:
        self.places: set[int] = set()

    def __repr__(self) -> str:
        """Short, because printed programs contain it."""
        return "Reached"


reached_p = Primitive("reached")


def noticed(x: Shaped[Array, "..."], place: int, reached: Reached) -> Shaped[Array, "..."]:
    """Returns the array itself, and notices its cotangent.

    Args:
        x: An argument of a function that is about to be differentiated.
        place: Its index.
        reached: Collects the index while JAX transposes the function.
    """
    return reached_p.bind(x, place=place, reached=reached)


def _transpose(cotangent: Any, x: Any, *, place: int, reached: Reached) -> list[Any]:
    reached.places.add(place)
    return [cotangent]


reached_p.def_impl(lambda x, **_: x)
reached_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(reached_p, _transpose)
batching.defvectorized(reached_p)
mlir.register_lowering(reached_p, lambda ctx, x, **_: [x])
