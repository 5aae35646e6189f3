"""What FP8 adds to the products of a linear layer: bytes read and written, and kernels, in our compiled programs.

The figures are read from programs that XLA makes for an H100 and a B200, kernel by kernel. A test compiles layers and
compares: `tests/test_where_pays_programs.py`.
"""

import dataclasses
import math
from collections.abc import Iterable

from ..devices.device import MX_UNITS, Device
from ..recipes.recipe import Quantization, Recipe
from ..recipes.scaling import AbstractStatefulScaling, HadamardScaling, stores_scale


@dataclasses.dataclass(frozen=True)
class LayerSize:
    """The matrices of a linear layer: `tokens × inputs` times `inputs × outputs`.

    Args:
        inputs: The number of input features, the product of all input axes.
        outputs: The number of output features, likewise.
        members: The number of layers in one batched product, as in an ensemble; each gets all the tokens.
        experts: The number of kernels that share the tokens, each multiplying some of them.
    """

    inputs: int
    outputs: int
    members: int = 1
    experts: int = 1


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of kernels other than products.

    Args:
        bytes: What they read and write.
        block_bytes: What those among them read and write that quantize in blocks; not in `bytes`.
        kernels: How many they are.
    """

    bytes: int = 0
    block_bytes: int = 0
    kernels: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.block_bytes + other.block_bytes, self.kernels + other.kernels)


# The operands of each product, and which operand has the shape of its result.
PRODUCTS: dict[str, tuple[str, str, str]] = {
    "fprop": ("input", "kernel", "output_grad"),
    "dgrad": ("output_grad", "kernel", "input"),
    "wgrad": ("input", "output_grad", "kernel"),
}
# What cuBLASLt wants the sides of matrices to be multiples of: 16 bytes.
_MULTIPLE: dict[bool, int] = {True: 16, False: 8}
_USES: dict[str, tuple[str, str]] = {
    "input": ("fprop", "wgrad"),
    "kernel": ("fprop", "dgrad"),
    "output_grad": ("dgrad", "wgrad"),
}


@dataclasses.dataclass(frozen=True)
class LayerWork:
    """What a training step does for one layer.

    Args:
        size: Its matrices.
        rows: What each member multiplies, over all experts.
        recipe: Of the layer.
        requantizes: Whether the backward pass quantizes the kernel again.
        device: Which layouts its units take.
    """

    size: LayerSize
    rows: int
    recipe: Recipe
    requantizes: bool
    device: Device

    @property
    def transposes(self) -> bool:
        """Whether FP8 operands have to lie along what is summed: up to Hopper, so that one of two products is served
        by a transposed copy."""
        return self.device.platform == "cuda" and float(self.device.compute_capability or 0) < 10

    def flops(self, *, is_fp8: bool) -> int:
        """Of each of the three products; with experts, a row meets the kernel of one.

        Args:
            is_fp8: Whether they run in FP8, which pads more.
        """
        multiple = _MULTIPLE[is_fp8]
        sides = (self.rows, self.size.inputs, self.size.outputs)
        return 2 * self.size.members * math.prod(_filled_up(side, multiple) for side in sides)

    def product_bytes(self, product: str, *, is_fp8: bool) -> int:
        """What a product reads and writes.

        Args:
            product: `fprop`, `dgrad` or `wgrad`.
            is_fp8: Whether it runs in FP8.
        """
        a, b, out = (self.elements(operand, _MULTIPLE[is_fp8]) for operand in PRODUCTS[product])
        if not is_fp8:
            return 2 * (a + b + out)
        return a + b + (4 if self.rescales(product) else 2) * out

    def elements(self, operand: str, multiple: int = 1) -> int:
        """How many elements an operand has.

        Args:
            operand: `input`, `kernel` or `output_grad`.
            multiple: What its sides are padded to.
        """
        count = self.size.members * (self.size.experts if operand == "kernel" else 1)
        return count * math.prod(_filled_up(side, multiple) for side in self._sides(operand))

    def is_fp8(self, product: str) -> bool:
        """Whether a product runs in FP8.

        Args:
            product: `fprop`, `dgrad` or `wgrad`.
        """
        return self.recipe.products[product][0].scaling.quantizes

    def in_blocks(self, product: str) -> bool:
        """Whether a product in FP8 multiplies operands with scales of blocks.

        Args:
            product: `fprop`, `dgrad` or `wgrad`.
        """
        return any(operand.scaling.units is MX_UNITS for operand in self.recipe.products[product])

    def rescales(self, product: str) -> bool:
        """Whether a product in FP8 is stored in float32, and another kernel multiplies by scales and rounds.

        Args:
            product: `fprop`, `dgrad` or `wgrad`.
        """
        scalings = [use.scaling for use in self.recipe.products[product]]
        if self.in_blocks(product):
            return False
        # A batched product takes one scalar; state has one for each member.
        of_members = self.size.members > 1 and any(isinstance(s, AbstractStatefulScaling) for s in scalings)
        return of_members or self.size.experts > 1 or any(scaling.directional for scaling in scalings)

    @property
    def added(self) -> Work:
        """All the work besides the products."""
        work = self.padding_of_bf16(name for name in PRODUCTS if not self.is_fp8(name))
        for operand in _USES:
            work += self._quantizing(operand)
        if self.size.members > 1 and any(isinstance(s, AbstractStatefulScaling) for s in self.recipe.scalings):
            # Joining what each member measured, and telling members from copies of one. Fitted to one program, which
            # has seven more than one layer's prediction.
            work += Work(kernels=4)
        for name, (_, _, out) in PRODUCTS.items():
            if not self.is_fp8(name):
                continue
            elements = self.elements(out)
            # The result is read in float32 and written in bf16, or two scalars become one.
            work += Work(6 * elements, kernels=1) if self.rescales(name) else Work(kernels=1)
            if self._is_padded(out, is_fp8=True):
                work += Work(4 * elements, kernels=1)
        return work

    def padding_of_bf16(self, products: Iterable[str]) -> Work:
        """Padding the operands of products in bf16, each once, and slicing their results: bytes read and written.

        Args:
            products: Some of `fprop`, `dgrad` and `wgrad`.
        """
        names = list(products)
        operands = [*dict.fromkeys(operand for name in names for operand in PRODUCTS[name][:2])]
        operands += [PRODUCTS[name][2] for name in names]
        padded = [operand for operand in operands if self._is_padded(operand, is_fp8=False)]
        return Work(sum(4 * self.elements(operand) for operand in padded), kernels=len(padded))

    def _sides(self, operand: str) -> tuple[int, int]:
        """Of an operand, or of a result with its shape."""
        inputs, outputs = self.size.inputs, self.size.outputs
        return {"input": (self.rows, inputs), "kernel": (inputs, outputs), "output_grad": (self.rows, outputs)}[operand]

    def _is_padded(self, operand: str, *, is_fp8: bool) -> bool:
        return any(side % _MULTIPLE[is_fp8] for side in self._sides(operand))

    def _quantizing(self, operand: str) -> Work:
        """What one operand costs: amaxes, casts, its second layout, padding."""
        products = [name for name in _USES[operand] if self.is_fp8(name)]
        if not products:
            return Work()
        elements = self.elements(operand)
        uses = [self.recipe.products[name][PRODUCTS[name].index(operand)] for name in products]
        first = uses[0]
        work = Work()
        if self._is_padded(operand, is_fp8=True):
            work = Work(2 * elements * len(products), kernels=len(products))
        if len(uses) == 2 and uses[0] == uses[1] and not first.scaling.directional:
            return work + _cast(first, elements) + self._second_layout(operand, first) + self._recorded(operand, first)
        for use in uses:
            work += _cast(use, elements)
        if len(uses) == 2 and operand != "kernel" and not self.transposes:
            # XLA makes a pass of one use in the same kernel as a pass of the other.
            work += _of(uses[1], -2 * elements, 0)
        return work + self._recorded(operand, first)

    def _second_layout(self, operand: str, use: Quantization) -> Work:
        """An operand that is quantized once for both of its products, in the layout of the other product."""
        elements = self.elements(operand)
        again = operand == "kernel" and self.requantizes
        if not self.transposes:
            return _of(use, elements, 0) if again else Work()
        if again:
            return _cast(use, elements)
        # Input: one more output of the cast. Otherwise a separate kernel, which reads FP8 and writes it.
        return _of(use, elements, 0) if operand == "input" else _of(use, 2 * elements, 1)

    def _recorded(self, operand: str, use: Quantization) -> Work:
        """The amax that a state records: in the pass of the cast, unless that one transposes."""
        scaling = use.scaling
        if not (isinstance(scaling, AbstractStatefulScaling) and scaling.measures):
            return Work()
        if operand == "input" and self.transposes:
            return Work(2 * self.elements(operand), kernels=2)
        return Work(kernels=1)


def _cast(use: Quantization, elements: int) -> Work:
    """One quantization: bf16 is read once for the amax, unless state holds the scale, and once for the cast."""
    scaling = use.scaling
    work = _of(use, 3 * elements, 1)
    if not stores_scale(scaling):
        work += _of(use, 2 * elements, 2)
    if scaling.units is MX_UNITS:
        # 16 bytes for each block of 32: its amax, and its scale in float32 and in E8M0.
        work += _of(use, elements // 2, 0)
    if isinstance(scaling, HadamardScaling):
        work += _of(use, 4 * elements, 1)
    return work


def _of(use: Quantization, bytes: int, kernels: int) -> Work:
    """Work that quantizes an operand, in blocks or not."""
    if use.scaling.units is MX_UNITS:
        return Work(block_bytes=bytes, kernels=kernels)
    return Work(bytes, kernels=kernels)


def _filled_up(size: int, multiple: int) -> int:
    return math.ceil(size / multiple) * multiple
