"""The report as a table in the terminal and as Markdown."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

import rich.box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ._product import Product, Verdict
from ._program import Program
from ._source import place


if TYPE_CHECKING:
    from ._report import PreflightReport


@dataclasses.dataclass(frozen=True)
class Row:
    """Products that are alike but for the number of their layer.

    Args:
        where: The layer, its number left out where there are several.
        product: One of them.
        count: How many run in a step.
        flops: Of all.
    """

    where: str
    product: Product
    count: int
    flops: int


def rows(program: Program) -> list[Row]:
    """Products in groups of those that are alike.

    Args:
        program: The program.
    """
    groups: dict[tuple, list[Product]] = {}
    for product in program.products:
        where = re.sub(r"\.\d+(?=\.|$)", ".*", product.layer) or place(product.scope)
        alike = dataclasses.replace(product, layer="", scope="", bytes=0, executions=0)
        groups.setdefault((where, alike), []).append(product)
    return [
        Row(
            where=products[0].layer if len(products) == 1 and products[0].layer else where,
            product=products[0],
            count=sum(product.executions for product in products),
            flops=sum(product.flops for product in products),
        )
        for (where, _), products in groups.items()
    ]


_COLUMNS = ("product", "role", "shape", "operands", "out", "kernel", "runs", "FLOPs", "verdict")
_STYLES = {Verdict.FP8: "green", Verdict.EMULATED: "yellow", Verdict.HIGH_PRECISION: "red"}


def _cells(row: Row, program: Program) -> tuple[str, ...]:
    product = row.product
    verdict = f"{product.verdict.value}: {product.reason}" if product.reason else product.verdict.value
    operands = product.lhs if product.lhs == product.rhs else f"{product.lhs}·{product.rhs}"
    share = f"{row.flops / (program.flops or 1):.1%}"
    return row.where, product.role, product.shape, operands, product.out, product.kernel, str(row.count), share, verdict


def totals(report: PreflightReport) -> list[tuple[str, ...]]:
    """The lines of the table of totals: a name, the step's figure, the baseline's."""

    def each(name: str, figure) -> tuple[str, ...]:
        programs = [report.step, *([report.baseline] if report.baseline else [])]
        return (name, *(figure(program) for program in programs))

    lines = [
        each("FLOPs in FP8", lambda p: f"{p.fp8_share:.1%} of {p.flops:.4g}"),
        each(
            "products in FP8",
            lambda p: f"{sum(x.executions for x in p.products if x.is_fp8)} of {sum(x.executions for x in p.products)}",
        ),
        each("other kernels", lambda p: f"{p.others.count}, {size(p.others.bytes)}"),
        each("temporaries", lambda p: size(p.memory.temporaries)),
        each("peak memory", lambda p: size(p.memory.peak)),
        each("collectives", lambda p: collectives(p)),
    ]
    if report.target.peaks is not None:
        peaks = report.target.peaks
        lines.append(each("time (estimate)", lambda p: f"{1e3 * p.estimate(peaks).total:.3g} ms"))
    lines.append(each("compiled in", lambda p: f"{p.seconds:.1f} s"))
    return lines


def collectives(program: Program) -> str:
    """Kinds and formats with their bytes per step."""
    sums: dict[str, int] = {}
    for found in program.collectives:
        name = f"{found.kind} {found.dtype}"
        sums[name] = sums.get(name, 0) + found.bytes * found.executions
    return ", ".join(f"{name} {size(total)}" for name, total in sums.items()) or "none"


def size(count: int | float) -> str:
    """Bytes for people: `4.1 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _headline(report: PreflightReport) -> str:
    devices = 1
    for count in report.mesh.values():
        devices *= count
    return f"{report.fp8_share:.1%} of the FLOPs in FP8 on {report.target.kind}" + (
        f", {devices} devices" if devices > 1 else ""
    )


def as_renderable(report: PreflightReport) -> RenderableType:
    """For a terminal.

    Args:
        report: The report.
    """
    table = Table(title=_headline(report), box=rich.box.SIMPLE, title_justify="left", title_style="bold", expand=False)
    for column in _COLUMNS:
        table.add_column(column, overflow="fold", justify="right" if column in ("runs", "FLOPs") else "left")
    for row in rows(report.step):
        cells = _cells(row, report.step)
        table.add_row(*map(Text, cells[:-1]), Text(cells[-1], _STYLES[row.product.verdict]))
    sums = Table(box=rich.box.SIMPLE, show_header=report.baseline is not None)
    for column in ("", "step", *(["baseline"] if report.baseline else [])):
        sums.add_column(column)
    for line in totals(report):
        sums.add_row(*map(Text, line))
    notes = [Text(f"! {finding}", "yellow") for finding in report.findings]
    notes += [Text(f"? {caveat}", "dim") for caveat in report.caveats]
    if report.target.peaks is not None:
        notes.append(Text(f"? {assumption(report)}", "dim"))
    return Group(table, sums, *notes)


def assumption(report: PreflightReport) -> str:
    """What the estimate takes for granted."""
    peaks = report.target.peaks
    assert peaks is not None
    return (
        f"times are a roofline estimate with {peaks.fp8 / 1e12:.4g} TFLOP/s in FP8, {peaks.bf16 / 1e12:.4g} in bf16, "
        f"{peaks.bandwidth / 1e12:.3g} TB/s ({peaks.source})"
    )


def as_markdown(report: PreflightReport) -> str:
    """For a pull request or a page.

    Args:
        report: The report.
    """
    lines = [f"**{_headline(report)}**", "", *_table(_COLUMNS, [_cells(row, report.step) for row in rows(report.step)])]
    heads = ("", "step", *(["baseline"] if report.baseline else []))
    lines += ["", *_table(heads, totals(report)), ""]
    lines += [f"- {finding}" for finding in report.findings]
    lines += [f"- not known: {caveat}" for caveat in report.caveats]
    if report.target.peaks is not None:
        lines.append(f"- {assumption(report)}")
    return "\n".join(lines) + "\n"


def _table(heads: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(heads), line(tuple("---" for _ in heads)), *map(line, body)]
