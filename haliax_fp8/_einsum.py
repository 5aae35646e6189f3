"""Fp8Einsum: a two-operand einsum whose operands keep their roles."""

import dataclasses
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float
from opt_einsum.parser import parse_einsum_input

from ._op import Fp8DotGeneral
from .recipes.catalog import RecipeLike


class Fp8Einsum(eqx.Module):
    """`jnp.einsum` of an input and a kernel in FP8.

    `jnp.einsum` may swap its operands to save a transposition; the kernel's state would then describe the input. Here
    the first operand is always the input, the second always the kernel.

    Args:
        dot_general: The product and its state.

    References:
        `flax.linen.fp8_ops.Fp8Einsum`; the same numbers if its operands are not swapped.

    Example:
        >>> einsum = Fp8Einsum.init()
        >>> einsum("...k,kn->...n", jnp.ones((2, 3, 16)), jnp.ones((16, 8))).shape
        (2, 3, 8)
    """

    # The default exists only for our message.
    dot_general: Fp8DotGeneral = cast(Any, None)

    def __check_init__(self) -> None:
        if self.dot_general is None:
            raise ValueError("Fp8Einsum() has no op; use Fp8Einsum.init(recipe='delayed')")

    @staticmethod
    def init(
        recipe: RecipeLike | None = None,
        *,
        compute_dtype: DTypeLike | None = None,
        stack: tuple[hax.Axis, ...] = (),
    ) -> "Fp8Einsum":
        """An einsum before its first step; arguments as in `Fp8DotGeneral.init`."""
        return Fp8Einsum(Fp8DotGeneral.init(recipe, compute_dtype=compute_dtype, stack=stack))

    @jax.named_scope("fp8_einsum")
    def __call__(
        self,
        subscripts: str,
        *operands: Float[Array, "..."],
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> Float[Array, "..."]:
        """Evaluates the Einstein summation.

        Args:
            subscripts: As in `jnp.einsum`: explicit or implicit output, `...` for batch axes.
            *operands: The input and the kernel.
            precision: As in `Fp8DotGeneral`.
            preferred_element_type: The dtype of the result.

        Returns:
            The result.

        Raises:
            ValueError: If there are not two arrays, or the subscripts do not fit them.
        """
        if not isinstance(subscripts, str):
            raise ValueError(f"subscripts={subscripts!r} of an FP8 einsum must be a string such as '...k,kn->...n'")
        if len(operands) != 2:
            raise ValueError(
                f"subscripts={subscripts!r} came with {len(operands)} operands; an FP8 einsum takes one input and one "
                "kernel. Split a longer product into several, each with its own Fp8Einsum (and so its own state)"
            )
        for name, x in zip(("input", "kernel"), operands, strict=True):
            if not hasattr(x, "shape"):
                raise ValueError(
                    f"the {name} of an FP8 einsum is a {type(x).__name__}; pass an array such as jnp.asarray(...)"
                )
        parsed = Subscripts.parse(subscripts, *(x.shape for x in operands))
        lhs, rhs = (
            x if old == new else jnp.einsum(f"{old}->{new}", x)
            for x, old, new in zip(operands, parsed.operands, parsed.reduced, strict=True)
        )
        left, right = parsed.reduced
        contract = [name for name in left if name in right and name not in parsed.out]
        batch = [name for name in left if name in right and name in parsed.out]
        axes = lambda names: (tuple(map(left.index, names)), tuple(map(right.index, names)))
        numbers = axes(contract), axes(batch)
        out = self.dot_general(lhs, rhs, numbers, precision, preferred_element_type)
        names = [*batch, *(n for n in left if n not in right), *(n for n in right if n not in left)]
        return jnp.transpose(out, [names.index(name) for name in parsed.out])


@dataclasses.dataclass(frozen=True)
class Subscripts:
    """An einsum of two operands with its ellipses spelt out.

    Args:
        operands: The axes of each operand, one letter each.
        reduced: The axes of each operand after reduction: diagonals are taken along repeated axes, axes that appear
            nowhere else are summed, and axes of size 1 that are broadcast along the other operand's are dropped.
        out: The axes of the result.
    """

    operands: tuple[str, str]
    reduced: tuple[str, str]
    out: str

    @staticmethod
    def parse(subscripts: str, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]) -> "Subscripts":
        """Parses subscripts against the operands' shapes.

        Args:
            subscripts: Such as `"...k,kn->...n"`.
            lhs_shape: The shape of the first operand.
            rhs_shape: The shape of the second.

        Raises:
            ValueError: If they do not fit.
        """
        try:
            inputs, out, _ = parse_einsum_input((subscripts, lhs_shape, rhs_shape), shapes=True)
            left, right = inputs.split(",")
        except ValueError as error:
            raise ValueError(f"subscripts={subscripts!r} do not fit an input and a kernel: {error}") from error
        if len(set(out)) != len(out):
            raise ValueError(f"subscripts={subscripts!r}: the result repeats an axis")
        sizes: list[dict[str, int]] = [{}, {}]
        for of_side, side, shape in zip(sizes, (left, right), (lhs_shape, rhs_shape), strict=True):
            if len(side) != len(shape):
                raise ValueError(f"subscripts={subscripts!r}: {side!r} does not fit an operand of shape {shape}")
            for name, size in zip(side, shape, strict=True):
                if of_side.setdefault(name, size) != size:
                    raise ValueError(f"subscripts={subscripts!r}: axis {name!r} has sizes {of_side[name]} and {size}")
        for name in set(left) & set(right):
            pair = sizes[0][name], sizes[1][name]
            if pair[0] != pair[1] and 1 not in pair:
                axis = f"axis {name!r}" if name in subscripts else "an axis of '...'"
                raise ValueError(f"subscripts={subscripts!r}: {axis} has sizes {pair[0]} and {pair[1]}")
        # An axis of size 1 that is larger in the other operand is broadcast: only the other operand keeps it.
        axes = [
            [name for name in dict.fromkeys(side) if here[name] == there.get(name, here[name]) or here[name] != 1]
            for side, here, there in ((left, *sizes), (right, *reversed(sizes)))
        ]
        reduced = ["".join(n for n in side if n in other or n in out) for side, other in (axes, reversed(axes))]
        return Subscripts((left, right), (reduced[0], reduced[1]), out)
