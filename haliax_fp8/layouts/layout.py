"""Layout: what shares a scale, of weights and of inputs; and the layouts by name."""

import dataclasses
from typing import Any

from .._arguments import nearest, require
from ..formats import E2M1, E4M3, Format


@dataclasses.dataclass(frozen=True)
class Inputs:
    """How the inputs of layers are quantized.

    Args:
        strategy: What shares a scale: `"tensor"`, `"token"` or `"group"`.
        dynamic: Whether each product computes the scales from its input; otherwise each layer has one from training.
        size: The elements of a group; of tokens in E2M1, those of the groups that have scales beside the token's.
        format: Their format: E4M3 or E2M1.
        bound: The largest amax that makes a scale, so that larger elements are clipped; None for any.

    Raises:
        ValueError: If the strategy is none of these, or a group has no size.
    """

    strategy: str
    dynamic: bool = True
    size: int = 0
    format: Format = E4M3
    bound: float | None = None

    def __post_init__(self) -> None:
        _require_strategy(self.strategy, ("tensor", "token", "group"), "Inputs")
        if self.strategy == "group" and not self.size:
            raise ValueError("size=0 of Inputs: a group needs the number of its elements, such as size=128")

    def __str__(self) -> str:
        what = {"tensor": "a scale for all", "token": "a scale for each token"}
        each = what.get(self.strategy, f"a scale for {self.size} elements")
        if self.strategy == "group" and not self.dynamic:  # NVFP4
            return f"{each}, dynamic, and one for all, static"
        each += f" and for {self.size} elements" if self.strategy == "token" and self.size else ""
        clipped = "" if self.bound is None else f", clipped at {self.bound:g}"
        return f"{each}, {'dynamic' if self.dynamic else 'static'}{clipped}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """How quantized weights are stored, and inputs quantized; of a folder, also what its configuration says of layers.

    Args:
        strategy: What shares a scale of the weights: `"tensor"`, `"channel"`, `"block"` or `"group"`.
        inputs: How inputs are quantized; None if they are not.
        size: The rows and columns of a block or group.
        method: How it lies in folders: `"compressed-tensors"`, Hugging Face's `"fp8"`, or NVIDIA's `"modelopt"`; of
            folders that are only read, also `"fbgemm_fp8"`, `"torchao"`, gpt-oss' `"mxfp4"`, or ComfyUI's
            `"scale_weight"`.
        exponents: Whether scales are powers of two, E8M0.
        format: The format of the weights: E4M3, or E2M1, of which two are in a byte.
        ignore: The layers left alone: names, or with `re:` regular expressions.
        targets: The layers meant: classes, names, or regular expressions.
        cached: Whether keys and values are kept in FP8, with scales.
        status: What compressed-tensors says of the weights: `"compressed"` if they are stored quantized.
        groups: The layouts of different layers, each with its targets; empty if all layers have this one.

    Raises:
        ValueError: If the strategy is none of these, or a block or group has no size.

    References:
        `compressed_tensors.quantization.quant_scheme` 0.20; `transformers.FineGrainedFP8Config` 5.23; ModelOpt.

    Example:
        >>> Layout("channel", Inputs("token")).name, Layout("tensor", Inputs("tensor")).name
        ('FP8_DYNAMIC', 'compressed-tensors, tensor weights')
    """

    strategy: str
    inputs: Inputs | None = None
    size: tuple[int, int] | None = None
    method: str = "compressed-tensors"
    exponents: bool = False
    format: Format = E4M3
    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)
    cached: bool = False
    status: str | None = "compressed"
    groups: tuple["Layout", ...] = ()

    def __post_init__(self) -> None:
        _require_strategy(self.strategy, ("tensor", "channel", "block", "group"), "Layout")
        require("format", self.format, Format, "E4M3", of="Layout")
        if self.strategy in ("block", "group") and self.size is None:
            raise ValueError(f"size=None of Layout: a {self.strategy} needs its rows and columns, such as (128, 128)")

    @property
    def name(self) -> str:
        """Its name in `named`; a description if it has none. The sizes of blocks do not count."""
        if self.groups:
            return " and ".join(dict.fromkeys(group.name for group in self.groups))
        key = self._kind
        names = (name for name, layout in named.items() if layout._kind == key)
        kind = f"{self.strategy} weights"
        if self.format is E2M1:
            kind = f"{'NVFP4' if self.has_units else 'MXFP4'}{'' if self.inputs else ' weights'}"
        return next(names, f"{self.method}, {kind}")

    @property
    def _kind(self) -> tuple[Any, ...]:
        inputs = self.inputs and (self.inputs.strategy, self.inputs.dynamic)
        if self.format is E2M1:
            in_bits = None if self.inputs is None else self.inputs.format.bits
            return (self.method, self.format.name, self.exponents, in_bits, inputs)
        if self.method != "compressed-tensors":
            return (self.method, self.strategy == "block" if self.method == "fp8" else self.strategy)
        if inputs is None or (self.strategy == "group" and self.exponents):
            return (self.method, inputs and "microscaled")
        return (self.method, self.strategy, inputs)

    @property
    def is_static(self) -> bool:
        """Whether each layer has a scale for its input."""
        return self.inputs is not None and not self.inputs.dynamic

    @property
    def has_units(self) -> bool:
        """Whether a weight has a scale of its own beside those of its blocks, as in NVFP4."""
        return self.format is E2M1 and not self.exponents

    @property
    def of_one_layer(self) -> "Layout":
        """This layout without what the configuration of a folder says of other layers."""
        others = ("ignore", "targets", "cached", "status", "groups")
        defaults = {field.name: field.default for field in dataclasses.fields(self) if field.name in others}
        return dataclasses.replace(self, **defaults)

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The rows and columns of a kernel `[out, in]` that share a scale."""
        return self.size or {"tensor": shape, "channel": (1, shape[1])}[self.strategy]


