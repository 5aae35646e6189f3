"""Gives a primitive its own rule for reverse mode."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters.ad import Zero
from jaxtyping import Array


def define_linearization(primitive: Any, linearize: Callable[..., tuple[Array, Sequence[Array], Callable]]) -> None:
    """Gives a primitive with one result its own rule for reverse mode; otherwise JAX would split its JVP.

    Splitting finds the same residuals and the same linear function, but costs as much as tracing both again. If the
    installed JAX calls such rules differently, this does nothing, and JAX splits the JVP.

    Args:
        primitive: The primitive; it has a JVP too, for forward mode.
        linearize: `linearize(linear, *primals, **params)` returns the result, residuals, and a function of residuals
            and tangents (only those that `linear` says are not zero) that returns the result's tangent.
    """
    try:
        from jax._src.interpreters import ad
    except ImportError:
        return
    rules = getattr(ad, "primitive_linearizations", None)
    fallback = getattr(ad, "fallback_linearize_rule", None)
    expected = ["_prim", "_is_vjp", "_nonzeros", "primals", "params"]
    if rules is None or fallback is None or list(inspect.signature(fallback).parameters) != expected:
        return

    def rule(is_vjp: bool, nonzeros: Sequence[bool], *primals: Any, **params: Any) -> tuple[Any, ...]:
        # JAX may pass integer tangents that are not marked as zero.
        linear = [
            nz and jax.typeof(p).to_tangent_aval().dtype != jax.dtypes.float0
            for nz, p in zip(nonzeros, primals, strict=True)
        ]
        if not any(linear):
            out = primitive.bind(*primals, **params)
            return out, False, [], None, lambda residuals, _, *tangents: Zero(jax.typeof(out).to_tangent_aval())
        out, kept, function = linearize(tuple(linear), *primals, **params)

        def linearized(residuals: Sequence[Any], _: Any, *tangents: Any) -> Any:
            return function(residuals, [t for t, is_linear in zip(tangents, linear, strict=True) if is_linear])

        return out, True, list(kept), None, linearized

    rules[primitive] = rule
