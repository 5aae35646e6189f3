"""Which axes a product contracts, batches and keeps; and what becomes of them under `vmap` and in its gradients."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np


type DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


@dataclasses.dataclass(frozen=True)
class DotDimensions:
    """The axes of `lax.dot_general`, with the ranks of its operands.

    The output's axes are: batch, free axes of lhs, free axes of rhs.

    Args:
        lhs_contract: Axes of lhs that are summed over, paired with `rhs_contract`.
        rhs_contract: Axes of rhs that are summed over.
        lhs_batch: Axes of lhs that are batched, paired with `rhs_batch`.
        rhs_batch: Axes of rhs that are batched.
        lhs_ndim: The rank of lhs.
        rhs_ndim: The rank of rhs.
    """

    lhs_contract: tuple[int, ...]
    rhs_contract: tuple[int, ...]
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    lhs_ndim: int
    rhs_ndim: int

    @staticmethod
    def of(numbers: DimensionNumbers, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> "DotDimensions":
        """Checks `lax.dot_general`'s dimension numbers against the operands' shapes.

        Args:
            numbers: `((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))`.
            lhs_shape: The shape of lhs.
            rhs_shape: The shape of rhs.

        Raises:
            ValueError: If they are not two pairs, axes are out of range or repeated, or paired axes differ in size.
        """
        try:
            (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = [map(tuple, pair) for pair in numbers]
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"dimension_numbers={numbers!r} must be ((lhs_contract, rhs_contract), (lhs_batch, rhs_batch)), four "
                "sequences of axes, such as (((1,), (0,)), ((), ())) for a product of matrices"
            ) from error
        sides = (("lhs", lhs_contract, lhs_batch, lhs_shape), ("rhs", rhs_contract, rhs_batch, rhs_shape))
        others = (("rhs", tuple(rhs_shape)), ("lhs", tuple(lhs_shape)))
        for (name, contract, batch, shape), (other, beside) in zip(sides, others, strict=True):
            axes = [*contract, *batch]
            if len(set(axes)) != len(axes) or not set(axes) <= set(range(len(shape))):
                raise ValueError(
                    f"dimension_numbers={numbers} name axes {axes} of {name}, whose shape is {tuple(shape)}, in a "
                    f"product with {other} {beside}: each axis must lie in the shape's range and appear once"
                )
        for kind, left, right in (("contracted", lhs_contract, rhs_contract), ("batched", lhs_batch, rhs_batch)):
            sizes = [lhs_shape[axis] for axis in left], [rhs_shape[axis] for axis in right]
            if sizes[0] != sizes[1]:
                differing = f"{sizes[0]} in lhs {tuple(lhs_shape)}, {sizes[1]} in rhs {tuple(rhs_shape)}"
                needed = " × ".join(map(str, sizes[1]))
                layer = (
                    f". If rhs is the kernel of a layer, its input needs {needed} features; a layer of Equinox takes "
                    "one example at a time, and a batch through jax.vmap(model)"
                )
                raise ValueError(
                    f"{kind} axes differ in size: {differing}; dimension_numbers={numbers} pair them, and paired axes "
                    f"must have the same size{layer if kind == 'contracted' else ''}"
                )
        return DotDimensions(lhs_contract, rhs_contract, lhs_batch, rhs_batch, len(lhs_shape), len(rhs_shape))

    @functools.cached_property
    def numbers(self) -> DimensionNumbers:
        """The dimension numbers, as `lax.dot_general` takes them."""
        return (self.lhs_contract, self.rhs_contract), (self.lhs_batch, self.rhs_batch)

    @functools.cached_property
    def lhs_free(self) -> tuple[int, ...]:
        """Axes of lhs that the output keeps."""
        return _others(self.lhs_ndim, self.lhs_contract, self.lhs_batch)

    @functools.cached_property
    def rhs_free(self) -> tuple[int, ...]:
        """Axes of rhs that the output keeps."""
        return _others(self.rhs_ndim, self.rhs_contract, self.rhs_batch)

    @property
    def out_ndim(self) -> int:
        """The rank of the output."""
        return len(self.lhs_batch) + len(self.lhs_free) + len(self.rhs_free)

    @property
    def swapped(self) -> "DotDimensions":
        """The same product with the operands exchanged."""
        return DotDimensions(
            self.rhs_contract, self.lhs_contract, self.rhs_batch, self.lhs_batch, self.rhs_ndim, self.lhs_ndim
        )

    def out_shape(self, lhs_shape: Sequence[int], rhs_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the output."""
        lhs_axes, rhs_axes = self.lhs_batch + self.lhs_free, self.rhs_free
        return (*[lhs_shape[axis] for axis in lhs_axes], *[rhs_shape[axis] for axis in rhs_axes])

    def with_axis_in_lhs(self) -> tuple["DotDimensions", int]:
        """Adds a leading axis to lhs, which the output keeps; also returns where the output has it."""
        dims = dataclasses.replace(
            self, lhs_contract=_shift(self.lhs_contract), lhs_batch=_shift(self.lhs_batch), lhs_ndim=self.lhs_ndim + 1
        )
        return dims, len(self.lhs_batch)

    def with_axis_in_rhs(self) -> tuple["DotDimensions", int]:
        """Adds a leading axis to rhs, which the output keeps; also returns where the output has it."""
        dims = self.swapped.with_axis_in_lhs()[0].swapped
        return dims, len(self.lhs_batch) + len(self.lhs_free)

    def with_batch_axis(self) -> tuple["DotDimensions", int]:
        """Adds a leading batch axis to both operands; also returns where the output has it."""
        dims = DotDimensions(
            lhs_contract=_shift(self.lhs_contract),
            rhs_contract=_shift(self.rhs_contract),
            lhs_batch=(0, *_shift(self.lhs_batch)),
            rhs_batch=(0, *_shift(self.rhs_batch)),
            lhs_ndim=self.lhs_ndim + 1,
            rhs_ndim=self.rhs_ndim + 1,
        )
        return dims, 0

    def with_axis(self, lhs: bool, rhs: bool) -> tuple["DotDimensions", int]:
        """Adds a leading axis to one operand, or a batch axis to both; also returns where the output has it."""
        if lhs and rhs:
            return self.with_batch_axis()
        return self.with_axis_in_lhs() if lhs else self.with_axis_in_rhs()

    def with_batch_axes(self, count: int) -> "DotDimensions":
        """Adds `count` leading batch axes to both operands."""
        dims = self
        for _ in range(count):
            dims = dims.with_batch_axis()[0]
        return dims

    def gradient_of_lhs(self) -> tuple["DotDimensions", tuple[int, ...]]:
        """The product of the output's gradient with rhs that gives the gradient of lhs.

        Returns:
            Its dimensions, and the permutation that brings its output into the layout of lhs.
        """
        batch = tuple(range(len(self.lhs_batch)))
        start = len(batch) + len(self.lhs_free)
        return self._gradient(batch, tuple(range(start, start + len(self.rhs_free))))

    def gradient_of_rhs(self) -> tuple["DotDimensions", tuple[int, ...]]:
        """The product of the output's gradient with lhs that gives the gradient of rhs.

        Returns:
            Its dimensions, and the permutation that brings its output into the layout of rhs.
        """
        batch = tuple(range(len(self.lhs_batch)))
        start = len(batch)
        return self.swapped._gradient(batch, tuple(range(start, start + len(self.lhs_free))))

    def _gradient(
        self, grad_batch: tuple[int, ...], grad_contract: tuple[int, ...]
    ) -> tuple["DotDimensions", tuple[int, ...]]:
        """The gradient of lhs; `swapped` makes it that of rhs, whose axes are elsewhere in the output's gradient."""
        dims = DotDimensions(grad_contract, self.rhs_free, grad_batch, self.rhs_batch, self.out_ndim, self.rhs_ndim)
        # The output has batch axes, free axes of lhs, and the contracted axes in the order in which rhs has them.
        contract = [self.lhs_contract[i] for i in np.argsort(self.rhs_contract)]
        layout = np.argsort([*self.lhs_batch, *self.lhs_free, *contract])
        return dims, tuple(layout.tolist())


def _shift(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([axis + 1 for axis in axes])


def _others(ndim: int, *groups: tuple[int, ...]) -> tuple[int, ...]:
    taken = {axis for group in groups for axis in group}
    return tuple([axis for axis in range(ndim) if axis not in taken])
