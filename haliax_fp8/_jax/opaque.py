"""Functions as one equation that JAX does not inspect: differentiating it raises an error, or gives a constant.

The gradient of an FP8 product is computed from operands that are rounded to FP8. Its own derivative would run through
that rounding: JAX would carry tangents in FP8, without a scale, and give numbers that are wrong or NaN. So everything
that rounds is a primitive here, which refuses to be differentiated.

`jax.jit` also makes one equation. But JAX splits it wherever it splits a program, as in every differentiated `scan`,
and that costs time even if nothing changes.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.api_util import debug_info
from jax.core import ShapedArray
from jax.extend import linear_util
from jax.extend.core import Literal, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import trace_to_jaxpr_dynamic
from jaxtyping import Array

from .errors import NotDifferentiable
from .primitives import define
from .private import needs


# Names the arguments in JAX's messages.
_LEAVES_SIGNATURE = inspect.signature(lambda *leaves: None)


def opaque[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Turns a function of trees of arrays into a primitive; differentiating it raises a `ValueError` with the remedy.

    Args:
        function: The function. Its keyword arguments are static and must be hashable; all others are trees of arrays.
    """
    return _one_equation(function, _refuse)


def opaque_constant[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """The same for functions of state: automatic differentiation treats their results as constants.

    A gradient through an update of state has no meaning, but may be taken on the way to others, as in meta-learning.

    Args:
        function: As in `opaque`.
    """
    return _one_equation(function, _constant)


def _one_equation[**P, T](function: Callable[P, T], jvp: Callable[..., Any]) -> Callable[P, T]:
    primitive = Primitive(f"fp8_{function.__name__.strip('_')}")
    primitive.multiple_results = True

    # JAX's own cache, which is cleared with JAX's others, and tells contexts such as meshes apart. `jit` could trace
    # too, but it walks the trees of arguments some twenty times.
    @linear_util.cache
    def traced(key: Any, structure: Any, static: Any, avals: tuple[Any, ...]) -> tuple[Any, Any]:
        """The program, as a function of leaves, and the structure of its results."""
        del key
        structures = []

        def flat_function(*leaves: Any) -> Sequence[Any]:
            results, out_structure = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves), **dict(static)))
            structures.append(out_structure)
            return results

        return _traced(primitive.name, function, flat_function, avals), structures[0]

    # The cache takes functions in this form.
    key = linear_util.wrap_init(
        function, debug_info=debug_info(primitive.name, function, (), {}, signature=_LEAVES_SIGNATURE)
    )

    @functools.cache
    def mapped() -> Callable[..., Any]:
        """The batched function, equally opaque."""

        def call_mapped(*leaves: Any, axes: Any, out_axes: Any, jaxpr: Any) -> Any:
            return jax.vmap(jaxpr_as_fun(jaxpr), in_axes=axes, out_axes=list(out_axes))(*leaves)

        call_mapped.__name__ = function.__name__
        return _one_equation(call_mapped, jvp)

    def batched(leaves: Any, axes: Any, *, jaxpr: Any) -> Any:
        # Results that no mapped operand reaches stay one array, such as the quantized kernel that examples share.
        out_axes = _mapped_results(jaxpr, [axis is not None for axis in axes])
        return mapped()(*leaves, axes=tuple(axes), out_axes=out_axes, jaxpr=jaxpr), out_axes

    primitive.def_impl(_evaluated)
    primitive.def_abstract_eval(lambda *avals, jaxpr: jaxpr.out_avals)
    mlir.register_lowering(primitive, functools.partial(_lowered, name=primitive.name))
    ad.primitive_jvps[primitive] = functools.partial(jvp, primitive)
    batching.primitive_batchers[primitive] = batched

    @functools.wraps(function)
    def call(*args: Any, **static: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        jaxpr, out_structure = traced(key, structure, tuple(sorted(static.items())), tuple(map(jax.typeof, leaves)))
        return jax.tree.unflatten(out_structure, primitive.bind(*leaves, jaxpr=jaxpr))

    return call


def _lowered(ctx: Any, *leaves: Any, name: str, jaxpr: Any) -> Any:
    # Ours is not called `call_jaxpr`: `checkify` binds primitives with such a parameter as JAX binds its own calls.
    return mlir.core_call_lowering(ctx, *leaves, name=name, call_jaxpr=jaxpr)


def _evaluated(*leaves: Any, jaxpr: Any) -> Sequence[Array]:
    """A traced function outside `jit`: compiled, also under `jax.disable_jit`.

    Not the primitive itself: with `jax_debug_nans`, JAX runs a program that made a NaN again, operation by operation,
    and would compile it again, without end.
    """
    with jax.disable_jit(False):
        return _compiled(*leaves, jaxpr=jaxpr)


@functools.partial(jax.jit, static_argnames="jaxpr")
def _compiled(*leaves: Any, jaxpr: Any) -> Sequence[Array]:
    return jaxpr_as_fun(jaxpr)(*leaves)


def _traced(name: str, function: Callable[..., Any], flat_function: Callable[..., Any], avals: Sequence[Any]) -> Any:
    """The program of a function of leaves, as primitives keep it.

    A Pallas kernel is traced with references, which JAX removes with `lower=True`.

    Args:
        name: What it is called in JAX's messages.
        function: The function that was written, for these messages.
        flat_function: The same as a function of arrays that returns a sequence of arrays.
        avals: The types of its arguments.
    """
    about = debug_info(name, function, tuple(avals), {}, signature=_LEAVES_SIGNATURE)
    wrapped = linear_util.wrap_init(flat_function, debug_info=about)
    jaxpr, _, constants = trace_to_jaxpr_dynamic(wrapped, avals, lower=True)
    return jaxpr.with_consts(constants)


def _mapped_results(jaxpr: Any, are_mapped: Sequence[bool]) -> tuple[int | None, ...]:
    """The mapped axis of each result if `vmap` maps some operands: 0 if it depends on one of these, else None."""
    inner = jaxpr.jaxpr
    mapped = {var for var, is_mapped in zip(inner.invars, are_mapped, strict=True) if is_mapped}
    are_mapped_atoms = lambda atoms: [not isinstance(x, Literal) and x in mapped for x in atoms]
    for equation in inner.eqns:
        operands, params = are_mapped_atoms(equation.invars), equation.params
        is_call = equation.primitive.name == "jit" or equation.primitive.name.startswith("fp8_")
        called = params.get("call_jaxpr", params.get("jaxpr") if is_call else None)
        if called is not None and any(operands):
            results = [axis is not None for axis in _mapped_results(called, operands)]
        else:
            results = [any(operands)] * len(equation.outvars)
        mapped.update(var for var, is_mapped in zip(equation.outvars, results, strict=True) if is_mapped)
    return tuple(0 if is_mapped else None for is_mapped in are_mapped_atoms(inner.outvars))


def _constant(primitive: Primitive, primals: Any, tangents: Any, **params: Any) -> Any:
    del tangents
    results = primitive.bind(*primals, **params)
    return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]


