"""A function as one equation that JAX neither inspects nor differentiates.

The gradient of an FP8 product is computed from operands that are rounded to FP8. Its own derivative would run through
that rounding: JAX would carry tangents in FP8, without a scale, and give numbers that are wrong or NaN. So everything
that rounds is a primitive here, which refuses to be differentiated.

`jax.jit` also makes one equation. But JAX splits it wherever it splits a program, as in every differentiated `scan`,
and that costs time even if nothing changes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import Literal, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array


def opaque[**P, T](*static_argnames: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function of trees of arrays a primitive; differentiating it raises a `ValueError` with the remedy.

    Args:
        static_argnames: The names of its keyword arguments, which are hashable; all others are trees of arrays.

    Returns:
        A decorator.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        jitted = jax.jit(function, static_argnames=static_argnames)
        primitive = Primitive(f"fp8_{function.__name__.strip('_')}")
        primitive.multiple_results = True

        def flat(*leaves: Any, structure: Any, static: Any, call_jaxpr: Any = None) -> Any:
            del call_jaxpr
            return jax.tree.leaves(jitted(*jax.tree.unflatten(structure, leaves), **dict(static)))

        @functools.cache
        def mapped() -> Callable[..., Any]:
            """The batched function, equally opaque."""

            def call_mapped(*leaves: Any, axes: Any, out_axes: Any, structure: Any, static: Any) -> Any:
                one = functools.partial(flat, structure=structure, static=static)
                return jax.vmap(one, in_axes=axes, out_axes=list(out_axes))(*leaves)

            call_mapped.__name__ = function.__name__
            return opaque("axes", "out_axes", "structure", "static")(call_mapped)

        def batched(leaves: Any, axes: Any, *, structure: Any, static: Any, call_jaxpr: Any) -> Any:
            # Results that no mapped operand reaches stay one array, such as the quantized kernel that examples share.
            out_axes = _mapped_results(call_jaxpr, [axis is not None for axis in axes])
            params = {"out_axes": out_axes, "structure": structure, "static": static}
            return mapped()(*leaves, axes=tuple(axes), **params), out_axes

        primitive.def_impl(flat)
        primitive.def_abstract_eval(lambda *avals, call_jaxpr, **params: call_jaxpr.out_avals)
        mlir.register_lowering(primitive, functools.partial(mlir.core_call_lowering, name=primitive.name))
        ad.primitive_jvps[primitive] = _refuse
        batching.primitive_batchers[primitive] = batched

        @functools.wraps(function)
        def call(*args: Any, **static_arguments: Any) -> Any:
            leaves, structure = jax.tree.flatten(args)
            traced = jitted.trace(*jax.tree.unflatten(structure, map(jax.typeof, leaves)), **static_arguments)
            static = tuple(sorted(static_arguments.items()))
            results = primitive.bind(*leaves, structure=structure, static=static, call_jaxpr=_low(traced.jaxpr))
            return jax.tree.unflatten(jax.tree.structure(traced.out_info), results)

        return call

    return decorate


def _low(jaxpr: Any) -> Any:
    """A traced function as primitives keep it: a Pallas kernel is traced with references, which JAX later removes.

    On versions of JAX without `lower_jaxpr2` there is nothing to do.
    """
    return pe.lower_jaxpr2(jaxpr) if getattr(jaxpr, "is_high", False) else jaxpr


def _mapped_results(jaxpr: Any, are_mapped: Sequence[bool]) -> tuple[int | None, ...]:
    """The mapped axis of each result if `vmap` maps some operands: 0 if it depends on one of these, else None."""
    inner = jaxpr.jaxpr
    mapped = {var for var, is_mapped in zip(inner.invars, are_mapped, strict=True) if is_mapped}
    of_atoms = lambda atoms: [not isinstance(x, Literal) and x in mapped for x in atoms]
    for equation in inner.eqns:
        operands, called = of_atoms(equation.invars), equation.params.get("jaxpr")
        if equation.primitive.name == "jit" and any(operands):
            results = [axis is not None for axis in _mapped_results(called, operands)]
        else:
            results = [any(operands)] * len(equation.outvars)
        mapped.update(var for var, is_mapped in zip(equation.outvars, results, strict=True) if is_mapped)
    return tuple(0 if is_mapped else None for is_mapped in of_atoms(inner.outvars))


def _refuse(primals: Any, tangents: Any, **params: Any) -> Any:
    raise ValueError(
        "an FP8 product was differentiated twice: the derivative of its gradient (a Hessian, a Hessian-vector "
        "product) is not defined, because the gradient's operands are rounded to FP8. Compute second derivatives with "
        "the layers in high precision: restore_linear_layers(model) gives the same model without FP8"
    )


def on_one_device(function: Callable[..., Array], *arrays: Array) -> Array:
    """`function(*arrays)`, traced inside `shard_map` as if nothing differed among devices, and opaque to it.

    Pallas' pipelines for Blackwell refuse references to arrays that vary over devices; on TPUs, its calls require a
    statement of which results do. A Pallas kernel does not communicate, so it need not know; the caller marks the
    result as varying.
    """
    with config._check_vma(False):
        traced = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
    (result,) = _on_one_device_p.bind(*arrays, call_jaxpr=_low(traced))
    return result


_on_one_device_p = Primitive("fp8_on_one_device")
_on_one_device_p.multiple_results = True
_on_one_device_p.def_impl(lambda *arrays, call_jaxpr: jax.jit(jaxpr_as_fun(call_jaxpr))(*arrays))
_on_one_device_p.def_abstract_eval(lambda *avals, call_jaxpr: call_jaxpr.out_avals)
mlir.register_lowering(_on_one_device_p, functools.partial(mlir.core_call_lowering, name=_on_one_device_p.name))
batching.primitive_batchers[_on_one_device_p] = lambda arrays, axes, *, call_jaxpr: (
    jax.vmap(jaxpr_as_fun(call_jaxpr), in_axes=axes)(*arrays),
    [0] * len(call_jaxpr.out_avals),
)
