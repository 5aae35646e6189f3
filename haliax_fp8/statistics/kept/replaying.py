"""replay: the products of a black box, computed again under any recipe."""

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array
from rich.console import Group, RenderableType
from rich.text import Text

from ..._printing import Printable, new_table
from ..._product.operands import quantize_operand, round_to, scales_of
from ..._product.primitive import fp8_dot_general
from ..._product.spec import ProductSpec
from ..._state.op_state import OpState
from ..._state.record import record_of_table
from ...recipes.catalog import RecipeLike, as_recipe, named
from ...recipes.recipe import OPERANDS, OperandName, ProductName, Recipe
from ...recipes.scaling import STATISTICS, AbstractScaling, statistics_of
from ...recipes.scaling.multiplier import LARGEST_MULTIPLIER
from ...recipes.scaling.operand_statistics import Members
from .box import BlackBox
from .culprit import Culprit


_NAMES: tuple[OperandName, ...] = ("input", "kernel", "output_grad")


@dataclasses.dataclass(frozen=True, repr=False)
class Replayed(Printable):
    """One product under one recipe. Print it for one line.

    Args:
        recipe: The recipe's name; "as trained" for the box's own, with the state that it had.
        product: "fprop", "dgrad" or "wgrad".
        sqnr: In dB, of the product against that of the unquantized operands in float32, over elements that are finite
            in the latter; infinite without error, `-inf` if one of them is not finite with the recipe.
        saturation: The share of elements that are clipped, of each operand.
        underflow: The share of elements that are flushed to zero, of each operand.
        nonfinite: How many elements of the product are infinite or NaN.
        size: How many elements it has.
    """

    recipe: str
    product: ProductName
    sqnr: float
    saturation: dict[OperandName, float]
    underflow: dict[OperandName, float]
    nonfinite: int
    size: int

    def __rich__(self) -> Text:
        found = ", ".join(f"{name} {number}" for name, number in _cells(self).items())
        return Text(f"{self.recipe}, {self.product}: {found}")


@dataclasses.dataclass(frozen=True, repr=False)
class Replay(Printable):
    """What `replay` found; print it for a table.

    Args:
        box: What was replayed.
        culprit: The operand that is to blame, and where in it.
        products: Every product under every recipe.
    """

    box: BlackBox
    culprit: Culprit
    products: tuple[Replayed, ...]

    def of(self, recipe: str, product: ProductName) -> Replayed:
        """One product under one recipe.

        Args:
            recipe: The recipe's name, or "as trained".
            product: "fprop", "dgrad" or "wgrad".
        """
        return next(x for x in self.products if (x.recipe, x.product) == (recipe, product))

    @property
    def best(self) -> str:
        """The recipe with the fewest elements that are not finite; among those, with the best of worst products."""

        def rank(name: str) -> tuple[int, float]:
            of_recipe = [x for x in self.products if x.recipe == name]
            return sum(x.nonfinite for x in of_recipe), -min(x.sqnr for x in of_recipe)

        return min(dict.fromkeys(x.recipe for x in self.products), key=rank)

    def __rich__(self) -> RenderableType:
        step = "" if self.box.step is None else f", step {self.box.step}"
        table = new_table(
            f"Products of {self.box.where}{step}, computed again",
            "SQNR and not finite: of the product, against float32. Clipped and flushed to zero: of its worse operand.",
        )
        table.add_column("recipe", overflow="fold")
        table.add_column("product")
        for name in ("SQNR", "clipped", "flushed", "not finite"):
            table.add_column(name, justify="right", no_wrap=True)
        last = ""
        for x in self.products:
            table.add_row("" if x.recipe == last else x.recipe, x.product, *_cells(x).values())
            last = x.recipe
        return Group(
            table,
            Text(f"culprit: {self.culprit}"),
            Text(f"best here: {self.best}{self._worst_of_best}"),
        )

    @property
    def _worst_of_best(self) -> str:
        sqnr = min(x.sqnr for x in self.products if x.recipe == self.best)
        return f", with {_decibels(sqnr)} in its worst product" if np.isfinite(sqnr) else ""


