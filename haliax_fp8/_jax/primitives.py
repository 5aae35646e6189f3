"""Rules that several of our primitives share: batching, lowering for each platform, evaluation, and reverse mode."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.ad import Zero
from jaxtyping import Array, Shaped

from .custom_partitioning import lower_with_devices


def to_front(x: Shaped[Array, "..."], axis: int | None, size: int, position: int) -> Shaped[Array, "..."]:
    """Moves an axis to a position near the front, or makes a new one there by repeating."""
    if axis is not None:
        return x if axis == position else jnp.moveaxis(x, axis, position)
    shape = (*x.shape[:position], size, *x.shape[position:])
    return jnp.broadcast_to(jnp.expand_dims(x, position), shape)


def mapped_in_front(args: Sequence[Array], axes: Sequence[int | None]) -> list[Array]:
    """The arguments of a batching rule, each with the mapped axis in front."""
    size = mapped_size(args, axes)
    return [to_front(x, axis, size, 0) for x, axis in zip(args, axes, strict=True)]


def mapped_size(args: Sequence[Array], axes: Sequence[int | None]) -> int:
    """The size of the axis that a batching rule maps."""
    return next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)


def define(
    name: str,
    *,
    aval: Callable[..., Any],
    batch: Callable[..., Any],
    function: Callable[..., Any] | None = None,
    lower: Callable[..., Any] | None = None,
    jvp: Callable[..., Any] | None = None,
    linearize: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
    multiple_results: bool = False,
    with_devices: bool = False,
    **by_platform: Callable[..., Any],
) -> Primitive:
    """A primitive with all of its rules.

    Args:
        name: Its name in programs.
        aval: The abstract value of its result, or of each.
        batch: Its batching rule.
        function: What it computes; None for one that is known only where it is lowered, and so compiled alone.
        lower: Its lowering rule; by default that of `function`.
        jvp: Its rule in forward mode; None if it is not differentiated, or linear.
        linearize: As in `define_linearization`.
        transpose: Its transposition, if it is linear.
        multiple_results: Whether it has a list of results.
        with_devices: As in `lower_with_devices`.
        **by_platform: As in `lower_by_platform`.
    """
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_abstract_eval(aval)
    batching.primitive_batchers[primitive] = batch
    if function is None:
        compile_alone(primitive)
    else:
        primitive.def_impl(function)
        lower = lower or mlir.lower_fun(function, multiple_results=multiple_results)
    assert lower is not None
    lower_by_platform(primitive, lower, **by_platform)
    for rules, rule in ((ad.primitive_jvps, jvp), (ad.primitive_transposes, transpose)):
        if rule is not None:
            rules[primitive] = rule
    if linearize is not None:
        define_linearization(primitive, linearize)
    if with_devices:
        lower_with_devices(primitive)
    return primitive


def lower_by_platform(primitive: Primitive, elsewhere: Callable[..., Any], **by_platform: Callable[..., Any]) -> None:
    """Registers what a primitive is lowered to, by the platform that a program is for.

    It is for primitives what `on_cuda` and `on_cpu` of `xla.py` are for functions.

    Args:
        primitive: The primitive.
        elsewhere: The lowering rule on platforms that have none of their own.
        **by_platform: Further rules by JAX's names for platforms, such as `cpu`, `cuda`, `rocm` and `tpu`.
    """
    mlir.register_lowering(primitive, elsewhere)
    for platform, rule in by_platform.items():
        mlir.register_lowering(primitive, rule, platform=platform)


def compile_alone(primitive: Primitive) -> None:
    """Registers that a primitive is compiled where it is evaluated, with `jax.disable_jit` too.

    There `jax.jit` would evaluate the primitive again, without end.

    Args:
        primitive: The primitive, whose parameters are hashable.
    """

    @functools.cache
    def compiled(names: tuple[str, ...]) -> Any:
        return jax.jit(primitive.bind, static_argnames=names)

    def evaluate(*args: Any, **params: Any) -> Any:
        with jax.disable_jit(False):
            return compiled(tuple(params))(*args, **params)

    primitive.def_impl(evaluate)


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
        from jax._src.interpreters import ad as private_ad
    except ImportError:
        return
    rules = getattr(private_ad, "primitive_linearizations", None)
    fallback = getattr(private_ad, "fallback_linearize_rule", None)
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
        out, saved, function = linearize(tuple(linear), *primals, **params)

        def linearized(residuals: Sequence[Any], _: Any, *tangents: Any) -> Any:
            return function(residuals, [t for t, is_linear in zip(tangents, linear, strict=True) if is_linear])

        return out, True, list(saved), None, linearized

    rules[primitive] = rule
