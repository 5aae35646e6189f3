"""Recorder: a layer's op that hands out its operands, whole, as a gradient."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float

from ..._op import Fp8DotGeneral
from ..._product.dimensions import DimensionNumbers
from ..._product.dot import DotContraction
from ..whole_batch import Whole, call_whole


RECORDED = "fp8_recorded"
"""The axis, of one element, that is mapped around everything: inside it, operands are whole."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """What is known of a product once it is traced.

    Args:
        contraction: What is multiplied with what, the mapped axes among it.
        shapes: The shapes of input, kernel and output gradient.
        dtypes: Theirs.
        out_dtype: The dtype of the product.
        precision: The precision of fprop.
    """

    contraction: DotContraction
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]
    out_dtype: np.dtype
    precision: lax.Precision

    @property
    def size(self) -> int:
        """The number of elements of the three operands."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    @property
    def bytes(self) -> int:
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    def split(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The operands in their own dtypes, from what a recorder returned of one layer."""
        parts, start = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            count = int(np.prod(shape))
            parts.append(numbers[start : start + count].reshape(shape).astype(dtype))
            start += count
        return parts[0], parts[1], parts[2]


class Recorder(eqx.Module):
    """Called instead of an op: multiplies as it does, and records the operands.

    Args:
        op: The op.
        slot: `[*stack, Seen.size + 1]`, zeros. Its gradient is the operands in float32, one after the other, then how
            many uses there were, of which they are the sum. None to find out how large they are.
        when_traced: Gets a `Seen` whenever the layer is traced.
    """

    op: Fp8DotGeneral
    slot: hax.NamedArray | None
    when_traced: Callable[[Seen], object] = eqx.field(static=True)

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
        """Multiplies as the op does."""
        del out_sharding
        contraction = DotContraction.of(dimension_numbers, self.op.kernel_shape, lhs.shape, rhs.shape)
        leaves, static = eqx.partition(self.op, eqx.is_array)
        leaves, structure = jax.tree.flatten(leaves)

        def multiply(input: Array, kernel: Array, slot: Array, *leaves: Array) -> Array:
            del slot
            op = eqx.combine(jax.tree.unflatten(structure, leaves), static)
            return op(*contraction.ordered(input, kernel), dimension_numbers, precision, preferred_element_type)

        def recorded(whole: Whole, *arrays: Array) -> Array:
            input, kernel, slot, *others = whole.member(arrays, 0)
            product = _recording(whole.over(multiply), _Folded(contraction, whole), precision, self.when_traced)
            return product(input, kernel, slot, tuple(others))[None]

        slot = jnp.zeros((0,), jnp.float32) if self.slot is None else self.slot.array
        return call_whole(RECORDED, multiply, recorded, *contraction.ordered(lhs, rhs), slot, *leaves)

    def ragged_dot(self, *_: Any, **__: Any) -> Array:
        """Not recorded."""
        raise ValueError("black_box keeps the operands of dense products, and this layer's are grouped; give another")

    # As `Fp8DotGeneral`: `jnp.einsum` hashes what it is given.
    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class _Folded:
    """A product with the axes that `vmap` maps, and operands as it takes them, members of an ensemble in front."""

    def __init__(self, contraction: DotContraction, whole: Whole):
        self.contraction = contraction
        self.outer_first = whole.axes[::-1]
        # With a slot that is empty, nothing tells: then the op's own arrays do, which ensembles map.
        self.is_member = [any(axis.mapped[2:]) for axis in self.outer_first]
        self.outs: list[int] = []
        for axis, is_member in zip(whole.axes, self.is_member[::-1], strict=True):
            if is_member:
                continue
            self.contraction, out = self.contraction.with_axis(*axis.mapped[:2])
            self.outs.append(out)

    def operand(self, x: Array, index: int) -> Array:
        """The input, 0, or the kernel, 1, with every member's axis in front."""
        here = [
            is_member for axis, is_member in zip(self.outer_first, self.is_member, strict=True) if axis.mapped[index]
        ]
        kept = [i for i, is_member in enumerate(here) if is_member]
        x = jnp.moveaxis(x, kept, range(len(kept)))
        sizes = [axis.size for axis, is_member in zip(self.outer_first, self.is_member, strict=True) if is_member]
        own = [
            axis.size if axis.mapped[index] else 1
            for axis, is_member in zip(self.outer_first, self.is_member, strict=True)
            if is_member
        ]
        rest = x.shape[len(kept) :]
        return jnp.broadcast_to(x.reshape(*own, *rest), (*sizes, *rest))

    def output(self, x: Array) -> Array:
        """The output, or its gradient, with every member's axis in front."""
        kept = [i for i, is_member in enumerate(self.is_member) if is_member]
        x = jnp.moveaxis(x, kept, range(len(kept)))
        for i, out in enumerate(self.outs):
            first = len(kept) + len(self.outs) - 1 - i
            x = jnp.moveaxis(x, first, first + out)
        return x


def _recording(
    multiply: Callable[..., Array],
    folded: _Folded,
    precision: lax.PrecisionLike,
    when_traced: Callable[[Seen], object],
) -> Callable[..., Array]:
    @jax.custom_vjp
    def product(input: Array, kernel: Array, slot: Array, others: tuple[Array, ...]) -> Array:
        return multiply(input, kernel, slot, *others)

    def forward(input: Array, kernel: Array, slot: Array, others: tuple[Array, ...]) -> tuple[Array, Any]:
        return product(input, kernel, slot, others), (input, kernel, slot, others)

    def backward(kept: Any, grad: Array) -> Any:
        input, kernel, slot, others = kept
        gradients = jax.vjp(lambda input, kernel: multiply(input, kernel, slot, *others), input, kernel)[1](grad)
        operands = folded.operand(input, 0), folded.operand(kernel, 1), folded.output(grad)
        members = sum(folded.is_member)
        seen = Seen(
            folded.contraction,
            tuple(x.shape[members:] for x in operands),
            tuple(np.dtype(x.dtype) for x in operands),
            np.dtype(grad.dtype),
            lax.Precision.DEFAULT if precision is None else lax.Precision(precision),
        )
        when_traced(seen)
        if slot.shape[-1] == 0:
            return *gradients, jnp.zeros_like(slot), None
        flat = [x.astype(jnp.float32).reshape(*x.shape[:members], -1) for x in operands]
        uses = jnp.ones((*flat[0].shape[:-1], 1), jnp.float32)
        return *gradients, jnp.concatenate([*flat, uses], axis=-1), None

    product.defvjp(forward, backward)
    return product
