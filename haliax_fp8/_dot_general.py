"""The FP8 product as a JAX primitive with a linear tangent primitive.

Why a primitive and not `jax.custom_vjp`: JAX batches before it differentiates. Under `vmap`, `fp8_dot` folds the mapped
axis into the product, and only then is it differentiated: one product per gradient, one amax over everything, the same
program as the batched call. A `custom_vjp` is differentiated example by example: amaxes get summed, and the kernel's
gradient becomes a batch of outer products. `vmap(grad(f))`, where differentiation comes first, still gives per-example
gradients; and forward mode works, which `custom_vjp` refuses.

    fp8_dot(lhs, rhs, *state)                      quantize, multiply, rescale
      jvp       -> fp8_dot_tangent(tangents..., residuals...)      linear in the tangents
      transpose -> quantize the output's gradient; dgrad, wgrad; the new state as the state's cotangent

Residuals are the quantized operands, once each, and three scalars. State enters as arrays `scale` and `amax_history`
(none for a stateless recipe) and leaves as their cotangent, already updated; see `_state.py` for several uses.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32

from ._dimension_numbers import DotDimensions
from ._quantized_array import QuantizedArray, quantize
from ._recipe import Quantization, Recipe
from ._state import is_max_grad, to_float32, to_max_grad


@dataclasses.dataclass(frozen=True)
class ProductSpec:
    """All that is static about one FP8 product.

    Args:
        recipe: How the operands are quantized.
        dimensions: Which axes are contracted, batched and free, those of the ensemble not counted.
        kernel_is_lhs: Which operand is the kernel: `einsum` may have swapped them.
        compute_dtype: The dtype that operands and output are rounded to around the product; None leaves them.
        out_dtype: The dtype of the output.
        precision: Of fprop. The default lets the hardware accumulate fast; dgrad and wgrad never do.
        ensemble: How many leading axes of every array number independent members, each with state of its own.
    """

    recipe: Recipe
    dimensions: DotDimensions
    kernel_is_lhs: bool
    compute_dtype: np.dtype | None
    out_dtype: np.dtype
    precision: lax.Precision
    ensemble: int = 0

    @property
    def quantizations(self) -> tuple[Quantization, Quantization, Quantization]:
        """Of lhs, rhs and the output's gradient."""
        lhs, rhs, grad = (self.recipe.quantizations[i] for i in self.state_rows)
        return lhs, rhs, grad

    @property
    def state_rows(self) -> tuple[int, int, int]:
        """Where state (in the order input, kernel, output gradient) describes lhs, rhs and the output's gradient."""
        return (1, 0, 2) if self.kernel_is_lhs else (0, 1, 2)


def fp8_dot_general(
    lhs: Float[Array, "..."], rhs: Float[Array, "..."], state: tuple[Array, ...], spec: ProductSpec
) -> Float[Array, "..."]:
    """`lax.dot_general` in the formats of a recipe.

    `out = dot(q(lhs), q(rhs)) * (scale_lhs * scale_rhs)`, accumulated in float32.

    Args:
        lhs: The first operand.
        rhs: The second operand.
        state: `(scale, amax_history)` in float32 or `fp32_max_grad`, or `()` for a stateless recipe.
        spec: What is static.

    Returns:
        The product in `spec.out_dtype`, dimensions in the order batch, free of lhs, free of rhs.
    """
    lhs, rhs = _vary_together(lhs, rhs)
    return fp8_dot_p.bind(lhs, rhs, *state, spec=spec)


def _vary_together(*arrays: Array) -> Sequence[Array]:
    """Inside `shard_map`, marks operands as varying over the same mesh axes; its transpose sums their gradients."""
    varying = [_varying_axes(x) for x in arrays]
    union = frozenset().union(*varying)
    return [lax.pcast(x, tuple(union - v), to="varying") if union - v else x for x, v in zip(arrays, varying)]


def _varying_axes(x: Array) -> frozenset[str]:
    aval = jax.typeof(x)
    axes = getattr(aval, "manual_axis_type", None)  # JAX 0.12 moved `vma` here.
    return frozenset(axes.varying if axes is not None else getattr(aval, "vma", ()))


