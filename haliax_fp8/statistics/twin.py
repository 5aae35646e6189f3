"""Twin: both products of a layer, plain and in FP8, in two models that run side by side."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, Int

from .._jax.max_grad import to_dtype_of, to_max_grad
from .._product.contraction import DotContraction
from .._product.dimensions import DimensionNumbers
from ..layers import Fp8DotGeneral
from .whole_batch import Whole, call_whole


NUMBERS = ("relative_error", "cosine_distance", "largest")
"""The computed numbers, in the order of the last axis."""


def distances(reference: Float[Array, "..."], other: Float[Array, "..."], batch: int = 0) -> Float32[Array, "*batch 3"]:
    """`NUMBERS` of two arrays, where one is not finite infinity.

    Args:
        reference: The array that errors are relative to.
        other: The other one.
        batch: How many leading axes number arrays of their own.
    """
    axes = tuple(range(batch, reference.ndim))
    total = lambda x: jnp.sum(x, axes, keepdims=True)
    a, b = reference.astype(jnp.float32), other.astype(jnp.float32)
    # Squares of what is below 1e-19, as gradients are, would be flushed to zero.
    largest = jnp.max(jnp.maximum(jnp.abs(a), jnp.abs(b)), axes, initial=0.0, keepdims=True)
    unit = jnp.where(largest > 0.0, largest, jnp.float32(1.0))
    a, b = a / unit, b / unit
    norm = lambda x: jnp.sqrt(total(x**2))
    directions = [x / jnp.where(norm(x) > 0.0, norm(x), jnp.float32(1.0)) for x in (a, b)]
    numbers = [
        _ratio(norm(b - a), norm(a)),
        # 1 - cos, where that would lose its digits.
        total((directions[0] - directions[1]) ** 2) / 2,
        _ratio(
            jnp.max(jnp.abs(b - a), axes, initial=0.0, keepdims=True),
            jnp.max(jnp.abs(a), axes, initial=0.0, keepdims=True),
        ),
    ]
    stacked = jnp.stack([x.reshape(reference.shape[:batch]) for x in numbers], axis=-1)
    return jnp.where(jnp.isfinite(stacked), stacked, jnp.float32(jnp.inf))


def _ratio(a: Array, b: Array) -> Array:
    return jnp.where(a == 0.0, jnp.float32(0.0), a / b)


MODELS = "fp8_models"
"""The axis of the two models, mapped around everything: the plain one, then the converted one."""

COMPARED = ("fprop", "dgrad", "wgrad", "output", "output_grad", "kernel_grad")
"""The compared values: three products of the same operands, then each model's own output and gradients."""

COLUMNS = len(COMPARED) * len(NUMBERS) + 1
"""`NUMBERS` for each of `COMPARED`; then 1, where the loss reaches the layer."""

# A product of input and kernel; what comes after them is not differentiated.
type _Product = Callable[..., Array]


