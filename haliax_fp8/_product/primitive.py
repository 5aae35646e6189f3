"""The FP8 product as a JAX primitive with a linear tangent primitive.

Why a primitive and not `jax.custom_vjp`: JAX batches before it differentiates. Under `vmap`, `fp8_dot` folds the mapped
axis into the product, and only then is it differentiated: one product per gradient, one amax over everything, the same
program as the batched call. A `custom_vjp` is differentiated example by example: amaxes get summed, and the kernel's
gradient becomes a batch of outer products. `vmap(grad(f))`, where differentiation comes first, still gives per-example
gradients; and forward mode works, which `custom_vjp` refuses.

    fp8_dot(input, kernel, *record, *key)              quantize, multiply, rescale
      jvp       -> fp8_dot_tangent(tangents..., residuals...)      linear in the tangents
      transpose -> quantize the output's gradient; dgrad, wgrad; amaxes as the record's cotangent

Residuals are the quantized operands, once each (of a kernel often nothing, see `_product/spec.py`), and a
few numbers. State enters as one array of scales (none for a stateless recipe), and its cotangent is what was measured:
see `_state/record.py`, and `_jax/max_grad.py` for several uses.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, UInt32

from .._jax.max_grad import require_differentiated_state, require_transposed_state
from .._jax.meshes import all_varying, aval_of_result, with_automatic_axes
from .._jax.primitives import define, mapped_size, to_front
from .._numerics.quantized_array import QuantizedArray
from .._numerics.stored_array import StoredArray
from .._state.op_state import warn_of_constant_state
from .._state.record import cotangent, repeated
from ..devices.units import FP4_UNITS, MX_UNITS
from .kernel_for_products import KernelForProducts, is_mapped, kernel_with_axis
from .mapped_tangent import TangentArguments, with_mapped_axis
from .spec import ProductSpec
from .three_products import backward, forward, fprop_alone, tangent


def fp8_dot_general(
    input: Float[Array, "..."],
    kernel: Float[Array, "..."],
    record: Array | None,
    spec: ProductSpec,
    group_sizes: Array | None = None,
    key: UInt32[Array, "*ensemble 2"] | None = None,
    quantized_kernel: KernelForProducts[Array] | None = None,
    out_sharding: NamedSharding | None = None,
) -> Float[Array, "..."]:
    """The product of a contraction in the formats of a recipe.

    `out = dot(q(input), q(kernel)) * (scale_input * scale_kernel)`, accumulated in float32.

    Args:
        input: The layer's input.
        kernel: Its weight.
        record: The op's scales in float32 or `fp32_max_grad`; None for a stateless recipe.
        spec: What is static.
        group_sizes: How many rows each group has; None without groups.
        key: The words of the key for stochastic rounding; without one, rounding stochastically raises.
        quantized_kernel: The kernel, if it was quantized before, with its structure in `spec`; else None.
        out_sharding: The sharding of the product, on a mesh with explicit axes; else None.

    Returns:
        The product in `spec.out_dtype`.
    """
    leaves = jax.tree.leaves((group_sizes, record, key, quantized_kernel))

    def multiply(input: Array, kernel: Array, *others: Array) -> Array:
        # The transpose of the mark sums gradients over devices.
        return _primitive_of(spec).bind(*all_varying(input, kernel), *others, spec=spec)

    return with_automatic_axes(multiply, out_sharding, input, kernel, *leaves)


# --- The primitives -------------------------------------------------------------------------------------------------


def _primitive_of(spec: ProductSpec) -> Primitive:
    operands = [operand for pair in spec.recipe.products.values() for operand in pair if operand.scaling.quantizes]
    has_blocks = any(operand.scaling.units in (FP4_UNITS, MX_UNITS) for operand in operands)
    return fp8_dot_on_devices_p if has_blocks or spec.contraction.is_grouped else fp8_dot_p


def _fp8_dot(input: Array, kernel: Array, *others: Array, spec: ProductSpec) -> Array:
    return fprop_alone(input, kernel, *_split_others(others, spec), spec)


def _split_others(others: Sequence[Any], spec: ProductSpec) -> tuple[Any, Any, Any, Any]:
    """Each None if there is none: group sizes, the state, the random key, the kernel as it was quantized before."""
    rest = list(others)
    group_sizes = rest.pop(0) if spec.contraction.is_grouped else None
    state = rest.pop(0) if spec.recipe.is_stateful else None
    leaves = 0 if spec.quantized_kernel is None else spec.quantized_kernel.num_leaves
    key = rest.pop(0) if len(rest) > leaves else None
    quantized_kernel = None if spec.quantized_kernel is None else jax.tree.unflatten(spec.quantized_kernel, rest)
    return group_sizes, state, key, quantized_kernel


def _fp8_dot_aval(input, kernel, *others, spec: ProductSpec):
    shape = spec.batched.out_shape(input.shape, kernel.shape)
    return aval_of_result(input, shape, spec.out_dtype)


def _fp8_dot_jvp(primals, tangents, *, spec: ProductSpec):
    input, kernel, *others = primals
    group_sizes, state, key, quantized_kernel = _split_others(others, spec)
    # Reverse mode comes here from within `jax.checkpoint` only, else to the rule below.
    out, residuals = forward(input, kernel, group_sizes, state, key, quantized_kernel, spec, rematerialized=True)
    tangents = (*tangents[:2], *(t for t in [_split_others(tangents[2:], spec)[1]] if t is not None))
    linear = tuple([type(t) is not ad.Zero for t in tangents])
    _check_linear(linear, state, spec)
    nonzero = [t for t in tangents if type(t) is not ad.Zero]
    leaves, structure = jax.tree.flatten((residuals, group_sizes))
    return out, fp8_dot_tangent_p.bind(*nonzero, *leaves, spec=spec, linear=linear, structure=structure)


def _fp8_dot_linearize(linear: Sequence[bool], *primals: Any, spec: ProductSpec):
    """What the JVP says, for reverse mode."""
    input, kernel, *others = primals
    group_sizes, state, key, quantized_kernel = _split_others(others, spec)
    out, residuals = forward(input, kernel, group_sizes, state, key, quantized_kernel, spec, rematerialized=False)
    state_is_linear = [is_linear for is_linear in [_split_others(linear[2:], spec)[1]] if is_linear is not None]
    _check_linear((*linear[:2], *state_is_linear), state, spec)
    leaves, structure = jax.tree.flatten((residuals, group_sizes))
    params = {"spec": spec, "linear": (*linear[:2], *state_is_linear), "structure": structure}
    return out, leaves, lambda residuals, tangents: fp8_dot_tangent_p.bind(*tangents, *residuals, **params)


def _check_linear(linear: Sequence[bool], state: Any, spec: ProductSpec) -> None:
    """Raises unless JAX will combine the state's gradients correctly."""
    if state is not None and linear[1]:
        require_differentiated_state(state, linear[2])