def _decibels(sqnr: float) -> str:
    """A ratio, or what it means if it is not finite."""
    return f"{sqnr:.1f} dB" if np.isfinite(sqnr) else "exact" if sqnr > 0.0 else "none"


def _cells(x: Replayed) -> dict[str, str]:
    """The cells of a product's row, by heading; shares are those of the worst operand."""
    clipped, flushed = (max(shares.values(), default=0.0) for shares in (x.saturation, x.underflow))
    return {
        "SQNR": _decibels(x.sqnr),
        "clipped": f"{clipped:.2%}",
        "flushed": f"{flushed:.2%}",
        "not finite": f"{x.nonfinite / max(1, x.size):.1%}",
    }


def replay(box: BlackBox | str | os.PathLike[str], recipes: RecipeLike | Sequence[RecipeLike] | None = None) -> Replay:
    """Computes the three products of a black box again, with its own recipe and with others.

    On a CPU the formats are emulated, with the rounding of hardware: quantized values are those of the run, bit for
    bit, and products differ by the order of sums. With its own recipe, the product has the state that it had; delayed
    and static scaling of the others take their scales from these operands, as after calibration. So it also answers
    what another recipe would do to one layer, without converting the model.

    Args:
        box: What `black_box` returned, or a file of it.
        recipes: Another one to try, or several; by default all that have a name.

    Returns:
        The culprit, and each product's error, clipped and flushed shares (of its worse operand) by recipe.

    Raises:
        ValueError: If the file is not a black box, or a recipe is unknown.

    Example:
        >>> found = replay(black_box(fp8_linear_layers(model), loss_fn, x), ["mxfp8"])
        >>> [x.recipe for x in found.products][::3], found.of("mxfp8", "wgrad").nonfinite
        (['as trained', 'mxfp8'], 0)
    """
    box = box if isinstance(box, BlackBox) else BlackBox.load(box)
    if isinstance(recipes, str | Recipe | AbstractScaling):
        recipes = (recipes,)
    others = {_name(recipe): as_recipe(recipe) for recipe in (tuple(named) if recipes is None else recipes)}
    operands: dict[OperandName, Array] = {name: jnp.asarray(getattr(box, name)) for name in _NAMES}
    exact = _exact_products(operands, box)
    found: list[Replayed] = []
    for name, recipe in {"as trained": box.recipe, **others}.items():
        record = _own_record(box) if name == "as trained" else _fitting_record(recipe, operands)
        products, lost = _products(operands, box, recipe, record)
        for product in OPERANDS:
            out, of_product = products[product], lost[product]
            found.append(
                Replayed(
                    name,
                    product,
                    _sqnr(exact[product], out),
                    {x: float(of_product[x][STATISTICS.index("saturation")]) for x in OPERANDS[product]},
                    {x: float(of_product[x][STATISTICS.index("underflow")]) for x in OPERANDS[product]},
                    int((~np.isfinite(out)).sum()),
                    out.size,
                )
            )
    return Replay(box, Culprit.of(box), tuple(found))


def _name(recipe: RecipeLike) -> str:
    return recipe if isinstance(recipe, str) else str(recipe)


def _own_record(box: BlackBox) -> Array | None:
    return (
        None if box.state is None else record_of_table(jnp.asarray(box.state), box.recipe.scalings, box.recipe.limits)
    )


def _fitting_record(recipe: Recipe, operands: dict[OperandName, Array]) -> Array | None:
    """The scales that these operands' amaxes give."""
    state = OpState.init(recipe)
    if state is None:
        return None
    scales = []
    for x, limit, scaling in zip(operands.values(), recipe.limits, recipe.scalings, strict=True):
        x = x.astype(jnp.float32)
        amax = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.float32(0.0)), initial=0.0)
        margin = 0 if scaling.memory is None else getattr(scaling, "margin", 0)
        fitting = jnp.maximum(amax / limit * 2.0**margin, 1 / LARGEST_MULTIPLIER)
        scales.append(jnp.where(amax > 0.0, fitting, jnp.float32(1.0)))
    return state.with_scale(jnp.stack(scales)).record


