"""An estimate of the time that a layer's products take, in FP8 and in high precision."""

import dataclasses
import math

from rich.text import Text

from .._printing import Printable
from .._product.spec import KernelResidual
from ..devices.device import FP4_UNITS, MX_UNITS, Device
from ..devices.peaks import Peaks
from ..devices.roofline import LEAST_GAIN, LIKELY, MOST_GAIN, Efficiency, Roofline
from ..devices.traffic import Traffic
from ..recipes.recipe import OPERANDS, USES, OperandName, ProductName, Quantization, Recipe
from ..recipes.scaling import HighPrecision


@dataclasses.dataclass(frozen=True)
class LayerSize:
    """The matrices of a linear layer: `tokens × inputs` times `inputs × outputs`.

    Args:
        inputs: The number of input features, the product of all input axes.
        outputs: The number of output features, the product of all output axes.
        members: The number of layers in one batched product, as in an ensemble; each gets all the tokens.
        experts: The number of kernels that share the tokens, each multiplying some of them.
    """

    inputs: int
    outputs: int
    members: int = 1
    experts: int = 1


# The operand that has the shape of a product's result.
_RESULTS: dict[ProductName, OperandName] = {"fprop": "output_grad", "dgrad": "input", "wgrad": "kernel"}


@dataclasses.dataclass(frozen=True)
class LayerWork:
    """The work of one layer in one step.

    Args:
        size: Its matrices.
        rows: How many rows each member multiplies, over all experts.
        recipe: Its recipe. Products that it leaves in high precision are in bfloat16.
        kernel_residual: Whether the backward pass keeps the kernel's FP8 copy, or quantizes the kernel again.
        device: Decides which layouts its products read.
    """

    size: LayerSize
    rows: int
    recipe: Recipe
    kernel_residual: KernelResidual
    device: Device

    def seconds(self, roofline: Roofline) -> tuple[float, float]:
        """The time of the products, and of everything else."""
        products = sum(self._product(name, roofline) for name in OPERANDS)
        return products, roofline.others(self.added)

    @property
    def added(self) -> Traffic:
        """Everything but the products."""
        work = Traffic()
        for operand in USES:
            work += self._quantized(operand) + self._padded(operand)
        for name, result in _RESULTS.items():
            if self._is_rescaled(name):
                work += Traffic(1, plain=6 * self._elements(result))  # float32 is read, bfloat16 written
            elif self._is_fp8(name) and self._has_scales_of_members(name):
                work += Traffic(1, plain=4 * self._elements(result))  # bfloat16 is read and written
            elif self._is_fp8(name):
                work += Traffic(1)  # the scales of both operands become one
            if self._needs_padding(result, name):
                work += Traffic(1, plain=4 * self._elements(result))  # bfloat16 is read and written
        if self.size.members > 1 and self.recipe.is_stateful:
            work += Traffic(4)  # join what the members measured; fitted to one program
        return work

    def _product(self, name: ProductName, roofline: Roofline) -> float:
        is_fp8, multiple = self._is_fp8(name), self._multiple(name)
        sides = (self.rows, self.size.inputs, self.size.outputs)
        flops = 2 * self.size.members * math.prod(_padded_to(side, multiple) for side in sides)
        lhs, rhs, result = (self._elements(operand, multiple) for operand in (*OPERANDS[name], _RESULTS[name]))
        is_fp4 = is_fp8 and self.recipe.products[name][0].scaling.units is FP4_UNITS
        dtype, width = ("f4e2m1fn", 0.5) if is_fp4 else ("f8e4m3fn", 1) if is_fp8 else ("bf16", 2)
        moved = round(width * (lhs + rhs)) + (4 if self._is_rescaled(name) else 2) * result
        return roofline.products(dtype, flops, moved, in_blocks=is_fp8 and self._is_in_blocks(name))

    def _quantized(self, operand: OperandName) -> Traffic:
        """Amaxes, casts and second layouts of an operand."""
        uses = self._fp8_uses(operand)
        if not uses:
            return Traffic()
        first, elements = uses[0], self._elements(operand)
        work = _cast(first, elements)
        # Up to Hopper, FP8 operands have to lie along the axis that is summed: an operand needs one layout per product.
        transposes = self.device.is_cuda_from(0.0, below=10.0)
        if len(uses) == 2:
            if uses[0] != uses[1] or first.scaling.per_axis:
                work += _cast(uses[1], elements)
                if operand != "kernel" and not transposes:
                    work += _quantizing(uses[1], -2 * elements)  # one launch reads the operand for both casts
            elif operand == "kernel" and self.kernel_residual is KernelResidual.REQUANTIZE:
                # In the same layout, XLA writes the copy again and reads nothing twice.
                work += _cast(first, elements) if transposes else _quantizing(first, elements)
            elif transposes:
                work += _quantizing(first, 2 * elements, 1)  # a launch reads FP8 and writes it
        if (memory := first.scaling.memory) is not None and memory.numbers:
            work += Traffic(1)  # the cast takes the amaxes of parts, another launch their maximum
        return work

    def _padded(self, operand: OperandName) -> Traffic:
        """Padding reads an operand and writes it: in bfloat16 once for all products, in FP8 for each of them."""
        is_fp8 = [self._is_fp8(name) for name in USES[operand] if self._needs_padding(operand, name)]
        elements, in_bf16 = self._elements(operand), not all(is_fp8)
        return Traffic(sum(is_fp8) + in_bf16, plain=4 * in_bf16 * elements, casts=2 * sum(is_fp8) * elements)

    def _fp8_uses(self, operand: OperandName) -> list[Quantization]:
        """How the operand is quantized in each of its products that is in FP8."""
        return [self.recipe.uses[operand, name] for name in USES[operand] if self._is_fp8(name)]

    def _is_fp8(self, product: ProductName) -> bool:
        return product in self.recipe.quantized_products

    def _is_in_blocks(self, product: ProductName) -> bool:
        return any(
            quantization.scaling.units in (FP4_UNITS, MX_UNITS) for quantization in self.recipe.products[product]
        )

    def _is_rescaled(self, product: ProductName) -> bool:
        """Whether the product is stored in float32 and scaled by another launch: scales of rows or experts."""
        if not self._is_fp8(product) or self._is_in_blocks(product):
            return False
        scalings = [quantization.scaling for quantization in self.recipe.products[product]]
        return self.size.experts > 1 or any(scaling.per_axis for scaling in scalings)

    def _has_scales_of_members(self, product: ProductName) -> bool:
        """Whether another launch scales the product: cuBLASLt takes one scale."""
        remembers = any(quantization.scaling.memory is not None for quantization in self.recipe.products[product])
        return self.size.members > 1 and remembers

    def _multiple(self, product: ProductName) -> int:
        """cuBLASLt takes matrices whose sides are multiples of 16 bytes."""
        return 16 if self._is_fp8(product) else 8

    def _needs_padding(self, operand: OperandName, product: ProductName) -> bool:
        return self._elements(operand, self._multiple(product)) > self._elements(operand)

    def _elements(self, operand: OperandName, multiple: int = 1) -> int:
        """The size of an operand whose sides are padded to a multiple."""
        rows, inputs, outputs = (_padded_to(n, multiple) for n in (self.rows, self.size.inputs, self.size.outputs))
        count = {"input": rows * inputs, "kernel": self.size.experts * inputs * outputs, "output_grad": rows * outputs}
        return self.size.members * count[operand]


