"""Everything static about one FP8 product, which JAX compares to find an already compiled program."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._state.table import record_length
from ..recipes.recipe import Quantization, Recipe
from ..recipes.scaling import SHORT_BITS
from .contraction import AbstractContraction, ProductName


@dataclasses.dataclass(frozen=True)
class ProductSpec:
    """All that is static about one FP8 product.

    Args:
        recipe: How the operands are quantized.
        contraction: What is multiplied with what, and its gradients; the axes of the ensemble not counted.
        kernel_is_lhs: Which operand is the kernel: `einsum` may have swapped them.
        compute_dtype: The dtype that operands and output are rounded to around the product; None leaves them.
        out_dtype: The dtype of the output.
        precision: Of fprop. The default lets the hardware accumulate fast; dgrad and wgrad never do.
        has_key: Whether a key for stochastic rounding was given; without one, rounding stochastically raises.
        requantizes: Whether the backward pass quantizes the kernel again, instead of keeping its FP8 copy.
        records: Whether state is not the whole table, whose gradient is the next step's, but the scales alone, whose
            gradient is what was measured: `[*ensemble, record_length + 1]`, an operand's numbers one after the other,
            then zeros, and last a mark (`_state/members.py`).
        stacked: Whether the layer is one of a stack, from which a scan slices its state.
        group_place: Which of the layers this is that have the very same scale of their input (`fuse_projections`);
            None if it is alone.
        ensemble: How many leading axes of every array number independent members, each with its own state.
    """

    recipe: Recipe
    contraction: AbstractContraction
    kernel_is_lhs: bool
    compute_dtype: np.dtype | None
    out_dtype: np.dtype
    precision: lax.Precision
    has_key: bool = False
    requantizes: bool = False
    records: bool = False
    stacked: bool = False
    group_place: int | None = None
    ensemble: int = 0

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))

    def __hash__(self) -> int:
        # JAX hashes what is static at every call; this holds the whole recipe.
        return self._hash

    @property
    def quantizations(self) -> tuple[Quantization, Quantization, Quantization]:
        """Of lhs, rhs and the output's gradient."""
        lhs, rhs, grad = (self.recipe.quantizations[i] for i in self.state_rows)
        return lhs, rhs, grad

    def quantization(self, role: int, product: ProductName) -> Quantization:
        """Of lhs (role 0), rhs (1) or the output's gradient (2) in one of the contraction's products."""
        if product == "product":
            return self.quantizations[role]
        # The gradient of the input is dgrad, that of the kernel wgrad.
        is_wgrad = (product == "gradient_of_lhs") == self.kernel_is_lhs
        first, second = self.recipe.products["wgrad" if is_wgrad else "dgrad"]
        of_grad, of_other = (second, first) if is_wgrad else (first, second)
        return of_grad if role == 2 else of_other

    @property
    def scale_bits(self) -> int:
        """How many significant bits the scales of whole tensors have.

        A product that is rounded to bfloat16 is multiplied by its scale in bfloat16, where XLA finds FP8 whatever its
        flags; with 4 bits per operand, the product of two scales is exact there.
        """
        return SHORT_BITS if (self.compute_dtype or self.out_dtype) == jnp.bfloat16 else 24

    @property
    def record_length(self) -> int:
        """How many numbers a record has."""
        return record_length(self.recipe.scalings)

    @property
    def wgrad_precision(self) -> lax.PrecisionLike:
        """Full accumulation, by a different name in each layer of a group.

        XLA merges small products that share an operand, as the weight gradients of layers with the same input do, if
        they request the same precision. For FP8 data, both names mean the same.
        """
        high, highest = lax.Precision.HIGH, lax.Precision.HIGHEST
        ways = (highest, highest), (highest, high), (high, highest), (high, high)
        return highest if self.group_place is None else ways[self.group_place % len(ways)]

    @property
    def state_rows(self) -> tuple[int, int, int]:
        """Where state (in the order input, kernel, output gradient) describes lhs, rhs and the output's gradient."""
        return (1, 0, 2) if self.kernel_is_lhs else (0, 1, 2)
