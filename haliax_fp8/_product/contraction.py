"""What a product computes: the interface of contractions, and `lax.dot_general` of quantized operands."""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32

from .._jax.meshes import automatic_axes, manual_axes
from .._jax.primitives import to_front
from .._jax.xla import keep_cast, keep_cast_in_parts
from .._numerics.quantized_array import QuantizedArray, factors_out
from ..devices.device import Device
from ..formats import E5M2, FORMATS
from ..recipes.recipe import OPERANDS, USES, OperandName, ProductName
from ..recipes.scaling.members import Members
from .blocks import block_scaled_dot
from .dimensions import DimensionNumbers, DotDimensions
from .partition import scaled_by_each_device
from .scaled_product import FLOAT32, rows_scaled, scalar, scale_of_members, scaled_product


class AbstractContraction(abc.ABC):
    """A bilinear map of input and kernel, with the two gradients that it has. Frozen and hashable.

    Laws: dgrad is the transpose of `input -> fprop(input, kernel)` at the output's gradient, and wgrad that of
    `kernel -> fprop(input, kernel)`; `fold` is what `jax.vmap` of fprop would compute. Operands come in the order of
    `OPERANDS`, whichever order the hardware's product takes them in.
    """

    groups: frozenset[ProductName] = frozenset()
    """The products that do not sum over their last contracted axis as a whole, but over groups of it."""

    state_per_group: bool = False
    """Whether each group is a member of an ensemble with a state of its own."""

    applies_scales: bool = False
    """Whether the product takes stored scales by themselves, and operands with scales of 1."""

    is_grouped: bool
    """Whether there is an operand besides input and kernel, the sizes of groups; integers, not differentiated."""

    @abc.abstractmethod
    def out_shape(self, input_shape: Sequence[int], kernel_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the output."""

    @abc.abstractmethod
    def with_batch_axes(self, count: int) -> "AbstractContraction":
        """The contraction with `count` new leading axes in every operand and the output."""

    @abc.abstractmethod
    def fold(
        self, operands: Sequence[Array], axes: Sequence[int | None], size: int, ensemble: int
    ) -> tuple[Sequence[Array], "AbstractContraction", int]:
        """Takes an axis that `vmap` maps into the contraction.

        Args:
            operands: Input, kernel and, of groups, their sizes, each with the mapped axis and `ensemble` leading axes
                before it.
            axes: Where each operand has the mapped axis; None where it has none.
            size: The size of the mapped axis.
            ensemble: The number of leading axes that this contraction does not count.

        Returns:
            The operands, the contraction that multiplies them, and where the output has the axis.
        """

    @abc.abstractmethod
    def contracted(self, product: ProductName) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes that a product sums over, in each of its operands."""

    def members(
        self, operand: OperandName, shape: tuple[int, ...], group_sizes: Array | None, ensemble: int
    ) -> Members:
        """The members of an operand: the parts that have a scale and an amax each.

        Args:
            operand: Which it is.
            shape: Its shape.
            group_sizes: How many rows each group has; None without groups.
            ensemble: How many of its leading axes number members.
        """
        del shape, group_sizes
        first = USES[operand][0]
        return Members(ensemble, contracted=self.contracted(first)[OPERANDS[first].index(operand)])

    @abc.abstractmethod
    def dot(
        self,
        input: Float[Array, "..."],
        kernel: Float[Array, "..."],
        group_sizes: Array | None,
        precision: lax.PrecisionLike,
    ) -> Float32[Array, "..."]:
        """The product of two plain arrays, accumulated in float32."""

    @abc.abstractmethod
    def product(
        self,
        product: ProductName,
        operands: tuple[QuantizedArray, QuantizedArray],
        group_sizes: Array | None,
        precision: lax.PrecisionLike,
        dtype: np.dtype,
        scale: Float32[Array, "*members"] | None,
    ) -> Float[Array, "..."]:
        """A product of two quantized arrays, times their scales, in `dtype`.

        `scaled_product.py` says where it is rounded.

        Args:
            product: Which of the three.
            operands: Its operands.
            group_sizes: How many rows each group has; None without groups.
            precision: The precision of the product.
            dtype: The dtype of the result, which has the layout of the output, the input or the kernel.
            scale: The product of the operands' scales, if that is computed already; of groups with a state each,
                theirs.
        """


# The default of `xla_gpu_gemm_rewrite_size_threshold`. XLA multiplies smaller matrices in float16, in which the product
# of two E4M3 numbers may be infinite.
_SMALLEST_GEMM = 100


def scaled_dot_general(
    a: QuantizedArray,
    b: QuantizedArray,
    dims: DotDimensions,
    precision: lax.PrecisionLike,
    dtype: np.dtype,
    scale: Float32[Array, ""] | None,
    *,
    in_a_sum: bool = False,
) -> Float[Array, "..."]:
    """`dot(a, b)` in a dtype; scales that are constant along what is contracted factor out of the sum.

    Args:
        a: The first operand of `lax.dot_general`.
        b: The second.
        dims: What is contracted.
        precision: The precision of the product.
        dtype: The dtype of the result.
        scale: The product of both scales, if that is computed already.
        in_a_sum: Whether the result may be added to other products, as gradients of a tensor that several layers read.
    """
    if not (factors_out(a, dims.lhs_contract) and factors_out(b, dims.rhs_contract)):
        return block_scaled_dot(a, b, dims, precision, dtype)
    a, b = _rounded_if_widened(a, b, dims)
    if a.scale.size == b.scale.size == 1:
        if scale is None:
            scale = lax.mul(scalar(a.scale), scalar(b.scale))
        if in_a_sum and automatic_axes():
            return scaled_by_each_device(a, b, scale, dims, precision, dtype)
        return scaled_product(a, b, scale, dims, precision, dtype)
    of_members = scale_of_members(a, b, dims)
    if of_members is not None:
        return scaled_product(a, b, of_members, dims, precision, dtype)
    out = lax.dot_general(a.data, b.data, dims.numbers, precision=precision, preferred_element_type=FLOAT32)
    return rows_scaled(out, a, b, dims, dtype)


def _rounded_if_widened(
    a: QuantizedArray, b: QuantizedArray, dims: DotDimensions
) -> tuple[QuantizedArray, QuantizedArray]:
    """Two operands, whose data stay rounded if XLA widens them on the default device.

    Args:
        a: The first operand of `lax.dot_general`.
        b: The second.
        dims: What is contracted.
    """
    device = Device.default()
    if device.emulates:  # XLA's compiler for CPUs keeps both casts.
        return a, b
    sides = m, n, k = [_size(x, axes) for x, axes in ((a, dims.lhs_free), (b, dims.rhs_free), (a, dims.lhs_contract))]
    if _widens(device, a, b):
        data = [keep_cast(x.data) for x in (a, b)]
    else:
        data = [keep_cast_in_parts(x.data, smallest=min(sides)) for x in (a, b)]
    if device.platform == "cuda" and (m + n) * k < _SMALLEST_GEMM:
        data = [lax.convert_element_type(keep_cast(x), jnp.float32) for x in data]
    return dataclasses.replace(a, data=data[0]), dataclasses.replace(b, data=data[1])


def _widens(device: Device, a: QuantizedArray, b: QuantizedArray) -> bool:
    """Whether an accelerator has no units for the data of two operands: for their formats, or for two in E5M2."""
    formats = [FORMATS[x.data.dtype] for x in (a, b) if x.data.dtype in FORMATS]
    return formats == [E5M2, E5M2] or any(device.lacks(format) is not None for format in formats)


def _size(x: QuantizedArray, axes: tuple[int, ...]) -> int:
    """The number of elements of some axes; of an unknown size, which an export may have, the smallest."""
    return math.prod([size if isinstance(size := x.data.shape[axis], int) else 1 for axis in axes])


@dataclasses.dataclass(frozen=True)
class DotContraction(AbstractContraction):
    """The contraction of `lax.dot_general`.

    Args:
        dimensions: Which axes are contracted, batched and kept.
        kernel_first: Whether the kernel is the first operand of `lax.dot_general`: `einsum` may swap the two.
    """

    dimensions: DotDimensions
    kernel_first: bool = False

    is_grouped = False

    @staticmethod
    def of(
        numbers: DimensionNumbers,
        kernel_shape: tuple[int, ...] | None,
        lhs_shape: Sequence[int],
        rhs_shape: Sequence[int],
        kernel_first: bool | None = None,
    ) -> "DotContraction":
        """Like `DotDimensions.of`; the kernel is the first operand if only that one has the kernel's free axes.

        Args:
            numbers: In the form that `lax.dot_general` takes.
            kernel_shape: The sizes of the kernel's free axes; if None, it is the second operand.
            lhs_shape: The shape of the first operand.
            rhs_shape: The shape of the second.
            kernel_first: Whether the kernel is the first operand, if that is known.

        Raises:
            ValueError: If `kernel_first` says so of the operand that does not have the kernel's free axes.
        """
        dims = DotDimensions.of(numbers, lhs_shape, rhs_shape)
        if kernel_shape is None:
            return DotContraction(dims, bool(kernel_first))
        batch = [lhs_shape[axis] for axis in dims.lhs_batch]

        def fits(shape: Sequence[int], free_axes: tuple[int, ...]) -> bool:
            free = [shape[axis] for axis in free_axes]
            # A free axis of the kernel is a batch axis of the product where the input has it too.
            return free == [*kernel_shape] or sorted(free + batch) == sorted(kernel_shape)

        could_be = fits(lhs_shape, dims.lhs_free), fits(rhs_shape, dims.rhs_free)
        if kernel_first is None:
            return DotContraction(dims, could_be == (True, False))
        # Inside `shard_map`, the sizes are those of parts.
        if could_be == (not kernel_first, kernel_first) and not manual_axes():
            raise ValueError(
                f"the op multiplies operands of shapes {tuple(lhs_shape)} and {tuple(rhs_shape)}, of which only the "
                f"{'second' if kernel_first else 'first'} has the kernel's free axes, {kernel_shape}; but it was made "
                f"with kernel_first={kernel_first}, in a LayerRule Kernel(first={kernel_first}). Correct that, or "
                "leave it out for sizes to tell"
            )
        return DotContraction(dims, kernel_first)

    def ordered[A](self, input: A, kernel: A) -> tuple[A, A]:
        """Input and kernel as `lax.dot_general` takes them; or back."""
        return (kernel, input) if self.kernel_first else (input, kernel)

    def out_shape(self, input_shape: Sequence[int], kernel_shape: Sequence[int]) -> tuple[int, ...]:
        """Batch axes, free axes of the first operand, free axes of the second."""
        return self.dimensions.out_shape(*self.ordered(input_shape, kernel_shape))

    def with_batch_axes(self, count: int) -> "DotContraction":
        """Batched over `count` leading axes."""
        return dataclasses.replace(self, dimensions=self.dimensions.with_batch_axes(count)) if count else self

    def with_axis(self, input: bool, kernel: bool) -> tuple["DotContraction", int]:
        """Adds a leading axis to one operand, or a batch axis to both; also returns where the output has it."""
        dimensions, out_axis = self.dimensions.with_axis(*self.ordered(input, kernel))
        return dataclasses.replace(self, dimensions=dimensions), out_axis

    def fold(
        self, operands: Sequence[Array], axes: Sequence[int | None], size: int, ensemble: int
    ) -> tuple[Sequence[Array], "DotContraction", int]:
        """The mapped axis is a free axis of the operand that has it, or a batch axis of both."""
        contraction, out_axis = self.with_axis(*[axis is not None for axis in axes])
        pairs = zip(operands, axes, strict=True)
        moved = [x if axis is None else to_front(x, axis, size, ensemble) for x, axis in pairs]
        return moved, contraction, out_axis

    def contracted(self, product: ProductName) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The contracted axes of `lax.dot_general` and its two gradients."""
        dimensions, _, swapped = _products_of(self)[product]
        # Pairs in the order of the first operand's axes: blocks run along the last pair, in both.
        pairs = sorted(zip(dimensions.lhs_contract, dimensions.rhs_contract, strict=True))
        first, second = map(tuple, zip(*pairs, strict=True)) if pairs else ((), ())
        return (second, first) if swapped else (first, second)

    def dot(
        self,
        input: Float[Array, "..."],
        kernel: Float[Array, "..."],
        group_sizes: Array | None,
        precision: lax.PrecisionLike,
    ) -> Float32[Array, "..."]:
        """`lax.dot_general`."""
        lhs, rhs = self.ordered(input, kernel)
        return lax.dot_general(
            lhs, rhs, self.dimensions.numbers, precision=precision, preferred_element_type=jnp.float32
        )

    def product(
        self,
        product: ProductName,
        operands: tuple[QuantizedArray, QuantizedArray],
        group_sizes: Array | None,
        precision: lax.PrecisionLike,
        dtype: np.dtype,
        scale: Float32[Array, ""] | None,
    ) -> Float[Array, "..."]:
        """`dot(a.data, b.data) * (a.scale * b.scale)`, in the layout that the product's result has."""
        dimensions, layout, swapped = _products_of(self)[product]
        a, b = reversed(operands) if swapped else operands
        out = scaled_dot_general(a, b, dimensions, precision, dtype, scale, in_a_sum=product == "dgrad")
        return out if layout == tuple(range(out.ndim)) else lax.transpose(out, layout)


# Layers of all sizes share them.
@functools.cache
def _products_of(contraction: DotContraction) -> dict[ProductName, tuple[DotDimensions, tuple[int, ...], bool]]:
    """The axes of each product, the layout of its result, and whether it takes its operands in the other order."""
    dims = contraction.dimensions
    lhs_grad, rhs_grad = dims.gradient_of_lhs(), dims.gradient_of_rhs()
    dgrad, wgrad = (rhs_grad, lhs_grad) if contraction.kernel_first else (lhs_grad, rhs_grad)
    fprop = dims, tuple(range(dims.out_ndim)), contraction.kernel_first
    # The output's gradient comes first.
    return {"fprop": fprop, "dgrad": (*dgrad, False), "wgrad": (*wgrad, True)}
