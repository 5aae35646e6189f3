"""The report as tables in the terminal and as Markdown."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .._printing import common_prefix, in_one_name, new_table, without_numbers
from .._product.names import DGRAD, FPROP, WGRAD
from ..devices.peaks import Peaks
from ..devices.roofline import FASTEST, SLOWEST, WHOLE_STEP, Roofline
from .collectives import Collective, Part
from .instruction import MAXIMUM
from .product import InFormat, Product, Program, Verdict
from .trace import label


def size(count: int | float) -> str:
    """Bytes for people.

    Example:
        >>> size(4123456789)
        '4.12 GB'
    """
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def operations(count: int | float) -> str:
    """FLOPs for people.

    Example:
        >>> operations(3.161e12)
        '3.16 TFLOP'
    """
    return _scaled(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def _scaled(count: int | float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        # What three digits would round up to 1000 has the next unit.
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {units[-1]}"


@dataclasses.dataclass(frozen=True)
class ProductRow:
    """Products that differ only in the number of their layer: where they are, one of them, and the sums of all."""

    where: str
    product: Product
    count: int
    flops: int


def rows(program: Program) -> list[ProductRow]:
    """Products in groups of those that are alike."""
    groups: dict[tuple, list[Product]] = {}
    for product in program.products:
        where = without_numbers(product.layer) or label(product.scope)
        alike = dataclasses.replace(product, layer="", scope="", bytes=0, executions=0)
        groups.setdefault((where, alike), []).append(product)
    return [
        ProductRow(
            where=in_one_name([product.layer for product in products]) or where,
            product=products[0],
            count=sum(product.executions for product in products),
            flops=sum(product.flops for product in products),
        )
        for (where, _), products in groups.items()
    ]


COLUMNS = ("layer", "product", "shape", "operands", "out", "implementation", "runs", "FLOPs", "verdict")
STYLES = {Verdict.FP8: "green", Verdict.EMULATED: "yellow", Verdict.HIGH_PRECISION: "red"}


def cells(row: ProductRow, program: Program) -> tuple[str, ...]:
    """The cells of a row, one for each name in `COLUMNS`."""
    product = row.product
    verdict = product.format if product.is_fp8 else product.verdict.value
    verdict = f"{verdict}: {product.reason}" if product.reason else verdict
    operands = product.lhs if product.lhs == product.rhs else f"{product.lhs}·{product.rhs}"
    share = f"{row.flops / (program.flops or 1):.1%}"
    how = product.shape, operands, product.out, product.implementation
    return row.where, product.name, *how, str(row.count), share, verdict


def layer_table(program: Program) -> Table:
    """A row for each layer, with fprop, dgrad and wgrad side by side; at most 80 columns wide.

    Layers that differ only in their number share a row if they have the same sizes and run alike. Products between
    activations, most of them in attention, share the last row. The largest size in a row stands for all of
    it, and a cell names each verdict once.

    Args:
        program: The step.
    """
    table = new_table()
    table.padding = (0, 1, 0, 0)
    table.add_column("layer", overflow="fold", min_width=12)
    table.add_column("rows × in × out", no_wrap=True)
    table.add_column("FLOPs", no_wrap=True, justify="right")
    for column in _SIDES:
        table.add_column(column, no_wrap=True)
    for prefix, found in _in_groups(_layers(program)):
        if prefix:
            table.add_row(Text(prefix))
        for layer in found:
            name = Text(layer.name.removeprefix(prefix).removeprefix(".") or "(the weight itself)")
            share = f"{layer.flops / (program.flops or 1):.1%}"
            size = Text(layer.size) if layer.has_weight else Text("")
            sides = (_verdicts([p for p in layer.products if _side(p) == column]) for column in _SIDES)
            table.add_row(Padding(name, (0, 0, 0, 2 if prefix else 0)), size, share, *sides)
    return table


_SIDES = FPROP, DGRAD, WGRAD


def _side(product: Product) -> str:
    """The column in which a product stands; a backward product between activations has that of dgrad."""
    if product.name == "backward":
        return WGRAD if product.makes_weight else DGRAD
    return FPROP if product.name == "forward" else product.name


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One row: a layer's products, or all between activations."""

    name: str
    products: tuple[Product, ...]
    has_weight: bool

    @property
    def flops(self) -> int:
        return sum(product.flops for product in self.products)

    @property
    def size(self) -> str:
        """The matrices' sides in the forward product, or the largest one."""
        forward = [product for product in self.products if _side(product) == FPROP] or self.products
        largest = max(forward, key=lambda product: product.flops)
        batch = f"{largest.batch}× " if largest.batch > 1 else ""
        return f"{batch}{largest.m}×{largest.k}×{largest.n}"


