"""Which arguments a traced function donates in a `jit` of its own, which JAX forgets inside another `jit`."""

from typing import Any


def donated_inside(traced: Any) -> list[bool]:
    """Whether a `jit` inside a traced function donates each of its flat arguments.

    Args:
        traced: What `jax.jit(function).trace(...)` returned.
    """
    jaxpr = traced.jaxpr.jaxpr
    donated = set()
    for equation in jaxpr.eqns:
        flags = equation.params.get("donated_invars", ())
        donated |= {id(var) for var, flag in zip(equation.invars, flags, strict=False) if flag}
    return [id(var) in donated for var in jaxpr.invars]
