"""The products of a step: a row for each layer, or some lines for each product."""

import dataclasses
from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..._printing import common_prefix, in_one_name, new_table, without_numbers
from ..._product.names import DGRAD, FPROP, WGRAD
from ..hlo.scopes import label
from ..verdict.product import Product, Verdict
from ..verdict.program import Program


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
    verdict = f"{product.verdict.value}: {product.reason}" if product.reason else product.verdict.value
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
            sides = (_verdicts(layer.products, names) for names in _SIDES.values())
            table.add_row(Padding(name, (0, 0, 0, 2 if prefix else 0)), size, share, *sides)
    return table


_SIDES = {FPROP: (FPROP, "forward"), DGRAD: (DGRAD, "backward"), WGRAD: (WGRAD,)}
"""Which products stand in which column; those between activations have none but forward and backward."""


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
        forward = [product for product in self.products if product.name in _SIDES[FPROP]] or self.products
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
        sizes = {(p.batch, p.m, p.k, p.n) for p in products if p.name in _SIDES[FPROP]}
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


def _verdicts(products: Iterable[Product], names: tuple[str, ...]) -> Text:
    """How the products with some names run: each way once, the worst of them in the color of the cell."""
    chosen = [product for product in products if product.name in names]
    words = {_word(product): product.verdict for product in chosen}
    worst = max(words.values(), key=list(STYLES).index, default=None)
    return Text(", ".join(words), STYLES[worst] if worst is not None else "")


def _word(product: Product) -> str:
    if product.verdict is not Verdict.HIGH_PRECISION:
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
