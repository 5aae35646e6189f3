"""Recipe: a format and a scaling for each operand of a linear layer's three products."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Literal

from .._arguments import require, require_bool
from .._numerics.rounding import Rounding
from ..formats import E4M3, E5M2, Format
from .scaling import (
    AbstractMemory,
    AbstractScaling,
    AmaxHistory,
    DelayedScaling,
    HadamardScaling,
    HighPrecision,
    MeasuredScaling,
    MXFP8Scaling,
    ObservedScaling,
)


type OperandName = Literal["input", "kernel", "output_grad"]

OPERAND_NAMES: tuple[OperandName, ...] = ("input", "kernel", "output_grad")
"""In the order in which state stores them."""
ProductName = Literal["fprop", "dgrad", "wgrad"]

OPERANDS: dict[ProductName, tuple[OperandName, OperandName]] = {
    "fprop": ("input", "kernel"),
    "dgrad": ("output_grad", "kernel"),
    "wgrad": ("input", "output_grad"),
}
"""The operands of each product."""

USES: dict[OperandName, tuple[ProductName, ProductName]] = {
    "input": ("fprop", "wgrad"),
    "kernel": ("fprop", "dgrad"),
    "output_grad": ("dgrad", "wgrad"),
}
"""The products of each operand."""

SCALE_BITS: dict[OperandName, int] = {"input": 1, "kernel": 7, "output_grad": 1}
"""The significant bits that scales of whole tensors are rounded up to, for products in bfloat16.

