"""What `describe` returns: a row for each linear layer and op, as a table and as one line."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .._printing import DottedName, Printable, columns, in_one_name, new_table, without_numbers
from ..devices.device import Device
from ..recipes.support import Support
from .description_table import grouped
from .only_where_faster import FasterOn
from .predicted_time import Prediction


NOT_YET = "no amax yet: not called, or with zeros alone"
"""What the histories say of a layer whose neighbours have recorded amaxes."""


@dataclasses.dataclass(frozen=True, repr=False)
class LayerDescription(Printable):
    """One linear layer, or one op of a module of your own. Print it for a table.

    Args:
        path: Its path in the model.
        shape: Its input and output axes; of an op, which knows none, its class.
        stacked: The stacks that repeat it, such as `layers 12`.
        recipe: The recipe that it runs, or how it is quantized for inference; None in high precision.
        reason: Why it stays in high precision; empty for a converted layer.
        support: How its products run on the requested device; None in high precision.
        prediction: Its predicted times in bf16 and in FP8, whichever it runs in; None if not requested, or if unknown.
        uncalibrated: The operands whose static scale is not calibrated yet.
        recorded: Whether its delayed scales have recorded an amax; None if it has none. Abstract ones count
            as recorded.
        unrecorded: The operands with delayed scales that have recorded none; without the output gradient, which may be
            all zeros.
        uncalled: Why the loss never calls it, so that no product of it runs in FP8; empty if it does. Without a loss,
            that no step has recorded an amax, and None if histories do not tell.
        products: What each product runs in, such as `{"fprop": "FP8", "dgrad": "FP8", "wgrad": "high precision"}`; for
            inference fprop alone; empty if `recipe` is None.
        stored: The format of its data, if it holds data and scales in place of a weight; empty otherwise.
        scales: How whole-tensor scales are rounded when they are applied; empty if the layer has none.
        is_linear: Whether it counts as a linear layer: not an embedding, unless it was converted, nor a convolution.
    """

    path: str
    shape: str
    stacked: str
    recipe: str | None = None
    reason: str = ""
    support: Support | None = None
    prediction: Prediction | None = None
    uncalibrated: tuple[str, ...] = ()
    recorded: bool | None = None
    unrecorded: tuple[str, ...] = ()
    uncalled: str | None = None
    products: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    stored: str = ""
    scales: str = ""
    is_linear: bool = True

    @property
    def is_fp8(self) -> bool:
        """Whether a product of the layer runs in FP8 or FP4: it is converted, and not known to be uncalled."""
        return not self.uncalled and bool({"FP8", "FP4"}.intersection(self.products.values()))

    @property
    def is_fp4(self) -> bool:
        """Whether a product of the layer runs in FP4."""
        return self.is_fp8 and "FP4" in self.products.values()

    @property
    def precision(self) -> str:
        """What its products run in, in a word; by product, if they differ."""
        if not self.is_fp8:
            return "high precision"
        names: dict[str, list[str]] = {}
        for product, precision in self.products.items():
            names.setdefault(precision, []).append(product)
        return next(iter(names)) if len(names) == 1 else ", ".join(f"{'/'.join(names[p])} in {p}" for p in names)

    @property
    def _amaxes(self) -> str:
        if self.recorded and self.unrecorded:
            return f"none of {' and '.join(self.unrecorded)} yet: zero, masked or not finite"
        return {None: "", True: "recorded", False: "none recorded yet"}[self.recorded]

    def __rich__(self) -> Table:
        """What is known of it, a row each."""
        missing = ", ".join(self.uncalibrated)
        rows = {
            "shape": self.shape,
            "stack": self.stacked,
            "runs in": f"high precision: {self.reason}" if self.recipe is None else self.uncalled or self.recipe,
            "stored in": self.stored,
            "on device": "" if self.support is None else " ".join(str(self.support).split()),
            "prediction": "" if self.prediction is None else " ".join(str(self.prediction).split()),
            "calibrate": f"first: no scale for {missing}" if missing else "",
            "amaxes": self._amaxes,
            "scales": self.scales,
        }
        table = new_table(self.path or "(the module itself)")
        table.show_header = False
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, text in rows.items():
            if text:
                table.add_row(name, Text(text))
        return table


@dataclasses.dataclass(frozen=True, repr=False)
class ModelDescription(Printable):
    """Every linear layer of a model, and every op of its own modules. Iterate over it, or print it.

    Args:
        layers: The layers, in the order of the tree.
        device: The requested device; if None, `support` refers to the local one.
        predict: The device and tokens that times are predicted for; None if they are not.
        arrays: The floating-point arrays of two or more dimensions that belong to no layer of a known class, by path:
            products with them stay in high precision.
        head: The path of a converted layer that seems to be the head, by its name, or as the last of a list of layers;
            empty if there is none.
        phases: A line for each phase of the run, if a step with phases was given.
    """

    layers: tuple[LayerDescription, ...]
    device: Device | None = None
    predict: FasterOn | None = None
    arrays: tuple[str, ...] = ()
    head: str = ""
    phases: tuple[str, ...] = ()

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
        """How many layers run a product in FP8 or FP4."""
        return sum(layer.is_fp8 for layer in self.layers)

    @property
    def fp4_count(self) -> int:
        """How many of them run one in FP4."""
        return sum(layer.is_fp4 for layer in self.layers)

    @property
    def count(self) -> int:
        """How many linear layers there are, refused ones included; without embeddings that are not converted."""
        return sum(layer.is_linear for layer in self.layers)

    @property
    def summary(self) -> str:
        """One line for the start of a program: how many layers run in FP8, with which recipes, and whether natively.

        Example:
            >>> describe(fp8_linear_layers(model), device="h100").summary
            'FP8: 2 of 2 linear layers, DelayedScaling E4M3/E4M3/E5M2, native on NVIDIA H100 80GB HBM3'
        """
        recipes = collections.Counter(layer.recipe for layer in self.layers if layer.is_fp8)
        if not recipes:
            return f"FP8: none of {self.count} linear layers{self._stored}"
        counted = " + ".join(
            f"{count} {recipe}" if len(recipes) > 1 else str(recipe) for recipe, count in recipes.items()
        )
        four, of = self.fp4_count, f"of {self.count} linear layers"
        eight = self.fp8_count - four
        counts = ", ".join([f"FP8: {eight} {of}"] * bool(eight) + [f"FP4: {four} {of}"] * bool(four))
        if products := self._products:
            counts = f"{'FP8' if 'in FP8' in products else 'FP4'}: {self.fp8_count} {of}{products}"
        described = f"{counts}, {counted}, {_where(self.layers, self.device)}{self._stored}"
        waiting = sum(bool(layer.uncalibrated) for layer in self.layers)
        described += f", {waiting} to be calibrated first" if waiting else ""
        return described + (f", {len(self._not_yet)} without an amax yet" if self._not_yet else "")

    @property
    def _products(self) -> str:
        """How many products of the layers run in what, if those of a layer differ; else nothing."""
        layers = [layer for layer in self.layers if layer.is_fp8]
        if all(len({*layer.products.values()}) == 1 for layer in layers):
            return ""
        counts = collections.Counter(precision for layer in layers for precision in layer.products.values())
        first, *others = [f"{counts[p]} {{}}in {p}" for p in ("FP8", "FP4", "high precision") if counts[p]]
        return " with " + ", ".join([first.format("products "), *(other.format("") for other in others)])

    @property
    def _stored(self) -> str:
        """How many layers are stored in a narrow format, and multiply in high precision; empty if none are."""
        formats = [layer.stored for layer in self.layers if layer.stored and not layer.is_fp8]
        names = "/".join(dict.fromkeys(formats))
        return f"; {len(formats)} stored in {names} and multiplied by inputs in high precision" if formats else ""

    @property
    def estimate(self) -> str:
        """One line on the predicted time of the layers; empty if not requested."""
        predicted = [(layer.is_fp8, layer.prediction) for layer in self.layers if layer.prediction is not None]
        if self.predict is None or not predicted:
            return ""
        bf16 = sum(prediction.bf16 for _, prediction in predicted)
        now = sum(prediction.fp8 if is_fp8 else prediction.bf16 for is_fp8, prediction in predicted)
        least, most = (
            bf16 / sum(p.bf16 / p.gain_range[end] if is_fp8 else p.bf16 for is_fp8, p in predicted) for end in (0, 1)
        )
        launching = sum(prediction.launching for is_fp8, prediction in predicted if is_fp8)
        bound = "; launching takes longer than all the work" if launching > now / 2 else ""
        times = f"{1e3 * now:.3g} ms a step instead of {1e3 * bf16:.3g} ms"
        return (
            f"{bf16 / now:.2f} times as fast as with all of them in bf16 ({least:.2f} to {most:.2f}; estimate for "
            f"these layers' products on {self.predict}: {times}{bound})"
        )

    @property
    def scales(self) -> str:
        """How scales of whole tensors are rounded, over all layers; empty if there are none."""
        scales = "; ".join(dict.fromkeys(layer.scales for layer in self.layers if layer.scales))
        return f"Scales: {scales}" if scales else ""

    @property
    def waiting(self) -> str:
        """What is to be done if layers with delayed scaling still have their first scales; empty if none has."""
        known = [layer for layer in self.layers if layer.recorded is not None and not layer.uncalled]
        if known and not any(layer.recorded for layer in known):
            return "No amax recorded yet: calibrate, or write the state back with apply_updates"
        if not self._not_yet:
            return ""
        return (
            f"No amax recorded yet in {_names(self._not_yet)}: describe(model, loss_fn, *batch) shows whether the loss "
            "calls these layers"
        )

    @property
    def _not_yet(self) -> list[str]:
        return [layer.path for layer in self.layers if layer.uncalled == NOT_YET]

    @property
    def remarks(self) -> tuple[str, ...]:
        """What stays in high precision and may be meant not to, and the other way round."""
        remarks = []
        if self.head:
            remarks.append(
                f"The loss seems to read the output of {self.head}: such a layer is usually left in high precision, "
                f"exclude={self.head!r}"
            )
        if self.arrays:
            array, them = f"{len(self.arrays)} arrays belong", "them"
            if len(self.arrays) == 1:
                array, them = "1 array belongs", "it"
            remarks.append(
                f"{array} to no known layer; products with {them} stay in high precision: {_names(self.arrays)}"
            )
        return tuple(remarks)

    @property
    def note(self) -> str:
        """How the device runs FP8 products that it does not run natively."""
        supports = [
            (layer.recipe, layer.support) for layer in self.layers if layer.is_fp8 and layer.support is not None
        ]
        emulated = [(recipe, support) for recipe, support in supports if not support.is_native]
        if not emulated:
            return ""
        device, is_named = emulated[0][1].device, self.device is not None
        if device.emulates:
            where = "this CPU" if self.device is None else "a CPU"
            return f"FP8 products are emulated on {where}, with the same rounding"
        of = "" if len(emulated) == len(supports) else f" of {len(emulated)} layer{'s' if len(emulated) > 1 else ''}"
        said = f"FP8 products{of} are emulated on {device.kind}, slower than high precision:"
        if is_named:
            said = f"Conversion{of} is refused on {device.kind}, unless emulate=True asks for emulation:"
        first, *others = dict.fromkeys(support.reason for _, support in emulated)
        if not others:
            return f"{said} {first}"
        each = dict.fromkeys(f"- {recipe}: {support.reason}" for recipe, support in emulated)
        return "\n".join([said, *each])

    def __rich__(self) -> RenderableType:
        recipes = {layer.recipe for layer in self.layers if layer.is_fp8}
        (only,) = recipes if len(recipes) == 1 else (None,)
        supports = {layer.support for layer in self.layers if layer.is_fp8 and layer.support is not None}
        ways = {_verdict(support, self.device).plain for support in supports}
        everywhere = f", {ways.pop()} on {self.device.kind}" if self.device is not None and len(ways) == 1 else ""
        four, eight = self.fp4_count, self.fp8_count - self.fp4_count
        counts = [f"{eight} in FP8"] * bool(eight or not four) + [f"{four} in FP4"] * bool(four)
        first, *more = counts
        count = ", ".join([first.replace(" in", f" of {self.count} linear layers in"), *more])
        if products := self._products:
            count = f"{self.fp8_count} of {self.count} linear layers{products}"
        lines = *self.phases, self.estimate, self.note, self.waiting, *self.remarks, self.scales
        return Group(
            Text(f"{count}{f': {only}' if only else ''}{everywhere}{self._stored}", "bold"),
            self._table(only, with_support=self.device is not None and not everywhere),
            *(Text(line, "dim") for line in lines if line),
        )

    def _table(self, only: str | None, *, with_support: bool) -> Table:
        kind = lambda layer: (_runs_in(layer, None).plain, layer.support, layer.prediction)
        groups = list(grouped(self.layers, kind))
        lengths = [len(group.prefix) for group in groups] + [
            len(word) + (2 if group.prefix else 0)
            for group in groups
            for row in group.rows
            for word in row.name.split()
        ]
        table = new_table("")
        table.add_column("layer", overflow="fold")
        for column in ("shape", "runs in", *(("on device",) if with_support else ())):
            table.add_column(column, overflow="fold")
        if self.predict is not None:
            table.add_column("gain", no_wrap=True)
        for group in groups:
            if group.prefix:
                table.add_row(DottedName(group.prefix), Text(group.stacked))
            for row in group.rows:
                indent = 2 if group.prefix else 0
                stack = f" ({group.stacked})" if group.stacked and not group.prefix else ""
                text = (row.name or "(the module itself)") + stack
                name = Padding(Text(text), (0, 0, 0, indent)) if " " in text else DottedName(text, indent)
                cells = [name, Text("\n".join(row.shapes)), _runs_in(row.layer, only)]
                cells += [_verdict(row.layer.support, self.device)] if with_support else []
                table.add_row(*cells, *([] if self.predict is None else [_gain(row.layer.prediction)]))
        _divide_width(table, max(lengths, default=0))
        return table


def _names(paths: Sequence[str]) -> str:
    """The first names of layers; those that differ in their numbers alone as one."""
    alike: dict[str, list[str]] = {}
    for path in paths:
        alike.setdefault(without_numbers(path), []).append(path or "the model itself")
    names = [in_one_name(group) for group in alike.values()]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _divide_width(table: Table, longest: int) -> None:
    """Lets the names break last, and no column inside a word.

    Args:
        table: With the names in its first column.
        longest: The longest word of a name, with its indent.
    """
    console = Console(width=columns())
    measured = [
        [Measurement.get(console, console.options, cell) for cell in (column.header, *column.cells)]
        for column in table.columns
    ]
    whole = [max(cell.maximum for cell in cells) for cells in measured]
    words = [
        length if column.no_wrap else max(cell.minimum for cell in cells)
        for column, cells, length in zip(table.columns, measured, whole, strict=True)
    ]
    # Two blanks around each column, one between them, and one at both ends.
    room = columns() - 3 * len(whole) - 1
    if sum(whole) <= room:
        return
    names = min(28, longest, max(12, room - sum(words[1:])))
    if names + sum(words[1:]) > room:
        # A least width is only seen to after the space was divided, and the last column would be cut off.
        table.columns[0].width = min(whole[0], max(names, 2 * columns() // 5), columns() // 2)
        return
    least, widths = [min(names, whole[0]), *words[1:]], list(whole)
    while sum(widths) > room:
        widest = max((i for i, width in enumerate(widths) if width > least[i]), key=widths.__getitem__)
        widths[widest] -= 1
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width


def _where(layers: tuple[LayerDescription, ...], device: Device | None) -> str:
    """Whether all converted layers run natively."""
    supports = [layer.support for layer in layers if layer.is_fp8 and layer.support is not None]
    counts = collections.Counter(_verdict(support, device).plain for support in supports)
    words = [word for word in ("native", "emulated", "refused") if counts[word]]
    how = words[0] if len(words) == 1 else " and ".join(f"{counts[word]} {word}" for word in words)
    return f"{how} on {supports[0].device.kind}"


def _verdict(support: Support | None, device: Device | None) -> Text:
    """How a converted layer's products run on the device that is named, in the words of `supported`.

    Without a name the model is on the device already, so refused means emulated. The reason is in the note below the
    table, where it is not broken.
    """
    if support is None:
        return Text("")
    word = support.outcome.value if support.is_native or device is not None else "emulated"
    return Text(word, "green" if support.is_native else "yellow")


def _runs_in(layer: LayerDescription, only: str | None) -> Text:
    """The recipe, unless all layers have the same; or why there is none."""
    # Text, not markup: a pattern such as `[a-z]*` in a reason is not a style.
    if layer.recipe is None:
        return Text(f"high precision: {layer.reason}", "yellow")
    if layer.uncalled:
        return Text(layer.uncalled, "yellow")
    if layer.uncalibrated:
        return Text(f"{layer.recipe}; calibrate first: no scale for {', '.join(layer.uncalibrated)}", "red")
    text = layer.precision if layer.recipe == only else layer.recipe
    text += f", stored in {layer.stored}" if layer.stored else ""
    if layer.unrecorded and (layer.recorded or layer.uncalled == ""):
        missing = " and ".join(layer.unrecorded)
        return Text(f"{text}; no amax of {missing} yet: zero, masked or not finite", "yellow")
    return Text(text, "green")


def _gain(prediction: Prediction | None) -> Text:
    """How many times as fast FP8 is predicted to be."""
    if prediction is None:
        return Text("")
    low, high = prediction.gain_range
    style = "green" if prediction.gain >= 1.0 else "yellow"
    return Text(f"{prediction.gain:.2f}× ({low:.2f} to {high:.2f})", style)
