"""Which arguments of a differentiated function receive a cotangent, and which ones its value depends on.

JAX fills in zeros for arguments without a cotangent, and nobody can tell them from real zeros. `tagged` is an identity
that records which cotangents pass it during transposition: JAX passes no cotangent for the other arguments.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array


class UsedArguments:
    """The indices of the arguments that received a cotangent, and the number of all arguments."""

    def __init__(self) -> None:
        self.indices: set[int] = set()
        self.count = 0

    @property
    def missing(self) -> set[int]:
        """The indices of those that received none."""
        return set(range(self.count)) - self.indices

    def __repr__(self) -> str:
        """Short, because printed programs contain it."""
        return "UsedArguments"


used_p = Primitive("used")
used_p.multiple_results = True


def tagged(arrays: Sequence[Array], used: UsedArguments) -> list[Array]:
    """The arrays, tagged so that `used` records their cotangents; one equation for all, which JAX handles faster.

    Args:
        arrays: Arguments of a function that is about to be differentiated.
        used: Collects the indices of those with a cotangent while JAX transposes the function.
    """
    used.count = len(arrays)
    return used_p.bind(*arrays, used=used)


def _transpose(cotangents: Any, *arrays: Any, used: UsedArguments) -> list[Any]:
    used.indices |= {i for i, cotangent in enumerate(cotangents) if type(cotangent) is not ad.Zero}
    return cotangents


used_p.def_impl(lambda *arrays, **_: list(arrays))
used_p.def_abstract_eval(lambda *arrays, **_: list(arrays))
ad.deflinear2(used_p, _transpose)
batching.primitive_batchers[used_p] = lambda arrays, axes, **params: (used_p.bind(*arrays, **params), axes)
mlir.register_lowering(used_p, lambda ctx, *arrays, **_: list(arrays))


def depends_on(function: Callable[[Any], Array], argument: Any) -> list[bool]:
    """Whether the value of a function depends on each array of its argument, as far as its equations tell.

    Args:
        function: The function; it is traced.
        argument: A tree of arrays.
    """
    return dce_jaxpr(jax.make_jaxpr(function)(argument).jaxpr, [True])[1]