def _refuse(primitive: Primitive, primals: Any, tangents: Any, **params: Any) -> Any:
    del primitive, primals, tangents, params
    raise NotDifferentiable(
        "an FP8 product was differentiated twice: the derivative of its gradient (a Hessian, a Hessian-vector "
        "product) is not defined, because the gradient's operands are rounded to FP8. Compute second derivatives with "
        "the layers in high precision: restore_linear_layers(model) gives the same model without FP8"
    )


def as_if_on_one_device() -> contextlib.AbstractContextManager[Any]:
    """In this context functions are traced inside `shard_map` as if nothing differed among devices."""
    with needs("a Pallas kernel inside shard_map"):
        from jax._src import config

        return config._check_vma(False)


def on_one_device(function: Callable[..., Array], *arrays: Array) -> Array:
    """`function(*arrays)`, traced inside `shard_map` as if nothing differed among devices, and opaque to it.

    Pallas' pipelines for Blackwell refuse references to arrays that vary over devices; on TPUs, its calls require a
    statement of which results do. A Pallas kernel does not communicate, so it need not know; the caller marks the
    result as varying.
    """
    with as_if_on_one_device():
        avals = [ShapedArray(x.shape, x.dtype) for x in arrays]
        jaxpr = _traced(_on_one_device_p.name, function, lambda *arrays: [function(*arrays)], avals)
    (result,) = _on_one_device_p.bind(*arrays, jaxpr=jaxpr)
    return result


_on_one_device_p = define(
    "fp8_on_one_device",
    aval=lambda *avals, jaxpr: jaxpr.out_avals,
    batch=lambda arrays, axes, *, jaxpr: (
        jax.vmap(jaxpr_as_fun(jaxpr), in_axes=axes)(*arrays),
        [0] * len(jaxpr.out_avals),
    ),
    function=_evaluated,
    lower=functools.partial(_lowered, name="fp8_on_one_device"),
    multiple_results=True,
)
