"""What the backward pass keeps of a kernel: its FP8 copy, or nothing, since the kernel itself is in memory anyway."""

import dataclasses
import enum
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..recipes.recipe import SCALE_BITS, USES, OperandName, ProductName, Recipe
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
        kernel_residual: Whether the backward pass keeps the kernel's FP8 copy, or quantizes the kernel again.
        may_keep_sent_kernel: Whether programs keep the FP8 copy of a kernel that is otherwise quantized again, if their
            devices would have to send it again.
        quantized_kernel: The structure of the `KernelForProducts`, if the kernel was quantized before; else None.
        ensemble: How many leading axes of every array number independent members, each with its own state.
    """

    recipe: Recipe
    contraction: AbstractContraction
    compute_dtype: np.dtype | None
    out_dtype: np.dtype
    precision: lax.Precision
    stacked: bool = False
    index_among_sharers: int | None = None
    kernel_residual: KernelResidual = KernelResidual.KEEP
    may_keep_sent_kernel: bool = False
    quantized_kernel: Any = None
    ensemble: int = 0

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
        return (self.compute_dtype or self.out_dtype) != jnp.bfloat16

    @functools.cached_property
    def scale_bits(self) -> dict[OperandName, int]:
        """How many significant bits the scale of each operand has."""
        return dict.fromkeys(SCALE_BITS, 24) if self.exact_scales else SCALE_BITS

    @functools.cached_property
    def residuals_in_high_precision(self) -> frozenset[OperandName]:
        """What the backward pass keeps unquantized: a kernel to quantize again, and what is in high precision."""
        seconds = {x: self.recipe.uses[x, second] for x, (_, second) in USES.items()}
        again = lambda x: x == "kernel" and self.kernel_residual is KernelResidual.REQUANTIZE
        return frozenset([x for x in USES if again(x) or not seconds[x].scaling.quantizes])

    @property
    def rounds_kernel_at_random(self) -> bool:
        """Whether random numbers decide how the kernel is rounded, for either of its products."""
        return any(self.recipe.uses["kernel", product].rounding.needs_key for product in USES["kernel"])

    @property
    def keeps_kernel_copy(self) -> bool:
        """Whether fprop and dgrad read the same FP8 kernel."""
        return "kernel" in self.recipe.quantized_once and "kernel" not in self.residuals_in_high_precision

    @property
    def keeps_kernel_if_sent(self) -> bool:
        """Whether a kernel that is quantized again, or was before, is kept in programs whose devices would send it
        again.

        Not of experts, whose products say themselves what their devices send.
        """
        is_alike = "kernel" in self.recipe.quantized_once and not self.contraction.extras
        if not self.may_keep_sent_kernel or not is_alike:
            return False
        if self.quantized_kernel is not None:
            return True
        return self.kernel_residual is KernelResidual.REQUANTIZE and self.takes_stored_scale("kernel", "fprop")

    def takes_stored_scale(self, operand: OperandName, product: ProductName) -> bool:
        """Whether an operand is quantized with the scale that the state holds."""
        scaling = self.recipe.uses[operand, product].scaling
        return scaling.quantizes and scaling.stores_scale