def _layers(program: Program) -> list[_Layer]:
    found: dict[str, list[Product]] = {}
    between: list[Product] = []
    for product in program.products:
        if product.layer:
            found.setdefault(product.layer, []).append(product)
        else:
            between.append(product)
    alike: dict[tuple[str, frozenset], list[str]] = {}
    for path, products in found.items():
        # The first layer of a model lacks dgrad, and is like the others all the same.
        sizes = {(p.batch, p.m, p.k, p.n) for p in products if _side(p) == FPROP}
        how = frozenset(sizes | {_word(p) for p in products})
        alike.setdefault((without_numbers(path), how), []).append(path)
    layers = [
        _Layer(in_one_name(paths), tuple(p for path in paths for p in found[path]), True) for paths in alike.values()
    ]
    if between:
        is_attention = any(p.in_attention or "attention" in p.scope.lower() for p in between)
        name = "attention (no weights)" if is_attention else "products without weights"
        layers.append(_Layer(name, tuple(between), False))
    return layers


def _in_groups(layers: list[_Layer]) -> Iterator[tuple[str, list[_Layer]]]:
    """Runs of layers with what their paths begin with, where that is worth a line of its own."""
    with_weight, others = ([layer for layer in layers if layer.has_weight is kind] for kind in (True, False))
    groups: dict[str, list[_Layer]] = {}
    for layer in with_weight:
        groups.setdefault(_block(layer.name) or ".".join(layer.name.split(".")[:2]), []).append(layer)
    for members in groups.values():
        names = [layer.name for layer in members]
        yield common_prefix(names) if len(members) > 1 else _block(names[0]), members
    if others:
        yield "", others


def _block(name: str) -> str:
    """The block of a list, or the range of blocks, that a layer is in: the path up to its number; empty outside."""
    *above, _ = name.split(".")
    number = next((i for i, segment in enumerate(above) if segment[:1].isdigit()), None)
    return "" if number is None else ".".join(above[: number + 1])


def _verdicts(products: Iterable[Product]) -> Text:
    """How some products run: each way once, the worst of them in the color of the cell."""
    words = {_word(product): product.verdict for product in products}
    worst = max(words.values(), key=list(STYLES).index, default=None)
    return Text(", ".join(words), STYLES[worst] if worst is not None else "")


def _word(product: Product) -> str:
    if product.is_fp8:
        return product.format
    if product.verdict is Verdict.EMULATED:
        return product.verdict.value
    return product.lhs if product.lhs == product.rhs else "mixed"


def each_product(program: Program) -> RenderableType:
    """Every product: shape, formats, implementation, runs, the reason if it is not in FP8; at any width from 80 on.

    Args:
        program: The step.
    """
    lines: list[RenderableType] = [Text("")]
    last = ""
    for row in rows(program):
        if row.where != last:
            lines.append(Text(row.where, overflow="fold"))
            last = row.where
        _, name, shape, operands, out, implementation, runs, share, verdict = cells(row, program)
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_column(no_wrap=True, min_width=10, max_width=10)
        line.add_column(no_wrap=True, min_width=6, max_width=6, justify="right")
        line.add_column(overflow="fold")
        words = f"{shape}, {operands} to {out}, {implementation}, {runs} runs: "
        line.add_row(f"  {name}", share, Text(words).append(verdict, STYLES[row.product.verdict]))
        lines.append(line)
    return Group(*lines)


COLLECTIVE_COLUMNS = ("collective", "of", "runs", "sent", "meanwhile")


def collective_lines(program: Program) -> list[tuple[str, ...]]:
    """Collectives, similar ones in one line of at most 80 columns. A line says what they do, what they send and how
    often, the bytes of it that a device sends in a step, and how many products run meanwhile. One that sends arrays of
    several kinds has a line for each.

    Args:
        program: The step.
    """
    groups: dict[tuple[str, str], list[Collective]] = {}
    sent: dict[tuple[str, str], float] = {}
    for found in program.collectives:
        keys = [(_kind(found), _content(found, part)) for part in found.parts]
        for key in dict.fromkeys(keys):
            groups.setdefault(key, []).append(found)
        for key, part in zip(keys, found.parts, strict=True):
            sent[key] = sent.get(key, 0.0) + part.wire * found.executions
    return [
        (*key, str(sum(found.executions for found in alike)), size(sent[key]), _meanwhile(alike))
        for key, alike in groups.items()
    ]


