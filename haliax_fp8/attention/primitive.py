"""FP8 attention as a JAX primitive with a linear tangent primitive, like the FP8 product.

    fp8_attention(query, key, value, state)
      jvp       -> fp8_attention_tangent(tangents..., residuals...)    linear in the tangents
      transpose -> the backward pass; the amaxes as the state's cotangent

`_product/primitive.py` explains why these are primitives, and how state travels. Under `vmap` the mapped axis becomes
part of the batch, unless the state is mapped too: then each example is a member with its own state.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from .._jax.after_partitioning import lower_with_devices
from .._jax.explicit_axes import aval_of_result
from .._jax.linearization import define_linearization
from .._jax.mapped_axis import to_front
from .._jax.max_grad import require_differentiated_state, require_transposed_state
from .._jax.mesh_axes import all_varying
from .._state.record import cotangent
from .passes import AttentionSpec, Residuals, backward, forward, output, tangent


def fp8_attention(
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch keys kv_heads head_dim"],
    value: Float[Array, "batch keys kv_heads head_dim"],
    state: Array,
    spec: AttentionSpec,
) -> Float[Array, "batch tokens heads head_dim"]:
    """Attention with FP8 products.

    Args:
        query: The queries.
        key: The keys; each head serves the same number of query heads.
        value: The values.
        state: The record of the scales, in float32 or `fp32_max_grad`.
        spec: The static arguments.

    Returns:
        The output in `spec.out_dtype`.
    """
    operands = query, key, value
    query, key, value = all_varying(*operands)
    return fp8_attention_p.bind(query, key, value, state, spec=spec)


# The names in jaxprs. They need not agree with the scope `FP8_ATTENTION` of `_product/names.py`: the preflight reads
# neither, and finds fused attention by the calls of cuDNN.
fp8_attention_p = Primitive("fp8_attention")
fp8_attention_tangent_p = Primitive("fp8_attention_tangent")

_LEAVES = len(Residuals._fields)


def _attention(query: Array, key: Array, value: Array, state: Array, *, spec: AttentionSpec) -> Array:
    return output(query, key, value, state, spec)


def _attention_aval(query: Any, *others: Any, spec: AttentionSpec) -> Any:
    return aval_of_result(query, query.shape, spec.out_dtype)


def _linearize(linear: Sequence[bool], *primals: Any, spec: AttentionSpec) -> Any:
    query, key, value, state = primals
    _check_linear(linear, state)
    out, residuals = forward(query, key, value, state, spec)
    bind = lambda residuals, tangents: fp8_attention_tangent_p.bind(
        *tangents, *residuals, spec=spec, linear=tuple(linear)
    )
    return out, list(residuals), bind


def _jvp(primals: Any, tangents: Any, *, spec: AttentionSpec) -> Any:
    linear = tuple(type(t) is not ad.Zero for t in tangents)
    out, residuals, bind = _linearize(linear, *primals, spec=spec)
    return out, bind(residuals, [t for t in tangents if type(t) is not ad.Zero])


def _check_linear(linear: Sequence[bool], state: Any) -> None:
    """Raises unless JAX will combine the state's gradients correctly."""
    if any(linear[:3]):
        require_differentiated_state(state, linear[3])


def _unpack(args: Sequence[Any], linear: tuple[bool, ...]) -> tuple[list[Any], Residuals]:
    """The equation's operands in the order of binding: tangents (None if zero) and residuals."""
    given = iter(args[:-_LEAVES])
    return [next(given) if is_linear else None for is_linear in linear], Residuals(*args[-_LEAVES:])


def _tangent(*args: Array, spec: AttentionSpec, linear: tuple[bool, ...]) -> Array:
    tangents, residuals = _unpack(args, linear)
    return tangent(tangents[:3], residuals, spec=spec)


def _tangent_aval(*args: Any, spec: AttentionSpec, linear: tuple[bool, ...]) -> Any:
    return _attention_aval(_unpack(args, linear)[1].query, spec=spec)


