"""describe: what every linear layer of a model runs in, as rows and as a table."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import haliax as hax
import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ._device import Device
from ._transform import Fp8Config, decide, find_layers, rule_of


@dataclasses.dataclass(frozen=True)
class LayerDescription:
    """One linear layer.

    Args:
        path: Where it is in the model.
        shape: Its input and output axes.
        stacked: Over which stacks it is repeated, such as `layers 12`.
        recipe: The recipe that it runs, or None in high precision.
        reason: Why it is left in high precision; empty for a converted layer.
    """

    path: str
    shape: str
    stacked: str
    recipe: str | None
    reason: str

    @property
    def is_fp8(self) -> bool:
        """Whether the layer's products run in FP8."""
        return self.recipe is not None


@dataclasses.dataclass(frozen=True)
class ModelDescription:
    """Every linear layer of a model. Iterate over it, or print it.

    Args:
        layers: In the order of the tree.
        note: What the default device makes of FP8 products, if it does not run them natively.
    """

    layers: tuple[LayerDescription, ...]
    note: str = ""

    def __iter__(self) -> Iterator[LayerDescription]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, path: str) -> LayerDescription:
        """The layer at a path."""
        for layer in self.layers:
            if layer.path == path:
                return layer
        raise KeyError(f"no linear layer at {path!r}; there are {[layer.path for layer in self.layers]}")

    @property
    def fp8_count(self) -> int:
        """How many layers run in FP8."""
        return sum(layer.is_fp8 for layer in self.layers)

    def __rich__(self) -> Table:
        title = f"{self.fp8_count} of {len(self.layers)} linear layers in FP8"
        table = Table(
            title=title,
            box=rich.box.SIMPLE,
            title_justify="left",
            title_style="bold",
            caption=self.note,
            caption_justify="left",
        )
        for column in ("layer", "shape", "stacked", "runs in"):
            table.add_column(column, overflow="fold")
        for layer in self.layers:
            # Text, not markup: a pattern such as `[a-z]*` in a reason is no style.
            runs_in = Text(layer.recipe, "green") if layer.recipe else Text(f"high precision: {layer.reason}", "yellow")
            table.add_row(*map(Text, (layer.path or "(the module itself)", layer.shape, layer.stacked)), runs_in)
        return table

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(self)
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def describe(model: Any, config: Fp8Config | None = None) -> ModelDescription:
    """Lists every linear layer of a model with its recipe, or the reason why it stays in high precision.

    Args:
        model: A converted model, or any other tree.
        config: The configuration that the model was converted with, if its rules shall be named as reasons.

    Returns:
        The layers; `print` shows them as a table.

    Example:
        >>> layers = {"up": hax.nn.Linear.init(hax.Axis("in", 8), hax.Axis("out", 4), key=jax.random.key(0))}
        >>> describe(layers)["up"].reason
        'not converted'
    """
    rules = (Fp8Config() if config is None else config).layers
    decisions = {} if config is None else decide(model, config)
    rows = []
    for path, (layer, stack) in find_layers(model, rules).items():
        rule = rule_of(layer, rules)
        op = rule.op(layer)
        reason = ""
        if op is None:
            planned = decisions[path].reason if path in decisions else ""
            reason = rule.refusal(layer) or planned or rule.only_if_named(layer) or "not converted"
        rows.append(
            LayerDescription(
                path=path,
                shape=rule.shape(layer),
                stacked=_sizes(stack),
                recipe=None if op is None else str(op.recipe),
                reason=reason,
            )
        )
    device = Device.default()
    note = "FP8 products are emulated on this CPU, with the same rounding" if device.emulates else ""
    return ModelDescription(tuple(rows), note if any(row.is_fp8 for row in rows) else "")


def _sizes(stack: tuple[hax.Axis, ...]) -> str:
    return " × ".join(f"{axis.name} {axis.size}" for axis in stack)
