"""The rows of a report: what its tables say of products, of totals and of collectives."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from rich.text import Text

from .._printing import DottedName, common_prefix, in_one_name, without_numbers
from ..devices import Peaks
from ..devices.roofline import FASTEST, SLOWEST, WHOLE_STEP, Roofline
from ..scopes import DGRAD, FPROP, WGRAD
from .collectives import Collective, Part
from .instruction import MAXIMUM
from .product import InFormat, Product, Program, Verdict
from .render import Cell, Section, operations, size
from .trace import label


# --- Products ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """The products of a layer, or of several that differ in their numbers alone; or all between activations.

    Args:
        name: The name of the layer, or of all of them.
        products: Their products.
        has_weight: Whether these are products of a layer.
    """

    name: str
    products: tuple[Product, ...]
    has_weight: bool

    @property
    def flops(self) -> int:
        """The FLOPs of all of them."""
        return sum(product.flops for product in self.products)

    @property
    def size(self) -> str:
        """The matrices' sides in the forward product, or the largest one."""
        forward = [product for product in self.products if side(product) == FPROP] or self.products
        largest = max(forward, key=lambda product: product.flops)
        batch = f"{largest.batch}× " if largest.batch > 1 else ""
        return f"{batch}{largest.m}×{largest.k}×{largest.n}" if self.has_weight else ""

    @property
    def alike(self) -> Iterable[list[Product]]:
        """The products, those together that differ only in their layer."""
        groups: dict[tuple[str, Product], list[Product]] = {}
        for product in self.products:
            where = "" if self.has_weight else label(product.scope)
            kind = dataclasses.replace(product, layer="", scope="", bytes=0, executions=0)
            groups.setdefault((where, kind), []).append(product)
        return groups.values()


def rows(program: Program) -> list[Row]:
    """A row for each layer, in the order of the program; products between activations, as in attention, share the last.

    Layers that differ only in their number share a row if they have the same sizes and run alike.

    Args:
        program: The step.
    """
    by_layer: dict[str, list[Product]] = {}
    between: list[Product] = []
    for product in program.products:
        (by_layer.setdefault(product.layer, []) if product.layer else between).append(product)
    alike: dict[tuple[str, frozenset], list[str]] = {}
    for path, products in by_layer.items():
        # The first layer of a model lacks dgrad, and is like the others all the same.
        sizes = {(p.batch, p.m, p.k, p.n) for p in products if side(p) == FPROP}
        how = frozenset(sizes | {_word(p) for p in products})
        alike.setdefault((without_numbers(path), how), []).append(path)
    layers = [
        Row(in_one_name(paths), tuple(p for path in paths for p in by_layer[path]), True) for paths in alike.values()
    ]
    if between:
        is_attention = any(p.in_attention or "attention" in p.scope.lower() for p in between)
        name = "attention (no weights)" if is_attention else "products without weights"
        layers.append(Row(name, tuple(between), False))
    return layers


SIDES = FPROP, DGRAD, WGRAD


def side(product: Product) -> str:
    """The column in which a product stands; a backward product between activations has that of dgrad.

    Args:
        product: The product.
    """
    if product.name == "backward":
        return WGRAD if product.makes_weight else DGRAD
    return FPROP if product.name == "forward" else product.name


def layers(program: Program) -> Section:
    """A line for each row, with fprop, dgrad and wgrad side by side; at most 80 columns wide.

    The largest size in a row stands for all of it, and a cell names each verdict once.

    Args:
        program: The step.
    """
    lines: list[tuple[Cell, ...]] = []
    for prefix, members in _in_groups(rows(program)):
        lines += [(DottedName(prefix),)] if prefix else []
        for row in members:
            name = row.name.removeprefix(prefix).removeprefix(".") or "(the weight itself)"
            sides = (_verdicts(product for product in row.products if side(product) == column) for column in SIDES)
            lines.append((_indented(name, prefix), row.size, _share(row.flops, program), *sides))
    return Section(("layer", "rows × in × out", "FLOPs", *SIDES), lines, wide=["layer"], figures=["FLOPs"])


def _indented(name: str, prefix: str) -> Cell:
    # Only a path is broken at its dots; other text is broken between words.
    return Text(f"  {name}" if prefix else name) if " " in name else DottedName(name, 2 if prefix else 0)