def _kind(found: Collective) -> str:
    return f"{found.kind} (max)" if found.reduction == MAXIMUM else found.kind


def _content(found: Collective, part: Part) -> str:
    if found.reduces_gradients:
        return f"{part.dtype} gradients"
    return f"{part.dtype} operands" if part.feeds_product else part.dtype


def _meanwhile(alike: list[Collective]) -> str:
    if not any(found.is_asynchronous for found in alike):
        return "nothing"
    least, most = (choose(len(found.meanwhile) for found in alike) for choose in (min, max))
    if least < most:
        return f"{least} to {most} products"
    return "1 product" if most == 1 else f"{most or 'no'} products"


@dataclasses.dataclass(frozen=True)
class Page:
    """What is shown of a report: the flags, the headline, fields of the report, and whether FP8 is emulated."""

    flags: str
    headline: str
    step: Program
    baseline: Program | None
    peaks: Peaks | None
    findings: tuple[str, ...]
    caveats: tuple[str, ...]
    emulates: bool

    @property
    def asked(self) -> tuple[Verdict, ...]:
        """The verdicts that count as FP8: on a device that emulates it, what was asked for."""
        return (Verdict.FP8, Verdict.EMULATED) if self.emulates else (Verdict.FP8,)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The step, and the baseline if there is one."""
        return (self.step,) if self.baseline is None else (self.step, self.baseline)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The peaks that times are estimated with."""
        if self.peaks is None:
            return ()
        likely = WHOLE_STEP
        narrow = f"{likely.fp8_flops} of {self.peaks.fp8 / 1e12:.5g} TFLOP/s in FP8, "
        span = lambda name: f"{getattr(SLOWEST, name):.2f} to {getattr(FASTEST, name):.2f}"
        in_blocks = ""
        if any(product.block_scaled and product.is_fp8 for product in self.step.products):
            narrow += f"with scales of blocks {likely.block_flops} of that, "
            in_blocks = f"{span('block_flops')} with scales of blocks, "
            if self.peaks.fp4 is not None:
                narrow += f"{likely.fp4_flops} of {self.peaks.fp4 / 1e12:.5g} in FP4, "
                in_blocks += f"{span('fp4_flops')} in FP4 (assumed), "
        return (
            f"times are a roofline estimate, nothing ran: {narrow}"
            f"{likely.flops} of {self.peaks.bf16 / 1e12:.4g} in bf16, "
            f"{likely.bandwidth} of {self.peaks.bandwidth / 1e12:.3g} TB/s ({self.peaks.source}), "
            f"{likely.cast_bandwidth} of it in casts, {likely.two_layouts_bandwidth} where they write two layouts, "
            f"{1e6 * likely.launch:g} µs for each launch, {1e3 * likely.idle:g} ms in which nothing runs, but at most "
            f"{likely.most_idle:.0%} of the rest; "
            f"ranges of times are what was measured: {span('fp8_flops')} in FP8, {in_blocks}{span('flops')} in bf16, "
            f"{span('bandwidth')} of the bandwidth, {span('cast_bandwidth')} in casts, {span('two_layouts_bandwidth')} "
            "where they write two layouts, launches counted or hidden",
        )