class Twin(eqx.Module):
    """Called instead of a layer's `dot_general`, in two models that are mapped as one.

    The plain model goes on with the plain product, the converted one with that of the op. Beside them the op multiplies
    what the plain model has. The gradient of `slot` is how far they are apart, of several uses the largest.

    Args:
        op: The op; None for a layer that both models compute in high precision.
        slot: `[*stack, COLUMNS]`, zeros in an element type whose gradients accumulate by maximum.
        kernel_shape: As of an op.
        kernel_first: As of an op.
    """

    op: Fp8DotGeneral | None
    slot: hax.NamedArray
    kernel_shape: tuple[int, ...] | None = eqx.field(static=True)
    kernel_first: bool | None = eqx.field(static=True)

    def __call__(
        self,
        lhs: Float[Array, "..."],
        rhs: Float[Array, "..."],
        dimension_numbers: DimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: object = None,
    ) -> Float[Array, "..."]:
        """Multiplies as `lax.dot_general` does; with the op in the converted model."""
        # How it is divided over devices is left to XLA: `vmap` has added an axis.
        del out_sharding
        contraction = DotContraction.of(dimension_numbers, self.kernel_shape, lhs.shape, rhs.shape, self.kernel_first)

        def multiply(dot_general: Callable[..., Array], input: Array, kernel: Array) -> Array:
            both = contraction.ordered(input, kernel)
            return dot_general(
                *both, dimension_numbers, precision=precision, preferred_element_type=preferred_element_type
            )

        return self._both(lambda op: op, lax.dot_general, multiply, contraction.ordered(lhs, rhs))

    def ragged_dot(
        self,
        lhs: Float[Array, "rows inputs"],
        rhs: Float[Array, "groups inputs outputs"],
        group_sizes: Int[Array, " groups"],
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: object = None,
    ) -> Float[Array, "rows outputs"]:
        """Multiplies as `lax.ragged_dot` does; with the op in the converted model."""
        del out_sharding

        def multiply(ragged_dot: Callable[..., Array], input: Array, kernel: Array, sizes: Array) -> Array:
            return ragged_dot(input, kernel, sizes, precision=precision, preferred_element_type=preferred_element_type)

        return self._both(lambda op: op.ragged_dot, lax.ragged_dot, multiply, (lhs, rhs), group_sizes)

    def _both(
        self,
        of_op: Callable[[Fp8DotGeneral], Callable[..., Array]],
        plain: Callable[..., Array],
        multiply: Callable[..., Array],
        operands: tuple[Array, Array],
        *group_sizes: Array,
    ) -> Array:
        leaves, static = eqx.partition(self.op, eqx.is_array)
        leaves, structure = jax.tree.flatten(leaves)

        def in_plain(input: Array, kernel: Array, slot: Array, *others: Array) -> Array:
            del slot
            return multiply(plain, input, kernel, *others[: len(group_sizes)])

        def in_converted(input: Array, kernel: Array, slot: Array, *others: Array) -> Array:
            del slot
            op = eqx.combine(jax.tree.unflatten(structure, others[len(group_sizes) :]), static)
            return multiply(of_op(op), input, kernel, *others[: len(group_sizes)])

        def compared(whole: Whole, *arrays: Array) -> Array:
            of_plain, of_converted = (whole.member(arrays, index) for index in range(2))
            products = whole.over(in_plain), whole.over(in_plain if self.op is None else in_converted)
            both = _compared(*products, whole)
            others = of_plain[3:], of_converted[3:]
            return jnp.stack(both(of_plain[:2], of_converted[:2], of_plain[2], others))

        return call_whole(MODELS, in_plain, compared, *operands, self.slot.array, *group_sizes, *leaves)

    # As `Fp8DotGeneral`: `jnp.einsum` hashes what it is given.
    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def in_max_grad(slots: list[hax.NamedArray]) -> list[hax.NamedArray]:
    """The slots of twins in the element type whose gradients accumulate by maximum."""
    return jax.tree.map(to_max_grad, slots)


def _compared(plain: _Product, converted: _Product, whole: Whole) -> Callable[..., Any]:
    """Both products, with their distances as the slot's gradient.

    Args:
        plain: The product of the plain model.
        converted: That of the converted one.
        whole: The axes of the call. Those that the slot has number layers of an ensemble.
    """
    outer_first = whole.axes[::-1]
    members = tuple(axis.size for axis in outer_first if axis.mapped[2])

    def apart(a: Array, b: Array, operand: int | None = None) -> Array:
        """The distance for each member of an ensemble; the same for all if members share the operand."""
        axes = [axis for axis in outer_first if operand is None or axis.mapped[operand]]
        member_axes = [i for i, axis in enumerate(axes) if axis.mapped[2]]
        a, b = (jnp.moveaxis(x, member_axes, range(len(member_axes))) for x in (a, b))
        numbers = distances(a, b, len(member_axes))
        shape = tuple(axis.size if axis in axes else 1 for axis in outer_first if axis.mapped[2])
        return jnp.broadcast_to(numbers.reshape(*shape, numbers.shape[-1]), (*members, numbers.shape[-1]))

    @jax.custom_vjp
    def both(of_plain: Any, of_converted: Any, slot: Array, others: Any) -> Any:
        return plain(*of_plain, slot, *others[0]), converted(*of_converted, slot, *others[1])

    def forward(of_plain: Any, of_converted: Any, slot: Array, others: Any) -> Any:
        outs = both(of_plain, of_converted, slot, others)
        # In FP8, of what the plain model has.
        alone = converted(*of_plain, slot, *others[1])
        return outs, (of_plain, of_converted, slot, others, apart(outs[0], alone), apart(*outs))

    def backward(residuals: Any, grads: Any) -> Any:
        of_plain, of_converted, slot, others, fprop, output = residuals

        def gradients(product: _Product, operands: Any, others: Any, grad: Array) -> tuple[Array, Array]:
            return jax.vjp(lambda input, kernel: product(input, kernel, slot, *others), *operands)[1](grad)

        in_plain = gradients(plain, of_plain, others[0], grads[0])
        in_converted = gradients(converted, of_converted, others[1], grads[1])
        alone = gradients(converted, of_plain, others[1], grads[0])
        by_name = {
            "fprop": fprop,
            "dgrad": apart(in_plain[0], alone[0], 0),
            "wgrad": apart(in_plain[1], alone[1], 1),
            "output": output,
            "output_grad": apart(*grads),
            "kernel_grad": apart(in_plain[1], in_converted[1], 1),
        }
        numbers = jnp.concatenate([by_name[name] for name in COMPARED], axis=-1)
        reached = jnp.ones((*members, 1), jnp.float32)
        return in_plain, in_converted, to_dtype_of(jnp.concatenate([numbers, reached], axis=-1), slot), None

    both.defvjp(forward, backward)
    return both