def _require_strategy(strategy: object, known: tuple[str, ...], of: str) -> None:
    if strategy not in known:
        raise ValueError(f"strategy={strategy!r} of {of} is unknown; use one of {', '.join(map(repr, known))}")


_STATIC, _GROUPS = Inputs("tensor", False), Inputs("group", size=128)
_MX4, _NV4 = Inputs("group", size=32, format=E2M1), Inputs("group", False, 16, E2M1)

named: dict[str, Layout] = {
    "FP8_DYNAMIC": Layout("channel", Inputs("token")),
    "HF_FP8": Layout("block", _GROUPS, (128, 128), method="fp8"),
    "FP8_BLOCK": Layout("block", _GROUPS, (128, 128)),
    "MXFP8": Layout("group", Inputs("group", size=32), (1, 32), exponents=True),
    "FP8": Layout("channel", _STATIC),
    "FP8_TENSOR": Layout("tensor", _STATIC),
    "W8A16": Layout("channel"),
    "modelopt": Layout("tensor", _STATIC, method="modelopt"),
    "MXFP4": Layout("group", _MX4, (1, 32), exponents=True, format=E2M1),
    "MXFP4A16": Layout("group", None, (1, 32), exponents=True, format=E2M1),
    "NVFP4": Layout("group", _NV4, (1, 16), format=E2M1),
    "NVFP4A16": Layout("group", None, (1, 16), format=E2M1),
    "NVFP4_DYNAMIC": Layout("block", Inputs("token", size=16, format=E2M1), (16, 16), format=E2M1),
}
"""By name, in the order in which messages list them."""

PLAIN = "BF16"


def as_layout(layout: str | Layout) -> Layout | None:
    """A layout by its name; None for `"BF16"`, which quantizes nothing.

    Args:
        layout: A layout, or the name of one.

    Raises:
        ValueError: If no layout has that name.
    """
    if isinstance(layout, Layout) or layout == PLAIN:
        return layout if isinstance(layout, Layout) else None
    if not isinstance(layout, str) or layout not in named:
        near = ", ".join(repr(name) for name in nearest(str(layout), [*named, PLAIN], 3))
        raise ValueError(f"layout={layout!r} is unknown; the nearest are {near or 'none'}; all are {[*named, PLAIN]}")
    return named[layout]