def _fp8_dot_batch(args, axes, *, spec: ProductSpec):
    """Folds the mapped axis into the product; only a state or key that is mapped too makes independent members."""
    size = mapped_size(args, axes)
    count = 2 + spec.contraction.is_grouped
    *_, state, key, quantized_kernel = _split_others(args[2:], spec)
    *_, state_axis, key_axis, quantized_axes = _split_others(axes[2:], spec)
    if state_axis is not None or key_axis is not None:
        is_shared = lambda i: i == count and state is not None and state_axis is None
        args = [
            repeated(x, size) if is_shared(i) else to_front(x, axis, size, 0)
            for i, (x, axis) in enumerate(zip(args, axes, strict=True))
        ]
        spec = dataclasses.replace(spec, ensemble=spec.ensemble + 1)
        return _primitive_of(spec).bind(*args, spec=spec), 0
    operands, axes = list(args[:count]), list(axes[:count])
    if axes[1] is None and is_mapped(quantized_axes):
        operands[1], axes[1] = to_front(operands[1], None, size, spec.ensemble), spec.ensemble
    ndim = operands[1].ndim - (axes[1] is not None)
    operands, contraction, out_axis = spec.contraction.fold(operands, axes, size, spec.ensemble)
    if quantized_kernel is not None:
        quantized_kernel = kernel_with_axis(
            quantized_kernel, quantized_axes, size, spec.ensemble, kernel_has_axis=operands[1].ndim > ndim
        )
    op_leaves = jax.tree.leaves((state, key, quantized_kernel))
    spec = dataclasses.replace(spec, contraction=contraction)
    return _in_front(_primitive_of(spec).bind(*operands, *op_leaves, spec=spec), out_axis + spec.ensemble)