def _amax(x: Float[Array, "..."], spec: ProductSpec, state_axes: frozenset[str]) -> Float32[Array, "*ensemble"]:
    amax = jnp.max(jnp.abs(x), axis=tuple(range(spec.ensemble, x.ndim)), initial=0.0).astype(jnp.float32)
    # Where devices hold parts of the operand but share the state, the amax is that of all parts.
    if axes := tuple(sorted(_varying_axes(x) - state_axes)):
        amax = lax.pmax(amax, axes)
    return amax


def _round_to(x: Array, dtype: np.dtype | None) -> Array:
    return x if dtype is None else x.astype(dtype)


def _quantize(x: Array, role: int, state: tuple[Array, ...], spec: ProductSpec) -> QuantizedArray:
    """Quantizes lhs (role 0), rhs (1) or the output's gradient (2)."""
    quantization = spec.quantizations[role]
    stored = state[0][..., spec.state_rows[role]] if quantization.scaling.stateful else None
    scale = quantization.scaling.scale(x, quantization.format, stored, spec.ensemble)
    return quantize(x, scale, quantization.format)


def _product(a: QuantizedArray, b: QuantizedArray, dims: DotDimensions, precision: lax.Precision) -> Array:
    """`dot(a, b)` in float32, for scales that are constant along what is contracted, and so factor out of the sum."""
    out = lax.dot_general(a.data, b.data, dims.numbers, precision=precision, preferred_element_type=jnp.float32)
    batch, kept_a, kept_b = len(dims.lhs_batch), len(dims.lhs_free), len(dims.rhs_free)
    scale_a = jnp.transpose(a.scale, dims.lhs_batch + dims.lhs_free + dims.lhs_contract)
    scale_b = jnp.transpose(b.scale, dims.rhs_batch + dims.rhs_free + dims.rhs_contract)
    scale_a = scale_a.reshape(scale_a.shape[: batch + kept_a] + (1,) * kept_b)
    scale_b = scale_b.reshape(scale_b.shape[:batch] + (1,) * kept_a + scale_b.shape[batch : batch + kept_b])
    return out * jnp.broadcast_to(scale_a * scale_b, out.shape)


# Quantized lhs and rhs, and their amaxes where state records them.
type _Residuals = tuple[tuple[QuantizedArray, QuantizedArray], Array | None]


@functools.partial(jax.jit, static_argnames="spec")
def _forward(
    lhs: Array, rhs: Array, state: tuple[Array, ...], *, spec: ProductSpec
) -> tuple[Array, "_Residuals"]:
    """The output, and the residuals of the backward pass: quantized operands and their amaxes."""
    lhs, rhs = _round_to(lhs, spec.compute_dtype), _round_to(rhs, spec.compute_dtype)
    with jax.named_scope("fprop"):
        quantized = _quantize(lhs, 0, state, spec), _quantize(rhs, 1, state, spec)
        out = _product(*quantized, spec.dimensions.with_batch_axes(spec.ensemble), spec.precision)
        out = _round_to(out, spec.compute_dtype).astype(spec.out_dtype)
    state_axes = _varying_axes(state[0]) if state else frozenset()
    amaxes = jnp.stack([_amax(x, spec, state_axes) for x in (lhs, rhs)], axis=-1) if state else None
    return out, (quantized, amaxes)


@functools.partial(jax.jit, static_argnames=("spec", "dtypes", "update"))
def _backward(
    grad: Array,
    residuals: "_Residuals",
    state: tuple[Array, ...],
    *,
    spec: ProductSpec,
    dtypes: tuple[np.dtype | None, np.dtype | None],
    update: bool,
) -> tuple[tuple[Array | None, Array | None], tuple[Array, ...]]:
    """The gradients of lhs and rhs in the dtypes given (None: not wanted), and if wanted the next step's state."""
    (lhs, rhs), amaxes = residuals
    grad = _round_to(grad, spec.compute_dtype)
    dims = spec.dimensions.with_batch_axes(spec.ensemble)
    quantized = _quantize(grad, 2, state, spec)

    def gradient(other: QuantizedArray, which: tuple[DotDimensions, tuple[int, ...]], dtype: np.dtype) -> Array:
        out = jnp.transpose(_product(quantized, other, which[0], lax.Precision.HIGHEST), which[1])
        return _round_to(out, spec.compute_dtype).astype(dtype)

    names = ("wgrad", "dgrad") if spec.kernel_is_lhs else ("dgrad", "wgrad")
    with jax.named_scope(names[0]):
        grad_lhs = None if dtypes[0] is None else gradient(rhs, dims.gradient_of_lhs(), dtypes[0])
    with jax.named_scope(names[1]):
        grad_rhs = None if dtypes[1] is None else gradient(lhs, dims.gradient_of_rhs(), dtypes[1])
    gradients = grad_lhs, grad_rhs
    if not (state and update):
        return gradients, ()
    scale, history = state
    observed = amaxes[..., 0], amaxes[..., 1], _amax(grad, spec, _varying_axes(scale))
    # From the order lhs, rhs, output gradient into that of the state.
    observed = jnp.stack([observed[spec.state_rows.index(row)] for row in range(3)], axis=-1)
    delayed = spec.recipe.delayed
    assert delayed is not None
    return gradients, delayed.update(scale, history, observed, tuple(q.format.max for q in spec.recipe.quantizations))