def _transpose(grad: Any, *args: Any, spec: AttentionSpec, linear: tuple[bool, ...]) -> list[Any]:
    if type(grad) is ad.Zero:
        return [None] * len(args)
    tangents, residuals = _unpack(args, linear)
    if linear[3]:
        require_transposed_state(tangents[3], tangents[:3])
    dtypes = [t.aval.dtype if ad.is_undefined_primal(t) else spec.out_dtype for t in tangents[:3]]
    gradients, measured = backward(
        grad, residuals, spec=spec, dtypes=(dtypes[0], dtypes[1], dtypes[2]), update=linear[3]
    )
    of_record = None if measured is None else cotangent(measured, tangents[3])
    found = zip((*gradients, of_record), tangents, linear, strict=True)
    of_tangents = [ct if ad.is_undefined_primal(t) else None for ct, t, is_linear in found if is_linear]
    return of_tangents + [None] * _LEAVES


# --- `vmap` -----------------------------------------------------------------------------------------------------------


def _into_batch(x: Array, axis: int | None, size: int, position: int) -> Array:
    """Folds an array's mapped axis into its batch."""
    x = to_front(x, axis, size, position)
    return lax.collapse(x, position, position + 2)


def _out_of_batch(x: Array, size: int, position: int) -> Array:
    """Moves a result's mapped axis to the front, where `by_platform.py` puts it too; see `_product/primitive.py`."""
    x = lax.reshape(x, (*x.shape[:position], size, x.shape[position] // size, *x.shape[position + 1 :]))
    return jnp.moveaxis(x, position, 0)


def _attention_batch(args: Any, axes: Any, *, spec: AttentionSpec) -> tuple[Array, int]:
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    if axes[3] is not None:
        args = [to_front(x, axis, size, 0) for x, axis in zip(args, axes, strict=True)]
        return fp8_attention_p.bind(*args, spec=dataclasses.replace(spec, ensemble=spec.ensemble + 1)), 0
    position = spec.ensemble
    operands = [_into_batch(x, axis, size, position) for x, axis in zip(args[:3], axes[:3], strict=True)]
    return _out_of_batch(fp8_attention_p.bind(*operands, args[3], spec=spec), size, position), 0


def _tangent_batch(args: Any, axes: Any, *, spec: AttentionSpec, linear: tuple[bool, ...]) -> tuple[Array, int]:
    """The batching rule for functions that JAX differentiates first and maps afterwards."""
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    (tangents, residuals), (of_tangents, of_residuals) = (_unpack(x, linear) for x in (args, axes))
    if of_tangents[3] is not None or of_residuals.state is not None:
        args = [to_front(x, axis, size, 0) for x, axis in zip(args, axes, strict=True)]
        spec = dataclasses.replace(spec, ensemble=spec.ensemble + 1)
        return fp8_attention_tangent_p.bind(*args, spec=spec, linear=linear), 0
    position = spec.ensemble
    data: tuple[Any, ...] = tuple(residuals)
    arrays = [*tangents[:3], *data[:5]]
    their_axes: tuple[Any, ...] = tuple(of_residuals)
    pairs = zip(arrays, (*of_tangents[:3], *their_axes[:5]), strict=True)
    moved = [None if x is None else _into_batch(x, axis, size, position) for x, axis in pairs]
    measured = residuals.measured
    if of_residuals.measured is not None:
        measured = lax.reduce_max(measured, (of_residuals.measured,))
    given = [x for x in (*moved[:3], tangents[3]) if x is not None]
    out = fp8_attention_tangent_p.bind(*given, *moved[3:], measured, residuals.state, spec=spec, linear=linear)
    return _out_of_batch(out, size, position), 0


for _primitive, _function, _aval, _batch in (
    (fp8_attention_p, _attention, _attention_aval, _attention_batch),
    (fp8_attention_tangent_p, _tangent, _tangent_aval, _tangent_batch),
):
    _primitive.def_impl(_function)
    _primitive.def_abstract_eval(_aval)
    mlir.register_lowering(_primitive, mlir.lower_fun(_function, multiple_results=False))
    batching.primitive_batchers[_primitive] = _batch
lower_with_devices(fp8_attention_p, fp8_attention_tangent_p)
ad.primitive_jvps[fp8_attention_p] = _jvp
define_linearization(fp8_attention_p, _linearize)
ad.primitive_transposes[fp8_attention_tangent_p] = _transpose