def _spec(box: BlackBox, recipe: Recipe) -> ProductSpec:
    return ProductSpec(
        recipe=recipe,
        contraction=box.contraction,
        compute_dtype=box.compute_dtype,
        out_dtype=box.out_dtype,
        precision=box.precision,
    )


def _key(box: BlackBox, recipe: Recipe) -> Array | None:
    """The key of the run; for a recipe that had none, one of zeros."""
    if not recipe.needs_key:
        return None
    return jnp.zeros(2, jnp.uint32) if box.key is None else jnp.asarray(box.key)


type _Statistics = dict[ProductName, dict[OperandName, Array]]


def _products(
    operands: dict[OperandName, Array], box: BlackBox, recipe: Recipe, record: Array | None
) -> tuple[dict[ProductName, np.ndarray], _Statistics]:
    """fprop, dgrad and wgrad, and what is lost of their operands."""
    spec, key = _spec(box, recipe), _key(box, recipe)

    @jax.jit
    def compute(input: Array, kernel: Array, grad: Array) -> Any:
        product = lambda input, kernel: fp8_dot_general(input, kernel, record, spec, (), key)
        of_operands: dict[OperandName, Array] = {"input": input, "kernel": kernel, "output_grad": grad}
        return _of_all(product, input, kernel, grad), _lost(of_operands, record, key, spec)

    products, lost = compute(*operands.values())
    return _in_float64(products), lost


def _exact_products(operands: dict[OperandName, Array], box: BlackBox) -> dict[ProductName, np.ndarray]:
    """The products of the operands as they are, in float32."""
    product = lambda input, kernel: box.contraction.dot(input, kernel, (), lax.Precision.HIGHEST)
    in_float32 = [round_to(x, box.compute_dtype).astype(jnp.float32) for x in operands.values()]
    return _in_float64(jax.jit(functools.partial(_of_all, product))(*in_float32))


def _of_all(product: Callable[..., Array], input: Array, kernel: Array, grad: Array) -> dict[ProductName, Array]:
    out, pull = jax.vjp(product, input, kernel)
    dgrad, wgrad = pull(grad.astype(out.dtype))
    return {"fprop": out, "dgrad": dgrad, "wgrad": wgrad}


def _in_float64(products: dict[ProductName, Array]) -> dict[ProductName, np.ndarray]:
    return {name: np.asarray(x.astype(jnp.float32)).astype(np.float64) for name, x in products.items()}


def _lost(
    operands: dict[OperandName, Array], record: Array | None, key: Array | None, spec: ProductSpec
) -> _Statistics:
    """The statistics of each operand as each product quantizes it."""
    scales = scales_of(record, spec)

    def of(operand: OperandName, product: ProductName) -> Array:
        quantization = spec.recipe.quantization[operand, product]
        if not quantization.scaling.quantizes:
            return jnp.zeros(len(STATISTICS), jnp.float32)
        x = round_to(operands[operand], spec.compute_dtype)
        quantized = quantize_operand(x, operand, product, scales, key, (), spec)
        return statistics_of(x, quantized, Members(0), quantization.format)

    return {product: {operand: of(operand, product) for operand in names} for product, names in OPERANDS.items()}


def _sqnr(exact: np.ndarray, out: np.ndarray) -> float:
    """In dB, over the elements that are finite without quantization."""
    finite = np.isfinite(exact)
    a, b = exact[finite], out[finite]
    if not np.isfinite(b).all():
        return -np.inf
    signal, noise = float((a**2).sum()), float(((b - a) ** 2).sum())
    if noise == 0.0:
        return np.inf
    return 10.0 * float(np.log10(signal / noise)) if signal > 0.0 else -np.inf