A bfloat16 has 8, so the scales of the two operands of each product multiply exactly. The kernel takes all but one of
them: it hardly changes from step to step, so with a coarse scale its rounding errors stay the same as well; with
a scale that follows its amax closely, they average out. Inputs and gradients are new in every step; a power of two
costs them range, not precision.
"""

# The field that says how each operand is quantized for the second of its products.
_SECOND_USES: dict[str, str] = {
    "input": "input_for_wgrad",
    "kernel": "kernel_for_dgrad",
    "output_grad": "output_grad_for_wgrad",
}


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How one operand is quantized.

    Args:
        format: The element type that hardware multiplies.
        scaling: Where its scale comes from.
        rounding: Which of its neighbours in the format a value becomes.

    Raises:
        ValueError: If an argument is of another kind, such as a format's name.
    """

    format: Format
    scaling: AbstractScaling
    rounding: Rounding = Rounding.TO_NEAREST

    def __post_init__(self) -> None:
        require("format", self.format, Format, "E4M3 or E5M2", of="Quantization")
        require("scaling", self.scaling, AbstractScaling, "a scaling such as DelayedScaling()", of="Quantization")
        require("rounding", self.rounding, Rounding, "Rounding.TO_NEAREST or Rounding.STOCHASTIC", of="Quantization")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A format and a scaling for each operand of the products fprop, dgrad and wgrad.

    Args:
        input: The layer's input, an operand of fprop and wgrad.
        kernel: The layer's weight, an operand of fprop and dgrad.
        output_grad: The gradient of the layer's output, an operand of dgrad and wgrad.
        input_for_wgrad: How the input is quantized for wgrad; by default as for fprop.
        kernel_for_dgrad: How the kernel is quantized for dgrad; by default as for fprop.
        output_grad_for_wgrad: How the output's gradient is quantized for wgrad; by default as for dgrad.
        state_of: Another recipe, whose state an op with this one keeps and records; None for its own.

    Raises:
        ValueError: If only one operand of a product is in high precision, unless `output_grad` is so throughout and the
            other operand as in fprop, see `forward_only`; if only one is rotated; if MXFP8's gradients are in E5M2;
            if an operand takes a scale from a state that differs from its other use's, or from that of `state_of`; or
            if an operand is not a `Quantization`.

    Example:
        >>> Recipe.of(DelayedScaling(amax_history_length=16)).output_grad.format
        E5M2
        >>> high = Quantization(E4M3, HighPrecision())
        >>> wgrad_in_bf16 = dataclasses.replace(
        ...     Recipe.of(CurrentScaling()), input_for_wgrad=high, output_grad_for_wgrad=high
        ... )
    """

    input: Quantization
    kernel: Quantization
    output_grad: Quantization
    input_for_wgrad: Quantization | None = None
    kernel_for_dgrad: Quantization | None = None
    output_grad_for_wgrad: Quantization | None = None
    state_of: "Recipe | None" = None

    def __post_init__(self) -> None:
        for name in (*_SECOND_USES, *_SECOND_USES.values()):
            if (value := getattr(self, name)) is not None or name in _SECOND_USES:
                example = "Quantization(E4M3, scaling), or Recipe.of(scaling) for all operands"
                require(name, value, Quantization, example, of="Recipe")
        if self.state_of is not None:
            require("state_of", self.state_of, Recipe, "a recipe, or None", of="Recipe")
        for name, operands in self.products.items():
            high = [not q.scaling.quantizes for q in operands]
            if any(high) and not all(high) and not self._is_straight_through(name):
                raise ValueError(
                    f"recipe leaves one operand of {name} in high precision and quantizes the other: {operands}; "
                    "a product runs in FP8 with both or not at all. To quantize the forward pass alone, use "
                    "recipe.forward_only(), or a name such as 'rowwise_fprop'; for gradients of the quantized "
                    "operands, recipe.forward_only(dequantized=True)"
                )
            rotated = [isinstance(q.scaling, HadamardScaling) for q in operands if q.scaling.quantizes]
            if any(rotated) and not all(rotated):
                raise ValueError(
                    f"recipe rotates one operand of {name} and not the other: {operands}; use HadamardScaling for both"
                )
        for name, second_use in _SECOND_USES.items():
            row, second = getattr(self.state_of or self, name), getattr(self, second_use)
            if second is not None and second != row and _state(second) not in (None, _state(row)):
                raise ValueError(
                    f"recipe has {second_use}={second}, whose scaling keeps state, and {name}={row}: an operand has "
                    f"one state, so leave {second_use} as None, or give it a stateless scaling"
                )
            first: Quantization = getattr(self, name)
            if _state(first) is not None and (first.scaling, first.format) != (row.scaling, row.format):
                raise ValueError(
                    f"recipe has {name}={first}, which takes its scale from a state, while the recipe state_of has "
                    f"{name}={row}: give both the same scaling and format, or this one a stateless scaling"
                )
        for quantization in (self.output_grad, self.output_grad_for_wgrad or self.output_grad):
            scaling = quantization.scaling
            scaling = scaling.scaling if isinstance(scaling, HadamardScaling) else scaling
            if isinstance(scaling, MXFP8Scaling) and quantization.format == E5M2:
                raise ValueError(
                    "recipe has output_grad in E5M2 with MXFP8Scaling, which is known to diverge "
                    "(NVIDIA-NeMo/Megatron-Bridge#638): blocks of 32 need precision, not range; use E4M3"
                )

    @staticmethod
    def of(scaling: AbstractScaling, *, forward: Format = E4M3, backward: Format | None = None) -> "Recipe":
        """One scaling for all operands, with one format for the forward and one for the backward pass.

        With one scale per tensor the default is TransformerEngine's `HYBRID`, E4M3 forward for precision and E5M2
        backward for range. Rows and blocks do not need the range, and use E4M3 for both.

        Args:
            scaling: How every operand gets its scale.
            forward: The format of input and kernel.
            backward: The format of the output's gradient.

        Raises:
            ValueError: If `scaling` is not a scaling, or a format not a `Format`.
        """
        require("scaling", scaling, AbstractScaling, "DelayedScaling(), or recipes.by_name for a name", of="Recipe.of")
        return Recipe(
            input=Quantization(forward, scaling),
            kernel=Quantization(forward, scaling.for_kernel),
            output_grad=Quantization(scaling.gradient_format if backward is None else backward, scaling),
        )

    @functools.cached_property
    def products(self) -> dict[ProductName, tuple[Quantization, Quantization]]:
        """How the operands of each product are quantized, in the order of `OPERANDS`."""
        return {
            "fprop": (self.input, self.kernel),
            "dgrad": (self.output_grad, self.kernel_for_dgrad or self.kernel),
            "wgrad": (self.input_for_wgrad or self.input, self.output_grad_for_wgrad or self.output_grad),
        }

    def _is_straight_through(self, product: ProductName) -> bool:
        """Whether a gradient in high precision reads its other operand as fprop quantized it."""
        second_uses = {"dgrad": self.kernel_for_dgrad, "wgrad": self.input_for_wgrad}
        as_in_fprop = {"dgrad": self.kernel, "wgrad": self.input}
        return product != "fprop" and (
            second_uses[product] in (None, as_in_fprop[product])
            and as_in_fprop[product].scaling.quantizes
            and not self.output_grad.scaling.quantizes
            and not (self.output_grad_for_wgrad or self.output_grad).scaling.quantizes
        )

    @functools.cached_property
    def quantized_products(self) -> tuple[ProductName, ...]:
        """The products that multiply quantized operands; the others run in high precision."""
        return tuple(name for name, pair in self.products.items() if all(q.scaling.quantizes for q in pair))

    @functools.cached_property
    def precisions(self) -> dict[ProductName, str]:
        """What each product runs in: `"FP8"`, `"FP4"` if an operand of it is, or `"high precision"`."""
        bits = {name: min(q.format.bits for q in pair) for name, pair in self.products.items()}
        quantized = {name: "FP4" if bits[name] <= 4 else "FP8" for name in self.quantized_products}
        return {name: quantized.get(name, "high precision") for name in self.products}

    @functools.cached_property
    def uses(self) -> dict[tuple[OperandName, ProductName], Quantization]:
        """How each operand is quantized for each of its products."""
        return {
            (operand, product): quantization
            for product, of_product in self.products.items()
            for operand, quantization in zip(OPERANDS[product], of_product, strict=True)
        }

    @functools.cached_property
    def quantized_once(self) -> frozenset[OperandName]:
        """The operands that are quantized once for both of their products."""

        def alike(operand: OperandName) -> bool:
            first, second = (self.uses[operand, product] for product in USES[operand])
            is_shared = first.scaling.quantizes and self._is_straight_through(USES[operand][1])
            return first == second and (is_shared or not first.scaling.per_axis)

        return frozenset(operand for operand in USES if alike(operand))

    @functools.cached_property
    def quantized_for(self) -> dict[tuple[OperandName, ProductName], ProductName]:
        """For each use of an operand, the product it is quantized for: its first one if it is quantized only once."""
        once = self.quantized_once
        return {(x, product): uses[0] if x in once else product for x, uses in USES.items() for product in uses}

    @functools.cached_property
    def operands(self) -> tuple[Quantization, Quantization, Quantization]:
        """The three operands in the order in which state stores them."""
        return (self.input, self.kernel, self.output_grad)

    @functools.cached_property
    def scalings(self) -> tuple[AbstractScaling, AbstractScaling, AbstractScaling]:
        """The scalings whose state ops keep, in the order in which state stores them."""
        input, kernel, output_grad = (self.state_of or self).operands
        return (input.scaling, kernel.scaling, output_grad.scaling)

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats that products are in; none for products in high precision."""
        operands = (q for pair in self.products.values() for q in pair if q.scaling.quantizes)
        return tuple(dict.fromkeys(q.format for q in operands))

    @functools.cached_property
    def limits(self) -> tuple[float, ...]:
        """The largest value of each operand's format in the state, in that order."""
        return tuple(q.format.max for q in (self.state_of or self).operands)

    @property
    def scale_rounding(self) -> str:
        """How scales of whole tensors are rounded where they multiply; empty if the recipe has none."""
        if self.kernel.scaling.exact_scales:
            return ""
        if not any(scaling.stores_scale or scaling.rounds_scale for scaling in self.scalings):
            return ""
        kernel = SCALE_BITS["kernel"]
        return f"exact in float32; in bfloat16 rounded up to powers of two, the kernel's to {kernel} significant bits"

    @functools.cached_property
    def is_stateful(self) -> bool:
        """Whether an op with this recipe remembers anything from step to step."""
        return any(scaling.memory is not None for scaling in self.scalings)

    @functools.cached_property
    def needs_key(self) -> bool:
        """Whether an operand is rounded at random."""
        return any(q.rounding.needs_key for pair in self.products.values() for q in pair)

    @property
    def measures_kernel_again(self) -> bool:
        """Whether quantizing the kernel for dgrad, apart from fprop, takes an amax that fprop has taken already."""
        scaling = self.kernel.scaling
        return "kernel" in self.quantized_once and scaling.quantizes and not scaling.stores_scale

    @property
    def observed(self) -> "Recipe":
        """This recipe in high precision, recording what its state needs."""
        if self.state_of is not None:
            return self.state_of.observed

        def observe(quantization: Quantization) -> Quantization:
            scaling = quantization.scaling
            observed = HighPrecision() if scaling.memory is None else ObservedScaling(scaling)
            return Quantization(quantization.format, observed)

        return self._map(observe)

    @property
    def measured(self) -> "Recipe":
        """This recipe, recording what quantization does to each operand."""

        def measure(quantization: Quantization) -> Quantization:
            return dataclasses.replace(quantization, scaling=MeasuredScaling(quantization.scaling, quantization.format))

        first = {name: measure(getattr(self, name)) for name in _SECOND_USES}
        # A second use that is as the first stays so: both then share what is quantized.
        second = {use: first[name] for name, use in _SECOND_USES.items() if getattr(self, use) == getattr(self, name)}
        if self.state_of is None:
            return dataclasses.replace(self, **first, **second)
        # The state's rows measure operands in the formats that they have here.
        input, kernel, output_grad = (
            dataclasses.replace(row, scaling=MeasuredScaling(row.scaling, operand.format))
            for row, operand in zip(self.state_of.operands, self.operands, strict=True)
        )
        rows = Recipe(input, kernel, output_grad)
        of_state = {
            use: getattr(rows, name)
            for name, use in _SECOND_USES.items()
            if use not in second and getattr(self, use) == getattr(self.state_of, name)
        }
        return dataclasses.replace(self, **first, **second, **of_state, state_of=rows)

    def forward_only(self, *, dequantized: bool = False) -> "Recipe":
        """fprop as in this recipe; dgrad and wgrad in high precision.

        For gradients of any function, however large or small they are: saliency, Jacobians, another loss. A stored
        scale of the output gradient fits the training loss alone, and clips others. `by_name("rowwise_fprop")` is
        `by_name("rowwise").forward_only()`, and so for every name.

        Args:
            dequantized: Whether dgrad and wgrad read kernel and input as fprop quantized them, dequantized to the dtype
                in which the layer computes. These are the gradients of fake quantization with a straight-through
                estimator, which quantization-aware training takes. By default both read the operands as they were
                before.

        References:
            TransformerEngine's `backward_override`: `"high_precision"` and `"dequantized"`.

        Example:
            >>> recipe = Recipe.of(DelayedScaling())
            >>> print(recipe.forward_only())
            fprop DelayedScaling E4M3/E4M3, dgrad/wgrad in high precision
            >>> print(recipe.forward_only(dequantized=True))
            fprop DelayedScaling E4M3/E4M3, dgrad/wgrad in high precision from quantized operands
        """
        require_bool("dequantized", dequantized, of="Recipe.forward_only")
        high = Quantization(E4M3, HighPrecision())
        if dequantized:
            return Recipe(self.input, self.kernel, high)
        return Recipe(self.input, self.kernel, high, input_for_wgrad=high, kernel_for_dgrad=high)

    def backward_only(self) -> "Recipe":
        """fprop in high precision; dgrad and wgrad as in this recipe, whose state is kept and recorded.

        For the last phase of a run, see `training.Phase`: NVIDIA's recipe for NVFP4 has it while the learning rate
        decays. `by_name("nvfp4_bprop")` is `by_name("nvfp4").backward_only()`, and so for every name.

        References:
            arXiv:2509.25149, appendix D.

        Example:
            >>> print(Recipe.of(MXFP8Scaling()).backward_only())
            fprop in high precision, dgrad/wgrad MXFP8Scaling E4M3/E4M3
        """
        high = Quantization(E4M3, HighPrecision())
        (_, kernel), (input, _) = self.products["dgrad"], self.products["wgrad"]
        state_of = (self.state_of or self) if self.is_stateful else None
        return dataclasses.replace(
            self, input=high, kernel=high, input_for_wgrad=input, kernel_for_dgrad=kernel, state_of=state_of
        )

    def with_state_of(self, recipe: "Recipe") -> "Recipe":
        """This recipe for an op whose state is that of another one, which every step records.

        Args:
            recipe: The other recipe.

        Raises:
            ValueError: If this one takes a scale from a state that the other does not keep.
        """
        return self if recipe in (self, self.state_of) else dataclasses.replace(self, state_of=recipe)

    def _map(
        self, function: Callable[[Quantization], Quantization], operands: Collection[OperandName] = OPERAND_NAMES
    ) -> "Recipe":
        names = [name for operand in operands for name in (operand, _SECOND_USES[operand])]
        changed = {name: function(old) for name in names if (old := getattr(self, name)) is not None}
        state_of = None if self.state_of is None else self.state_of._map(function, operands)
        return dataclasses.replace(self, **changed, state_of=state_of)

    def with_delayed(
        self, change: Callable[[DelayedScaling], DelayedScaling], operands: Collection[OperandName] = OPERAND_NAMES
    ) -> "Recipe":
        """This recipe with other delayed scalings, also where one is part of a scaling: a tensor's scale in NVFP4.

        Args:
            change: Returns the new one.
            operands: Those whose scalings change.

        Raises:
            ValueError: If something else is among them.

        Example:
            >>> import dataclasses
            >>> from haliax_fp8.recipes import by_name
            >>> headroom = lambda delayed: dataclasses.replace(delayed, margin=1)
            >>> recipe = by_name("delayed").with_delayed(headroom, ["output_grad"])
            >>> recipe.kernel.scaling.margin, recipe.output_grad.scaling.margin
            (0, 1)
        """
        if unknown := [name for name in operands if name not in OPERAND_NAMES]:
            raise ValueError(f"operands={operands!r} of with_delayed has {unknown[0]!r}; list some of {OPERAND_NAMES}")

        def changed(quantization: Quantization) -> Quantization:
            return dataclasses.replace(quantization, scaling=_with_delayed(quantization.scaling, change))

        return self._map(changed, operands)

    def with_amax_history_length(self, length: int) -> "Recipe":
        """This recipe with another history length in its delayed scalings.

        Args:
            length: How many steps they remember.

        Raises:
            ValueError: If it is not a positive integer.
        """
        return self.with_delayed(lambda delayed: dataclasses.replace(delayed, amax_history_length=length))

    def __str__(self) -> str:
        products = self.products
        rotated = [name for name, operands in products.items() if isinstance(operands[0].scaling, HadamardScaling)]
        random = [name for name, operands in products.items() if any(q.rounding.needs_key for q in operands)]
        notes = {"rotated": rotated, "rounded at random": random}
        described = [f"{'/'.join(names)} {note}" for note, names in notes.items() if names]
        return ", ".join([self._text_of_products, *described])

    @property
    def _text_of_products(self) -> str:
        """Scalings and formats of the operands; by product, if an operand has two, or products differ in precision."""
        kinds = {use: (_name(quantization), quantization.format) for use, quantization in self.uses.items()}
        alike = all(kinds[operand, first] == kinds[operand, second] for operand, (first, second) in USES.items())
        if alike and {*self.precisions.values()} in ({"FP8"}, {"FP4"}):
            return _text(self.operands)
        products: dict[str, list[str]] = {}
        for name, pair in self.products.items():
            text = "in high precision"
            if self._is_straight_through(name):
                text = "in high precision from quantized operands"
            elif name in self.quantized_products:
                text = _text(pair)
            products.setdefault(text, []).append(name)
        return ", ".join(f"{'/'.join(names)} {text}" for text, names in products.items())


