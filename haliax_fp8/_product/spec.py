"""All that is static about a product, and where its dgrad gets the kernel from."""

import dataclasses
import enum
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..recipes.recipe import SCALE_BITS, OperandName, ProductName, Recipe
from .contraction import AbstractContraction


class KernelResidual(enum.Enum):
    """Where dgrad gets its FP8 kernel from. The choice does not change values."""

    KEEP = "keep"
    """Keeps what the forward pass quantized: a byte per element, from the forward to the backward pass.

    For kernels that are not parameters: in a product by hand the kernel may be computed, and would otherwise be kept in
    high precision.
    """

    REQUANTIZE = "requantize"
    """Keeps nothing: the backward pass quantizes the kernel again, in the layout that dgrad reads.

    A parameter stays in memory for the whole step, so this saves a byte per weight. It costs reading the kernel once
    more, or twice with scales from the tensor itself.
    """

    REQUANTIZE_WHERE_CHEAP = "requantize_where_cheap"
    """Quantizes again if that needs no other amax, no copy of the kernel and no other gather; otherwise keeps the
    quantized kernel.

    No other amax: with delayed and static scaling, rows and one-dimensional blocks. No copy: a scan over a
    `haliax.nn.Stacked` slices the kernel out of the stack, and would keep every slice in high precision. No other
    gather: with delayed and static scaling, a kernel that devices have to gather for fprop, as under FSDP, is kept as
    gathered. XLA decides that when it divides a program over GPUs or CPUs. Replicated kernels are quantized again, and
    so are all kernels inside `shard_map` and on TPUs. Outside `jax.jit` nothing is known yet, and both are kept.
    """

    def decided(self, *, measures_again: bool, stacked: bool) -> "KernelResidual":
        """The choice for one layer. Of a stack, `REQUANTIZE_WHERE_CHEAP` keeps, unless a checkpoint recomputes it.

        Args:
            measures_again: Whether quantizing again takes another pass over the kernel, for its amax.
            stacked: Whether the layer is one of a `haliax.nn.Stacked`, whose kernels are slices of one array.
        """
        if self is not KernelResidual.REQUANTIZE_WHERE_CHEAP:
            return self
        if measures_again:
            return KernelResidual.KEEP
        return self if stacked else KernelResidual.REQUANTIZE


class DgradKernel(enum.Enum):
    """Where the dgrad of one product gets its kernel from: what a `KernelResidual` comes to."""

    HIGH_PRECISION = enum.auto()
    """The kernel itself: dgrad does not quantize it."""

    SAVED = enum.auto()
    """What the forward pass quantized; a checkpoint may save it by its name."""

    SAVED_UNLESS_RECOMPUTED = enum.auto()
    """What the forward pass quantized, without a name: a checkpoint recomputes it."""

    QUANTIZED_AGAIN = enum.auto()
    """The kernel itself, quantized by the backward pass."""

    QUANTIZED_AGAIN_UNLESS_SENT = enum.auto()
    """The same; but what fprop reads, where devices would have to send the kernel a second time."""

    QUANTIZED_BEFORE = enum.auto()
    """The copy for dgrad of a kernel that was quantized before its products."""

    QUANTIZED_BEFORE_UNLESS_SENT = enum.auto()
    """The same; but what fprop reads, where devices would have to send the kernel a second time."""

    @property
    def is_quantized_late(self) -> bool:
        """Whether the backward pass starts from the kernel itself."""
        return self in _LATE

    @property
    def may_be_sent(self) -> bool:
        """Whether what fprop reads is kept besides, for programs whose devices would send the kernel again."""
        return self in (DgradKernel.QUANTIZED_AGAIN_UNLESS_SENT, DgradKernel.QUANTIZED_BEFORE_UNLESS_SENT)

    @staticmethod
    def of(
        residual: KernelResidual, recipe: Recipe, contraction: AbstractContraction, *, stacked: bool, before: bool
    ) -> "DgradKernel":
        """The decision for one product.

        Args:
            residual: The choice of the layer.
            recipe: How the kernel is quantized.
            contraction: What is multiplied. Products of experts say themselves what their devices send.
            stacked: Whether the layer is one of a stack.
            before: Whether the kernel was quantized before its products.
        """
        scaling = recipe.uses["kernel", "dgrad"].scaling
        if not scaling.quantizes:
            return DgradKernel.HIGH_PRECISION
        is_alike = "kernel" in recipe.quantized_once and not contraction.is_grouped
        may_be_sent = is_alike and residual is KernelResidual.REQUANTIZE_WHERE_CHEAP
        if before:
            return DgradKernel.QUANTIZED_BEFORE_UNLESS_SENT if may_be_sent else DgradKernel.QUANTIZED_BEFORE
        decided = residual.decided(measures_again=recipe.measures_kernel_again, stacked=stacked)
        if decided is not KernelResidual.REQUANTIZE:
            return DgradKernel.SAVED if decided is KernelResidual.KEEP else DgradKernel.SAVED_UNLESS_RECOMPUTED
        if may_be_sent and scaling.stores_scale:
            return DgradKernel.QUANTIZED_AGAIN_UNLESS_SENT
        return DgradKernel.QUANTIZED_AGAIN