def _in_front(out: Array, axis: int) -> tuple[Array, int]:
    """A mapped result with the axis in front, as it is where JAX differentiates first.

    If a mapped `jax.custom_jvp` or `custom_vjp` is traced before it is differentiated, JAX takes the axis of what its
    derivative returns to be that of what the function itself returned.
    """
    return to_front(out, axis, out.shape[axis], 0), 0


def _unpack(args, linear: tuple[bool, ...], structure) -> tuple[list[Any], Any, Any]:
    """The equation's operands as they were bound: tangents (None where zero), residuals, group sizes."""
    remaining = iter(args[: sum(linear)])
    tangents: list[Any] = [next(remaining) if is_linear else None for is_linear in linear]
    residuals, group_sizes = jax.tree.unflatten(structure, args[sum(linear) :])
    return tangents, residuals, group_sizes


def _fp8_dot_tangent(*args: Array, spec: ProductSpec, linear: tuple[bool, ...], structure) -> Array:
    tangents, residuals, group_sizes = _unpack(args, linear, structure)
    return tangent([t for t in tangents[:2] if t is not None], residuals, group_sizes, spec=spec, linear=linear[:2])


def _fp8_dot_tangent_aval(*args: Any, spec: ProductSpec, linear: tuple[bool, ...], structure):
    _, residuals, _ = _unpack(args, linear, structure)
    input, kernel = map(_aval_of, residuals[:2])
    return _fp8_dot_aval(input, kernel, spec=spec)


def _aval_of(residual: Any) -> Any:
    """The abstract value of a residual, with the operand's own shape: data may be padded, or have another order."""
    if isinstance(residual, StoredArray):
        aval: Any = residual.data
        return aval.update(shape=residual.shape)
    if isinstance(residual, QuantizedArray):
        aval = residual.data
        return aval.update(shape=residual.shape)
    return residual


def _fp8_dot_transpose(grad, *args, spec: ProductSpec, linear: tuple[bool, ...], structure):
    tangents, residuals, group_sizes = _unpack(args, linear, structure)
    if type(grad) is ad.Zero:
        return [None] * len(args)
    dx, dw = [t.aval.dtype if ad.is_undefined_primal(t) else None for t in tangents[:2]]
    update = len(linear) > 2 and linear[2]
    if update:
        require_transposed_state(tangents[2], tangents[1:2])
    if dw is not None and spec.recipe.is_stateful and not (update and ad.is_undefined_primal(tangents[2])):
        warn_of_constant_state(spec.recipe)
    gradients, measured = backward(grad, residuals, group_sizes, spec=spec, dtypes=(dx, dw), update=update)
    record_cotangent = None if measured is None else cotangent(measured, tangents[2])
    cotangents = [*gradients, *([record_cotangent] if len(linear) > 2 else [])]
    undefined = [ct if ad.is_undefined_primal(t) else None for ct, t in zip(cotangents, tangents, strict=True)]
    return [ct for ct, is_linear in zip(undefined, linear, strict=True) if is_linear] + [None] * (
        len(args) - sum(linear)
    )


def _fp8_dot_tangent_batch(args, axes, *, spec: ProductSpec, linear: tuple[bool, ...], structure):
    """Where JAX differentiates first: folds the mapped axis into the product, as `_fp8_dot_batch` does."""
    size = mapped_size(args, axes)
    arguments, mapped = (TangentArguments(*_unpack(x, linear, structure)) for x in (args, axes))
    arguments, spec, out_axis = with_mapped_axis(arguments, mapped, size, spec)
    leaves, structure = jax.tree.flatten((arguments.residuals, arguments.group_sizes))
    tangents = [t for t in arguments.tangents if t is not None]
    out = fp8_dot_tangent_p.bind(*tangents, *leaves, spec=spec, linear=linear, structure=structure)
    return _in_front(out, out_axis)


_rules: dict[str, Any] = {
    "function": _fp8_dot,
    "aval": _fp8_dot_aval,
    "batch": _fp8_dot_batch,
    "jvp": _fp8_dot_jvp,
    "linearize": _fp8_dot_linearize,
}
fp8_dot_p = define("fp8_dot", **_rules)
# For products that are divided over devices when they are lowered: JAX has to know by the primitive.
fp8_dot_on_devices_p = define("fp8_dot", **_rules, with_devices=True)
fp8_dot_tangent_p = define(
    "fp8_dot_tangent",
    function=_fp8_dot_tangent,
    aval=_fp8_dot_tangent_aval,
    batch=_fp8_dot_tangent_batch,
    transpose=_fp8_dot_transpose,
)