def _with_delayed(scaling: AbstractScaling, change: Callable[[DelayedScaling], DelayedScaling]) -> AbstractScaling:
    if isinstance(scaling, DelayedScaling):
        return change(scaling)
    fields = {field.name: getattr(scaling, field.name) for field in dataclasses.fields(scaling)}
    parts = {name: _with_delayed(part, change) for name, part in fields.items() if isinstance(part, AbstractScaling)}
    return dataclasses.replace(scaling, **parts) if parts else scaling


def _state(quantization: Quantization) -> tuple[AbstractMemory, Format] | None:
    """What determines the rows of a state that an operand takes its scale from; None if it takes none."""
    scaling = quantization.scaling
    memory = scaling.scaling.memory if isinstance(scaling, MeasuredScaling) else scaling.memory
    return None if memory is None else (memory, quantization.format)


def _text(quantizations: tuple[Quantization, ...]) -> str:
    scalings = dict.fromkeys(map(_name, quantizations))
    return f"{'+'.join(scalings)} {'/'.join(q.format.name for q in quantizations)}"


def _name(quantization: Quantization) -> str:
    """The name of a scaling; of a rotated operand, that of the scaling after the rotation."""
    scaling = quantization.scaling
    scaling = scaling.scaling if isinstance(scaling, HadamardScaling) else scaling
    # With blocks that are measured in the step, below a scale that is not.
    is_delayed = isinstance(scaling.memory, AmaxHistory) and not scaling.stores_scale
    return f"{'delayed ' * is_delayed}{type(scaling).__name__}"