_LATE = (DgradKernel.HIGH_PRECISION, DgradKernel.QUANTIZED_AGAIN, DgradKernel.QUANTIZED_AGAIN_UNLESS_SENT)


@dataclasses.dataclass(frozen=True)
class ProductSpec:
    """All that is static about one FP8 product.

    Args:
        recipe: How the operands are quantized.
        contraction: What is multiplied with what, and its gradients; the axes of the ensemble not counted.
        compute_dtype: The dtype that operands and output are rounded to around the product; None leaves them.
        out_dtype: The dtype of the output.
        precision: The precision of fprop. The default lets the hardware accumulate fast; dgrad and wgrad never do.
        stacked: Whether the layer is one of a stack, from which a scan slices its state.
        index_among_sharers: Which one this is of the layers that share the scale of their input; None if it is alone.
        dgrad_kernel: Where dgrad gets its kernel from.
        quantized_kernel: The structure of the `KernelForProducts`, if the kernel was quantized before; else None.
        ensemble: How many leading axes of every array number independent members, each with its own state.
        one_pass: Whether GPU kernels of this package quantize operands in blocks where they fit.
    """

    recipe: Recipe
    contraction: AbstractContraction
    compute_dtype: np.dtype | None
    out_dtype: np.dtype
    precision: lax.Precision
    stacked: bool = False
    index_among_sharers: int | None = None
    dgrad_kernel: DgradKernel = DgradKernel.SAVED
    quantized_kernel: Any = None
    ensemble: int = 0
    one_pass: bool = False

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple([getattr(self, field.name) for field in dataclasses.fields(self)]))

    def __hash__(self) -> int:
        # JAX hashes what is static at every call; this holds the whole recipe.
        return self._hash

    @functools.cached_property
    def batched(self) -> AbstractContraction:
        """The contraction with the axes of the ensemble."""
        return self.contraction.with_batch_axes(self.ensemble)

    @functools.cached_property
    def exact_scales(self) -> bool:
        """Whether the scales of whole tensors are exact, or rounded up to `SCALE_BITS`.

        A product that is rounded to bfloat16 is multiplied by its scale in bfloat16, where XLA finds FP8 whatever its
        flags; so the product of two scales has to be exact there.
        """
        is_exact = self.recipe.kernel.scaling.exact_scales
        return is_exact or (self.compute_dtype or self.out_dtype) != jnp.bfloat16

    @functools.cached_property
    def scale_bits(self) -> dict[OperandName, int]:
        """How many significant bits the scale of each operand has."""
        return dict.fromkeys(SCALE_BITS, 24) if self.exact_scales else SCALE_BITS

    @functools.cached_property
    def residuals_in_high_precision(self) -> frozenset[OperandName]:
        """What the backward pass keeps unquantized: a kernel to quantize again, and what is in high precision."""
        late: dict[OperandName, bool] = {
            "input": not self.recipe.uses["input", "wgrad"].scaling.quantizes,
            "kernel": self.dgrad_kernel.is_quantized_late,
        }
        return frozenset([operand for operand, is_late in late.items() if is_late])

    def takes_stored_scale(self, operand: OperandName, product: ProductName) -> bool:
        """Whether an operand is quantized with the scale that the state holds."""
        scaling = self.recipe.uses[operand, product].scaling
        return scaling.quantizes and scaling.stores_scale
