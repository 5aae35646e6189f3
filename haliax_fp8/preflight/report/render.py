"""The report as a table in the terminal and as Markdown."""

import dataclasses
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.text import Text

from ..._printing import new_table
from ...devices.peaks import Peaks
from ...devices.roofline import FASTEST, LIKELY, SLOWEST, Roofline
from ..verdict.product import Verdict
from ..verdict.program import Program
from . import communication
from .products import COLUMNS, cells, each_product, layer_table, rows
from .units import operations, size


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
    def notes(self) -> tuple[str, ...]:
        """The caveats, and the peaks that times are estimated with."""
        if self.peaks is None:
            return self.caveats
        likely = LIKELY
        span = lambda name: f"{getattr(SLOWEST, name):.2f} to {getattr(FASTEST, name):.2f}"
        return (
            *self.caveats,
            f"times are a roofline estimate: {likely.fp8_flops} of {self.peaks.fp8 / 1e12:.5g} TFLOP/s in FP8, "
            f"{likely.flops} of {self.peaks.bf16 / 1e12:.4g} in bf16, {likely.bandwidth} of "
            f"{self.peaks.bandwidth / 1e12:.3g} TB/s ({self.peaks.source}), {likely.cast_bandwidth} of it in casts, "
            f"{likely.two_layouts_bandwidth} where they write two layouts, {1e6 * likely.launch:g} µs for each launch; "
            f"ranges of times are what was measured: {span('fp8_flops')} in FP8, {span('flops')} in bf16, "
            f"{span('bandwidth')} of the bandwidth, {span('cast_bandwidth')} in casts, {span('two_layouts_bandwidth')} "
            "where they write two layouts, launches counted or hidden",
        )


def totals(page: Page) -> list[tuple[str, ...]]:
    """The lines of the table of totals: a name, the step's figure, the baseline's."""
    figures: list[tuple[str, Callable[[Program], str]]] = []
    if (peaks := page.peaks) is not None:
        figures.append(("time (estimate)", lambda p: _time(p, peaks)))
    emulated = ", emulated" if page.emulates else ""
    formats = "FP8 or FP4" if any(product.is_fp4 for product in page.step.products) else "FP8"
    figures.append(
        (f"FLOPs in {formats}{emulated}", lambda p: f"{p.share(*page.asked):.1%} of {operations(p.flops)}"),
    )
    if any(program.useful_flops != program.flops for program in page.programs):
        figures.append(
            ("useful FLOPs", lambda p: f"{p.useful_flops / (p.flops or 1):.1%}, {operations(p.useful_flops)}")
        )
    on_host = any(program.memory.host for program in page.programs)
    figures += [
        (f"products in {formats}{emulated}", lambda p: _count(p, page.asked)),
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
    likely, *ends = (program.estimate(Roofline(peaks, e)).total for e in (LIKELY, SLOWEST, FASTEST))
    return f"{1e3 * likely:.3g} ms ({1e3 * min(ends):.3g} to {1e3 * max(ends):.3g})"


def _count(program: Program, verdicts: tuple[Verdict, ...]) -> str:
    count = sum(product.executions for product in program.products if product.verdict in verdicts)
    return f"{count} of {sum(product.executions for product in program.products)}"


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
        every_product: Whether each product has lines of its own, with formats and implementation, not a row per layer.
    """
    sums = new_table()
    sums.show_header = page.baseline is not None
    for column in _heads(page):
        # Figures break between words alone.
        sums.add_column(column, no_wrap=not column, overflow="fold")
    for name, *figures in totals(page):
        sums.add_row(name, *map(Text, figures))
    sent = new_table()
    for column in communication.HEADS:
        sent.add_column(column, overflow="fold", justify="right" if column in ("runs", "sent") else "left")
    for line in communication.lines(page.step):
        sent.add_row(*map(Text, line))
    products = each_product(page.step) if every_product else layer_table(page.step)
    findings = [Text(f"! {finding}", "yellow") for finding in page.findings]
    notes = [Text(f"? {note}", "dim") for note in page.notes]
    tables = [products, sums, *([sent] if page.step.collectives else [])]
    # What the other setting changes stands at the end; here, under which flags all of it holds.
    headline = Text(page.headline, "bold").append(f"; {page.flags.partition('; ')[0]}", "not bold")
    return Group(headline, *tables, *findings, *notes, Text(page.flags, "dim"))


def _heads(page: Page) -> tuple[str, ...]:
    return ("", "step", "baseline")[: 1 + len(page.programs)]


def as_markdown(page: Page) -> str:
    """A report for a pull request or a page."""
    lines = [page.flags, "", f"**{page.headline}**", ""]
    lines += [*_table(COLUMNS, [cells(row, page.step) for row in rows(page.step)]), ""]
    lines += [*_table(_heads(page), totals(page)), ""]
    if page.step.collectives:
        lines += [*_table(communication.HEADS, communication.lines(page.step)), ""]
    lines += [f"- {finding}" for finding in page.findings] + [f"- not known: {note}" for note in page.notes]
    return "\n".join(lines) + "\n"


def _table(heads: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(heads), line(tuple("---" for _ in heads)), *map(line, body)]