@functools.partial(jax.jit, static_argnames=("spec", "linear"))
def _tangent(tangents: Sequence[Array], residuals: "_Residuals", *, spec: ProductSpec, linear: tuple[bool, ...]) -> Array:
    """The output's tangent, `dot(dlhs, rhs) + dot(lhs, drhs)`, rounding taken as the identity."""
    (lhs, rhs), _ = residuals
    dims = spec.dimensions.with_batch_axes(spec.ensemble)
    given = iter(tangents)
    dlhs, drhs = (next(given) if is_linear else None for is_linear in linear[:2])
    product = functools.partial(
        lax.dot_general, dimension_numbers=dims.numbers, precision=lax.Precision.HIGHEST, preferred_element_type=np.float32
    )
    terms = []
    if dlhs is not None:
        terms.append(product(dlhs.astype(jnp.float32), rhs.dequantize()))
    if drhs is not None:
        terms.append(product(lhs.dequantize(), drhs.astype(jnp.float32)))
    if not terms:
        shape = dims.out_shape(lhs.data.shape, rhs.data.shape)
        return jnp.zeros(shape, spec.out_dtype)
    return sum(terms[1:], start=terms[0]).astype(spec.out_dtype)


# --- The primitives -------------------------------------------------------------------------------------------------

fp8_dot_p = Primitive("fp8_dot")
fp8_dot_tangent_p = Primitive("fp8_dot_tangent")
first_order_p = Primitive("first_order")


def _fp8_dot(lhs: Array, rhs: Array, *state: Array, spec: ProductSpec) -> Array:
    return _forward(lhs, rhs, tuple(map(to_float32, state)), spec=spec)[0]


def _fp8_dot_aval(lhs, rhs, *state, spec: ProductSpec):
    shape = spec.dimensions.with_batch_axes(spec.ensemble).out_shape(lhs.shape, rhs.shape)
    return _aval_like(lhs, shape, spec.out_dtype)


def _aval_like(aval, shape: tuple[int, ...], dtype: np.dtype):
    return aval.update(shape=shape, dtype=dtype, weak_type=False, sharding=aval.sharding.update(spec=P(*[None] * len(shape))))


def _fp8_dot_jvp(primals, tangents, *, spec: ProductSpec):
    lhs, rhs, *state = primals
    state = tuple(map(to_float32, state))
    out, residuals = _forward(first_order_p.bind(lhs), first_order_p.bind(rhs), state, spec=spec)
    linear = tuple(type(t) is not ad.Zero for t in tangents)
    given = [t for t, is_linear in zip(tangents, linear) if is_linear]
    leaves, structure = jax.tree.flatten((residuals, state))
    return out, fp8_dot_tangent_p.bind(*given, *leaves, spec=spec, linear=linear, structure=structure)


def _fp8_dot_batch(args, axes, *, spec: ProductSpec):
    """Folds the mapped axis into the product; only state that is mapped too makes independent members."""
    lhs, rhs, *state = args
    lhs_axis, rhs_axis, *state_axes = axes
    if any(axis is not None for axis in state_axes):
        size = next(x.shape[axis] for x, axis in zip(args, axes) if axis is not None)
        args = [_to_front(x, axis, size) for x, axis in zip(args, axes)]
        return fp8_dot_p.bind(*args, spec=dataclasses.replace(spec, ensemble=spec.ensemble + 1)), 0
    if lhs_axis is not None:
        lhs = jnp.moveaxis(lhs, lhs_axis, spec.ensemble)
    if rhs_axis is not None:
        rhs = jnp.moveaxis(rhs, rhs_axis, spec.ensemble)
    if rhs_axis is None:
        dimensions, out_axis = spec.dimensions.with_axis_in_lhs()
    elif lhs_axis is None:
        dimensions, out_axis = spec.dimensions.with_axis_in_rhs()
    else:
        dimensions, out_axis = spec.dimensions.with_batch_axis()
    out = fp8_dot_p.bind(lhs, rhs, *state, spec=dataclasses.replace(spec, dimensions=dimensions))
    return out, out_axis + spec.ensemble