def every_product(program: Program) -> Section:
    """A line for each product, below the name of its layer: its share of the FLOPs, its shape and formats, what runs
    it, how often, and why it is not in FP8.

    Args:
        program: The step.
    """
    lines: list[tuple[Cell, ...]] = []
    for row in rows(program):
        last = ""
        for alike in row.alike:
            product, flops = alike[0], sum(product.flops for product in alike)
            where = row.name if row.has_weight else label(product.scope)
            lines += [("", "", Text(where, "bold"))] if where != last else []
            said = Text(f"{product.how(sum(product.executions for product in alike))}: ")
            said.append(product.outcome, STYLES[product.verdict])
            lines.append((product.name, _share(flops, program), said))
            last = where
    return Section(("product", "FLOPs", "how it runs"), lines, wide=["how it runs"], figures=["FLOPs"])


def _share(flops: int, program: Program) -> str:
    return f"{flops / (program.flops or 1):.1%}"


def _in_groups(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Runs of rows with what their paths begin with, where that is worth a line of its own."""
    with_weight, others = ([row for row in rows if row.has_weight is kind] for kind in (True, False))
    groups: dict[str, list[Row]] = {}
    for row in with_weight:
        groups.setdefault(_block(row.name) or ".".join(row.name.split(".")[:2]), []).append(row)
    for members in groups.values():
        names = [row.name for row in members]
        yield common_prefix(names) if len(members) > 1 else _block(names[0]), members
    if others:
        yield "", others


def _block(name: str) -> str:
    """The block of a list, or the range of blocks, that a layer is in: the path up to its number; empty outside."""
    *above, _ = name.split(".")
    number = next((i for i, segment in enumerate(above) if segment[:1].isdigit()), None)
    return "" if number is None else ".".join(above[: number + 1])


STYLES = {Verdict.FP8: "green", Verdict.EMULATED: "yellow", Verdict.HIGH_PRECISION: "red"}


def _verdicts(products: Iterable[Product]) -> Text:
    """How some products run: each way once, the worst of them in the color of the cell."""
    words = {_word(product): product.verdict for product in products}
    worst = max(words.values(), key=list(STYLES).index, default=None)
    return Text(", ".join(words), STYLES[worst] if worst is not None else "")


def _word(product: Product) -> str:
    return product.verdict.value if product.verdict is Verdict.EMULATED else product.format


# --- Collectives ------------------------------------------------------------------------------------------------------


def sent(program: Program) -> Section:
    """Collectives, similar ones in one line of at most 80 columns. A line says what they do, what they send and how
    often, the bytes of it that a device sends in a step, and how many products run meanwhile. One that sends arrays of
    several kinds has a line for each.

    Args:
        program: The step.
    """
    groups: dict[tuple[str, str], list[Collective]] = {}
    bytes: dict[tuple[str, str], float] = {}
    for collective in program.collectives:
        keys = [(_kind(collective), _content(collective, part)) for part in collective.parts]
        for key in dict.fromkeys(keys):
            groups.setdefault(key, []).append(collective)
        for key, part in zip(keys, collective.parts, strict=True):
            bytes[key] = bytes.get(key, 0.0) + part.wire * collective.executions
    lines = [
        (*key, str(sum(collective.executions for collective in alike)), size(bytes[key]), _meanwhile(alike))
        for key, alike in groups.items()
    ]
    heads = "collective", "of", "runs", "sent", "meanwhile"
    return Section(heads, lines, wide=heads, figures=["runs", "sent"])


def _kind(collective: Collective) -> str:
    return f"{collective.kind} (max)" if collective.reduction == MAXIMUM else collective.kind


def _content(collective: Collective, part: Part) -> str:
    if collective.reduces_gradients:
        return f"{part.dtype} gradients"
    return f"{part.dtype} operands" if part.feeds_product else part.dtype


def _meanwhile(alike: list[Collective]) -> str:
    if not any(collective.is_asynchronous for collective in alike):
        return "nothing"
    least, most = (choose(len(collective.meanwhile) for collective in alike) for choose in (min, max))
    if least < most:
        return f"{least} to {most} products"
    return "1 product" if most == 1 else f"{most or 'no'} products"


# --- Totals -----------------------------------------------------------------------------------------------------------


def assumptions(program: Program, peaks: Peaks) -> str:
    """The rates that times are estimated with.

    Args:
        program: The step.
        peaks: The device's peaks.
    """
    likely = WHOLE_STEP
    narrow = f"{likely.fp8_flops} of {peaks.fp8 / 1e12:.5g} TFLOP/s in FP8, "
    span = lambda name: f"{getattr(SLOWEST, name):.2f} to {getattr(FASTEST, name):.2f}"
    in_blocks = ""
    if any(product.block_scaled and product.is_fp8 for product in program.products):
        narrow += f"with scales of blocks {likely.block_flops} of that, "
        in_blocks = f"{span('block_flops')} with scales of blocks, "
        if peaks.fp4 is not None:
            narrow += f"{likely.fp4_flops} of {peaks.fp4 / 1e12:.5g} in FP4, "
            in_blocks += f"{span('fp4_flops')} in FP4 (assumed), "
    return (
        f"times are a roofline estimate, nothing ran: {narrow}"
        f"{likely.flops} of {peaks.bf16 / 1e12:.4g} in bf16, "
        f"{likely.bandwidth} of {peaks.bandwidth / 1e12:.3g} TB/s ({peaks.source}), "
        f"{likely.cast_bandwidth} of it in casts, {likely.two_layouts_bandwidth} where they write two layouts, "
        f"{1e6 * likely.launch:g} µs for each launch, {1e3 * likely.idle:g} ms in which nothing runs, but at most "
        f"{likely.most_idle:.0%} of the rest; "
        f"ranges of times are what was measured: {span('fp8_flops')} in FP8, {in_blocks}{span('flops')} in bf16, "
        f"{span('bandwidth')} of the bandwidth, {span('cast_bandwidth')} in casts, {span('two_layouts_bandwidth')} "
        "where they write two layouts, launches counted or hidden"
    )


def totals(programs: Sequence[Program], peaks: Peaks | None, asked: Collection[Verdict]) -> Section:
    """A line for each figure: its name, the step's, the baseline's.

    Args:
        programs: The step, and the baseline if there is one.
        peaks: The device's peaks; None if they are unknown.
        asked: The verdicts that count as FP8.
    """
    figures: list[tuple[str, Callable[[Program], str]]] = []
    if peaks is not None:
        figures.append(("time (estimate)", lambda p: _time(p, peaks)))
    emulated = ", emulated" if Verdict.EMULATED in asked else ""
    # Every format of either program, so that the columns compare; FP4 alone may be left out.
    formats = {name for program in programs for name, one in program.by_format(*asked).items() if one.products}
    formats.add("FP8")

    def listed(program: Program, word: Callable[[InFormat], str]) -> str:
        by_format = program.by_format(*asked)
        names = sorted(formats, key=list(dict.fromkeys((*by_format, *sorted(formats)))).index)
        return ", ".join(f"{name} {word(by_format.get(name, InFormat(0, 0.0)))}" for name in names)

    figures.append(
        (
            f"FLOPs by format{emulated}",
            lambda p: f"{listed(p, lambda one: f'{one.share:.1%}')} of {operations(p.flops - _rotating(p))}",
        )
    )
    if any(program.useful_flops != program.flops for program in programs):
        figures.append(
            ("useful FLOPs", lambda p: f"{p.useful_flops / (p.flops or 1):.1%}, {operations(p.useful_flops)}")
        )
    on_host = any(program.memory.host for program in programs)
    figures += [
        (f"products by format{emulated}", lambda p: listed(p, lambda one: str(one.products))),
        *([("rotations, not in these", _rotations)] if any(program.rotations for program in programs) else []),
        ("other launches", lambda p: f"{p.others.count}, {size(p.others.bytes)}"),
        ("of these under 1 MB", lambda p: str(p.others.small)),
        ("temporaries", lambda p: size(p.memory.temporaries)),
        ("peak memory", lambda p: size(p.memory.peak)),
        *([("arguments on the host", lambda p: size(p.memory.host))] if on_host else []),
        ("sent to other devices", _collectives),
        ("compiled in", lambda p: f"{p.seconds:.1f} s"),
    ]
    lines = [(name, *(figure(program) for program in programs)) for name, figure in figures]
    heads = ("", "step", "baseline")[: 1 + len(programs)]
    return Section(heads, lines, wide=heads[1:])


def _time(program: Program, peaks: Peaks) -> str:
    likely, *_ = times = [program.estimate(Roofline(peaks, e)).total for e in (WHOLE_STEP, SLOWEST, FASTEST)]
    return f"{1e3 * likely:.3g} ms ({1e3 * min(times):.3g} to {1e3 * max(times):.3g})"


def _rotating(program: Program) -> int:
    return sum(product.flops for product in program.rotations)


def _rotations(program: Program) -> str:
    count = sum(product.executions for product in program.rotations)
    return f"{count}, {operations(_rotating(program))}"


def _collectives(program: Program) -> str:
    """Kinds and formats with the bytes that a device sends in a step."""
    sums: dict[str, float] = {}
    for collective in program.collectives:
        for part in collective.parts:
            name = f"{collective.kind} {part.dtype}"
            sums[name] = sums.get(name, 0) + part.wire * collective.executions
    return ",\n".join(f"{name} {size(total)}" for name, total in sums.items()) or "none"