def totals(page: Page) -> list[tuple[str, ...]]:
    """The lines of the table of totals: a name, the step's figure, the baseline's."""
    figures: list[tuple[str, Callable[[Program], str]]] = []
    if (peaks := page.peaks) is not None:
        figures.append(("time (estimate)", lambda p: _time(p, peaks)))
    emulated = ", emulated" if page.emulates else ""
    # Every format of either program, so that the columns compare; FP4 alone may be left out.
    formats = {
        name for program in page.programs for name, one in program.by_format(*page.asked).items() if one.products
    }
    formats.add("FP8")

    def listed(program: Program, word: Callable[[InFormat], str]) -> str:
        found = program.by_format(*page.asked)
        names = sorted(formats, key=list(dict.fromkeys((*found, *sorted(formats)))).index)
        return ", ".join(f"{name} {word(found.get(name, InFormat(0, 0.0)))}" for name in names)

    figures.append(
        (
            f"FLOPs by format{emulated}",
            lambda p: f"{listed(p, lambda one: f'{one.share:.1%}')} of {operations(p.flops - _rotating(p))}",
        )
    )
    if any(program.useful_flops != program.flops for program in page.programs):
        figures.append(
            ("useful FLOPs", lambda p: f"{p.useful_flops / (p.flops or 1):.1%}, {operations(p.useful_flops)}")
        )
    on_host = any(program.memory.host for program in page.programs)
    figures += [
        (f"products by format{emulated}", lambda p: listed(p, lambda one: str(one.products))),
        *([("rotations, not in these", _rotations)] if any(program.rotations for program in page.programs) else []),
        ("other launches", lambda p: f"{p.others.count}, {size(p.others.bytes)}"),
        ("of these under 1 MB", lambda p: str(p.others.small)),
        ("temporaries", lambda p: size(p.memory.temporaries)),
        ("peak memory", lambda p: size(p.memory.peak)),
        *([("arguments on the host", lambda p: size(p.memory.host))] if on_host else []),
        ("sent to other devices", collectives),
        ("compiled in", lambda p: f"{p.seconds:.1f} s"),
    ]
    return [(name, *map(figure, page.programs)) for name, figure in figures]


def _time(program: Program, peaks: Peaks) -> str:
    likely, *_ = found = [program.estimate(Roofline(peaks, e)).total for e in (WHOLE_STEP, SLOWEST, FASTEST)]
    return f"{1e3 * likely:.3g} ms ({1e3 * min(found):.3g} to {1e3 * max(found):.3g})"


def _rotating(program: Program) -> int:
    return sum(product.flops for product in program.rotations)


def _rotations(program: Program) -> str:
    count = sum(product.executions for product in program.rotations)
    return f"{count}, {operations(_rotating(program))}"


def collectives(program: Program) -> str:
    """Kinds and formats with the bytes that a device sends in a step."""
    sums: dict[str, float] = {}
    for found in program.collectives:
        for part in found.parts:
            name = f"{found.kind} {part.dtype}"
            sums[name] = sums.get(name, 0) + part.wire * found.executions
    return ",\n".join(f"{name} {size(total)}" for name, total in sums.items()) or "none"


def as_renderable(page: Page, *, every_product: bool = False) -> RenderableType:
    """A report for a terminal of 80 columns or more: the verdict first.

    Args:
        page: What is shown.
        every_product: Whether each product has lines of its own, with formats and implementation, not a row per layer;
            and the assumptions of the estimate are there.
    """
    sums = new_table()
    sums.show_header = page.baseline is not None
    for column in _heads(page):
        # Figures break between words alone.
        sums.add_column(column, no_wrap=not column, overflow="fold")
    for name, *figures in totals(page):
        sums.add_row(name, *map(Text, figures))
    sent = new_table()
    for column in COLLECTIVE_COLUMNS:
        sent.add_column(column, overflow="fold", justify="right" if column in ("runs", "sent") else "left")
    for line in collective_lines(page.step):
        sent.add_row(*map(Text, line))
    products = each_product(page.step) if every_product else layer_table(page.step)
    findings = [Text(f"! {finding}", "yellow") for finding in page.findings]
    notes = [*page.caveats, *(page.assumptions if every_product else ())]
    tables = [products, sums, *([sent] if page.step.collectives else [])]
    # What the other setting changes stands at the end; here, under which flags all of it holds.
    headline = Text(page.headline, "bold").append(f"; {page.flags.partition('; ')[0]}", "not bold")
    return Group(headline, *tables, *findings, *(Text(f"? {note}", "dim") for note in notes), Text(page.flags, "dim"))


def _heads(page: Page) -> tuple[str, ...]:
    return ("", "step", "baseline")[: 1 + len(page.programs)]


def as_markdown(page: Page) -> str:
    """A report for a pull request or a page."""
    lines = [page.flags, "", f"**{page.headline}**", ""]
    lines += [*_table(COLUMNS, [cells(row, page.step) for row in rows(page.step)]), ""]
    lines += [*_table(_heads(page), totals(page)), ""]
    if page.step.collectives:
        lines += [*_table(COLLECTIVE_COLUMNS, collective_lines(page.step)), ""]
    lines += [f"- {finding}" for finding in page.findings] + [
        f"- not known: {note}" for note in (*page.caveats, *page.assumptions)
    ]
    return "\n".join(lines) + "\n"


def _table(heads: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(heads), line(tuple("---" for _ in heads)), *map(line, body)]