def _to_front(x: Array, axis: int | None, size: int) -> Array:
    return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)


def _unpack(args, linear: tuple[bool, ...], structure):
    """The equation's operands as they were bound: tangents (None where zero), residuals, state."""
    given = iter(args[: sum(linear)])
    tangents = [next(given) if is_linear else None for is_linear in linear]
    residuals, state = jax.tree.unflatten(structure, args[sum(linear) :])
    return tangents, residuals, state


def _fp8_dot_tangent(*args: Array, spec: ProductSpec, linear: tuple[bool, ...], structure) -> Array:
    tangents, residuals, _ = _unpack(args, linear, structure)
    return _tangent([t for t in tangents[:2] if t is not None], residuals, spec=spec, linear=linear)


def _fp8_dot_tangent_aval(*args, spec: ProductSpec, linear: tuple[bool, ...], structure):
    _, ((lhs, rhs), _), _ = _unpack(args, linear, structure)
    return _fp8_dot_aval(lhs.data, rhs.data, spec=spec)


def _fp8_dot_transpose(grad, *args, spec: ProductSpec, linear: tuple[bool, ...], structure):
    tangents, residuals, state = _unpack(args, linear, structure)
    if type(grad) is ad.Zero:
        return [None] * len(args)
    dtypes = tuple(t.aval.dtype if ad.is_undefined_primal(t) else None for t in tangents[:2])
    gradients, new_state = _backward(
        first_order_p.bind(grad), residuals, state, spec=spec, dtypes=dtypes, update=any(linear[2:])
    )
    cotangents = [*gradients, *(new_state or [None] * len(state))]
    for i, tangent in enumerate(tangents):
        if i >= 2 and ad.is_undefined_primal(tangent) and is_max_grad(tangent.aval):
            cotangents[i] = to_max_grad(cotangents[i])
    undefined = [ct if ad.is_undefined_primal(t) else None for ct, t in zip(cotangents, tangents)]
    return [ct for ct, is_linear in zip(undefined, linear) if is_linear] + [None] * (len(args) - sum(linear))


def _fp8_dot_tangent_batch(args, axes, **params):
    """Reached in forward mode only: reverse mode transposes before it batches, or batches `fp8_dot` itself."""
    return jax.vmap(functools.partial(_fp8_dot_tangent, **params), in_axes=tuple(axes))(*args), 0


def _first_order_jvp(primals, tangents):
    raise ValueError(
        "an FP8 product was differentiated twice: the derivative of its gradient (a Hessian, a Hessian-vector product) "
        "is not defined, because the gradient's operands are rounded to FP8. Compute second derivatives with the layers "
        "in high precision: restore_linear_layers(model) gives the same model without FP8"
    )


for _primitive, _function, _aval in (
    (fp8_dot_p, _fp8_dot, _fp8_dot_aval),
    (fp8_dot_tangent_p, _fp8_dot_tangent, _fp8_dot_tangent_aval),
):
    _primitive.def_impl(_function)
    _primitive.def_abstract_eval(_aval)
    mlir.register_lowering(_primitive, mlir.lower_fun(_function, multiple_results=False))
ad.primitive_jvps[fp8_dot_p] = _fp8_dot_jvp
batching.primitive_batchers[fp8_dot_p] = _fp8_dot_batch
ad.primitive_transposes[fp8_dot_tangent_p] = _fp8_dot_transpose
batching.primitive_batchers[fp8_dot_tangent_p] = _fp8_dot_tangent_batch

first_order_p.def_impl(lambda x: x)
first_order_p.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(first_order_p, lambda ctx, x: [x])
ad.primitive_jvps[first_order_p] = _first_order_jvp
batching.defvectorized(first_order_p)