def _cast(quantization: Quantization, elements: int) -> Traffic:
    cost = quantization.scaling.cast_cost
    return _quantizing(quantization, round(cost.bytes * elements), cost.launches)


def _quantizing(quantization: Quantization, bytes: int, launches: int = 0) -> Traffic:
    if quantization.scaling.units in (FP4_UNITS, MX_UNITS):
        return Traffic(launches, blocks=bytes)
    return Traffic(launches, casts=bytes)


def _padded_to(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple


@dataclasses.dataclass(frozen=True, repr=False)
class Prediction(Printable):
    """The estimated seconds of a training step that a layer's fprop, dgrad and wgrad take.

    Args:
        bf16: The products in bf16, with their padding.
        products: The products with the recipe.
        overhead: What the recipe adds: amaxes, casts, transpositions, padding, scales.
        overhead_bytes: The bytes that the overhead reads and writes.
        overhead_launches: The number of launches in the overhead.
        launching: The part of `products` and `overhead` that is spent on launching.
        gain_range: The smallest and the largest `gain` over the measured shares of peaks; `gain` twice for custom
            shares.
    """

    bf16: float
    products: float
    overhead: float
    overhead_bytes: int
    overhead_launches: int
    launching: float
    gain_range: tuple[float, float]

    @property
    def fp8(self) -> float:
        """Products and all that FP8 adds."""
        return self.products + self.overhead

    @property
    def gain(self) -> float:
        """How many times as fast as bf16; below 1, FP8 is slower."""
        return self.bf16 / self.fp8

    @property
    def is_launch_bound(self) -> bool:
        """Whether launching takes more time in FP8 than all the work."""
        return self.launching > self.fp8 / 2

    def __rich__(self) -> Text:
        least, most = self.gain_range
        bound = "; launching takes longer than all the work" if self.is_launch_bound else ""
        return Text(
            f"{self.gain:.2f} times as fast in FP8 ({least:.2f} to {most:.2f}; estimate: {1e3 * self.fp8:.3g} ms a "
            f"step instead of {1e3 * self.bf16:.3g} ms in bf16{bound})"
        )


_IN_BF16 = Recipe.of(HighPrecision())


def predict(work: LayerWork, peaks: Peaks, efficiency: Efficiency, *, repeats: int = 1) -> Prediction:
    """The time of a layer's products, in bf16 and with its recipe.

    Args:
        work: The layer.
        peaks: The device's peak rates.
        efficiency: The shares of them that it reaches. With the default, the range is that of the sources.
        repeats: How many such layers there are, one after the other.
    """
    plain = dataclasses.replace(work, recipe=_IN_BF16)

    def seconds(efficiency: Efficiency) -> tuple[float, float, float]:
        roofline = Roofline(peaks, efficiency)
        return sum(plain.seconds(roofline)), *work.seconds(roofline)

    bf16, products, overhead = seconds(efficiency)
    # Not the ends alone: with block scales, leaving out the time of launches can lower the gain.
    measured = map(seconds, (LEAST_GAIN, LIKELY, MOST_GAIN) if efficiency == LIKELY else (efficiency,))
    gains = [bf16 / (products + overhead) for bf16, products, overhead in measured]
    added = work.added
    return Prediction(
        bf16=repeats * bf16,
        products=repeats * products,
        overhead=repeats * overhead,
        overhead_bytes=repeats * added.bytes,
        overhead_launches=repeats * added.launches,
        launching=repeats * Roofline(peaks, efficiency).launching(len(OPERANDS) + added.launches),
        gain_range=(min(gains), max(gains)),
    )
