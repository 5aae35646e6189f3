"""A hook of mkdocs: what pages ask for with `<!-- interactive: NAME -->`, made from the package as it is.

Tables and tiles are HTML that can be read without a script; `docs/assets/` adds what moves.
"""

import html
import re
from typing import Any

import jax
from haliax_fp8.checkpoints.engines import engines

from haliax_fp8.recipes import Format, HadamardScaling, OperandUse, Quantization, named
from haliax_fp8.recipes.recipe import ProductName


# With a table right below, which it replaces: pages are also read without being built.
MARK = re.compile(r"<!-- interactive: ([a-z-]+) -->\n((?:\|.*\n)*)")

# A power of two that blocks of every size divide.
_SIDE = 256
# What is multiplied, from left to right.
_FACTORS: dict[ProductName, tuple[str, str]] = {
    "fprop": ("x", "w"),
    "dgrad": ("g", "wᵀ"),
    "wgrad": ("xᵀ", "g"),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts each thing where its comment is."""
    return MARK.sub(lambda found: MADE[found[1]]() + "\n", markdown)


def formats() -> str:
    """The number explorer; its arithmetic is that of `docs/assets/formats.js`."""
    return _needs_script("fp8-formats", "A number, and what each format makes of it")


def history() -> str:
    """Delayed scaling with sliders for history and margin."""
    return _needs_script(
        "fp8-history", "Delayed scaling, with a history length and a margin to choose"
    )


def _needs_script(kind: str, text: str) -> str:
    return f'<div class="fp8-interactive {kind}"><noscript>{html.escape(text)}: this needs JavaScript.</noscript></div>'


def engine_table() -> str:
    """Which engine loads which layout; one row per layout, so that it can be filtered."""
    columns = ("layout", "engine", "hardware", "what it does", "detail", "known from")
    rows = []
    for engine in engines:
        for layout in engine.layouts:
            cells = (
                layout,
                engine.engine,
                engine.hardware,
                engine.verdict.value,
                engine.detail,
                engine.evidence.value,
            )
            rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(f"<tr>{row}</tr>" for row in sorted(rows))
    return (
        '<div class="fp8-interactive fp8-filtered" data-filters="0 2 3"><div class="fp8-scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></div>"
    )


def recipe_tiles() -> str:
    """Each product of each named recipe: its two operands, their formats, and which elements share a scale."""
    head = "".join(f"<th>{name}</th>" for name in ("recipe", *_FACTORS))
    rows = []
    for name, recipe in named.items():
        cells = [f"<th><code>{name}</code></th>"]
        for product, operands in recipe.products.items():
            tiles = [
                _tile(factor, quantization, is_left=i == 0)
                for i, (factor, quantization) in enumerate(
                    zip(_FACTORS[product], operands, strict=True)
                )
            ]
            cells.append(
                f'<td><div class="fp8-pair">{"<span>·</span>".join(tiles)}</div></td>'
            )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return (
        '<div class="fp8-interactive fp8-tiles"><div class="fp8-scroll">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></div>"
    )


def shared_block(quantization: Quantization, *, is_left: bool) -> tuple[int, int]:
    """How many rows and columns of a matrix share a scale where the product sums over the columns (left) or rows."""
    scaling, format = quantization.scaling, quantization.format
    if scaling.stores_scale:
        return (_SIDE, _SIDE)
    x = jax.random.normal(jax.random.key(0), (_SIDE, _SIDE))
    key = jax.random.key(1) if quantization.rounding.needs_key else None
    use = OperandUse(
        format, contracted=(1 if is_left else 0,), rounding=quantization.rounding, key=key
    )
    rows, columns = scaling.quantize(x, use).scale.shape
    return (_SIDE // rows, _SIDE // columns)


def _tile(operand: str, quantization: Quantization, *, is_left: bool) -> str:
    """A square of 8×8 with a shade for each block, and below it operand, format and block."""
    if not quantization.scaling.quantizes:
        square = '<rect x=".5" y=".5" width="39" height="39" class="plain"/>'
        return _figure(square, operand, "high precision", "no scale", "high")
    rows, columns = shared_block(quantization, is_left=is_left)
    high, wide = _drawn(rows), _drawn(columns)
    shades = "".join(
        f'<rect x="{5 * wide * j}" y="{5 * high * i}" width="{5 * wide}" height="{5 * high}" class="s{(i + j) % 2}"/>'
        for i in range(8 // high)
        for j in range(8 // wide)
    )
    notes = [
        *(["rotated"] if isinstance(quantization.scaling, HadamardScaling) else []),
        *(["random rounding"] if quantization.rounding.needs_key else []),
    ]
    block = _block_name(rows, columns)
    return _figure(
        shades,
        operand,
        quantization.format.name,
        ", ".join([block, *notes]),
        _kind(quantization.format),
    )


def _drawn(size: int) -> int:
    """How many of the 8 squares along a side a block covers: larger blocks more, but not to scale, to be seen at all.

    That is 1 square for 1 element, 2 for 16 and 32, and 4 for 128.
    """
    return 8 if size >= _SIDE else 2 ** (size.bit_length() // 4)


def _block_name(rows: int, columns: int) -> str:
    if rows == columns == _SIDE:
        return "tensor"
    if _SIDE in (rows, columns):
        return "row" if columns == _SIDE else "column"
    return f"{rows}×{columns}"


def _kind(format: Format) -> str:
    return format.name.lower()


def _figure(shapes: str, operand: str, format: str, shared: str, kind: str) -> str:
    label = html.escape(f"{operand} in {format}: {shared}")
    return (
        f'<span class="fp8-tile {kind}"><svg viewBox="0 0 40 40" role="img" aria-label="{label}">{shapes}</svg>'
        f"<b>{operand}</b> {format}<br><small>{shared}</small></span>"
    )


MADE = {
    "formats": formats,
    "history": history,
    "engines": engine_table,
    "recipes": recipe_tiles,
}
