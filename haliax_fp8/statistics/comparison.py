"""Comparison: where in the network a converted model and the plain one part."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float32
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

from .._printing import DottedName, Printable, new_table
from ..layers import Fp8DotGeneral, LayerRule, default_rules
from ..layers.checks import check_not_modified, require_calibrated, require_layers, require_no_quantized_kernels
from ..layers.walk import all_ops, find_layers, is_op, map_layers_in_stacks, nothing_to_convert, rule_of
from ..recipes import named
from .result import numbered
from .result_table import groups
from .twin import COLUMNS, COMPARED, MODELS, NUMBERS, Twin, distances, in_max_grad


class Distance(Printable, eqx.Module):
    """How far an array `b` of the converted model is from `a`, the plain model's.

    NaN where the function's result does not depend on the layer; where an element is not finite, the error is infinite.
    If a layer is used several times, each number is the worst of its uses.

    Args:
        relative_error: `|b - a| / |a|`, with the square root of the sum of squares as norm.
        cosine_distance: `1 - a·b / (|a| |b|)`: the part of the error that scaling cannot explain, squared and halved.
        largest: `max |b - a| / max |a|`.
    """

    relative_error: Float32[Array, "*stack"]
    cosine_distance: Float32[Array, "*stack"]
    largest: Float32[Array, "*stack"]

    @property
    def sqnr(self) -> Float32[Array, "*stack"]:
        """The signal-to-noise ratio in dB: `-20 log10(relative_error)`; infinite without error."""
        return -20.0 * jnp.log10(self.relative_error)

    @property
    def cosine(self) -> Float32[Array, "*stack"]:
        """The cosine between both."""
        return 1.0 - self.cosine_distance

    def __rich__(self) -> RenderableType:
        if not _has_numbers(self):
            return Text(_NO_NUMBERS)
        return Text(_worst(self) + (", the worst of a stack" if self.relative_error.ndim else ""))


class LayerComparison(Printable, eqx.Module):
    """One layer, or those of a stack. `output` is that of the product, before a bias.

    Args:
        fprop: The product of the converted layer against the plain one, both with the plain model's operands: what
            this layer alone costs.
        dgrad: The gradient of its input, compared in the same way.
        wgrad: The gradient of its kernel, compared in the same way.
        output: The product in the converted model against that in the plain one: what has accumulated up to here.
        output_grad: The gradient of the product in both models: what has accumulated from the loss back to here.
        kernel_grad: The gradient of the kernel in both models.
    """

    fprop: Distance
    dgrad: Distance
    wgrad: Distance
    output: Distance
    output_grad: Distance
    kernel_grad: Distance

    def __rich__(self) -> RenderableType:
        if not _has_numbers(self):
            return Text(_NO_NUMBERS)
        stacked = " (the worst of a stack)" if self.output.relative_error.ndim else ""
        rows = {name: (_worst(getattr(self, name)),) for name in self.__dataclass_fields__}
        return _Table(f"A converted layer against the plain one{stacked}", ("how far apart",), rows)


class ModelComparison(Printable, eqx.Module):
    """How far a converted model is from the plain one, by layer. Print it for a table.

    Args:
        paths: The paths of the layers, in the order of the model's tree.
        of_layers: What was found of each.
        result: The function's results.
        has_gradients: Whether the function is a loss. Else the gradients in `of_layers` are those of the sum of its
            results, and are not printed.
    """

    paths: tuple[str, ...] = eqx.field(static=True)
    of_layers: tuple[LayerComparison, ...]
    result: Distance
    has_gradients: bool = eqx.field(static=True)

    def __getitem__(self, path: str) -> LayerComparison:
        """The comparison of the layer at a path."""
        if path not in self.paths:
            raise KeyError(f"no layer at {path!r}; there are {list(self.paths)}")
        return self.of_layers[self.paths.index(path)]

    def each(self) -> Iterator[tuple[str, LayerComparison]]:
        """Each layer by its name; those of a stack one by one."""
        for path, layer in zip(self.paths, self.of_layers, strict=True):
            for index in np.ndindex(layer.fprop.relative_error.shape):
                yield numbered(path, index), jax.tree.map(lambda x, index=index: x[index], layer)

    def flat(self, prefix: str = "fp8_error") -> dict[str, Float32[Array, ""]]:
        """Every relative error by the name `{prefix}/{layer}/{what}`, for trackers; also under `jit`.

        Args:
            prefix: What the names begin with.
        """
        names = tuple(LayerComparison.__dataclass_fields__)
        names = names if self.has_gradients else tuple(name for name in names if name in _FORWARD)
        return {
            f"{prefix}/{path}/{name}": getattr(layer, name).relative_error
            for path, layer in self.each()
            for name in names
        }

    def worst(self, count: int = 10) -> "ModelComparison":
        """The layers that alone have the largest error of one product, the worst first; those of a stack one by one.

        Args:
            count: How many.
        """
        products = ("fprop", "dgrad", "wgrad") if self.has_gradients else ("fprop",)

        def largest(layer: LayerComparison) -> float:
            errors = [float(getattr(layer, name).relative_error) for name in products]
            return float(np.nan_to_num(np.fmax.reduce(errors), nan=-1.0))

        rows = dict(sorted(_on_host(self), key=lambda row: -largest(row[1]))[:count])
        return ModelComparison(tuple(rows), tuple(rows.values()), self.result, self.has_gradients)

    def __rich__(self) -> RenderableType:
        if not _has_numbers(self):
            return Text(f"{len(self.paths)} layers, {_NO_NUMBERS}")
        error = float(self.result.relative_error)
        name = "the loss" if self.has_gradients else "the result"
        return Group(*_tables(_on_host(self), gradients=self.has_gradients), Text(f"{name} differs by {error:.2%}"))


_FORWARD = ("fprop", "output")
_NO_NUMBERS = "traced or abstract: no numbers"


def _on_host(comparison: ModelComparison) -> list[tuple[str, LayerComparison]]:
    """Each layer, with NumPy's numbers."""
    return list(jax.tree.map(np.asarray, comparison).each())


def _has_numbers(tree: Any) -> bool:
    """Whether every array can be read: none is traced or abstract."""
    return not any(isinstance(leaf, Tracer) or not eqx.is_array(leaf) for leaf in jax.tree.leaves(tree))


def _worst(distance: Distance) -> str:
    """The numbers of a layer, or the worst of a stack."""
    # NaN, for members that the result does not depend on, gives way to numbers.
    worst = jax.tree.map(lambda x: np.fmax.reduce(np.asarray(x), axis=None), distance)
    if np.isnan(worst.relative_error):
        return "not reached"
    numbers = f"{_share(worst)}, SQNR {float(worst.sqnr):.1f} dB, largest {worst.largest:.2%}"
    return f"relative error {numbers}, 1 - cos {worst.cosine_distance:.1e}"


def _share(distance: Distance) -> str:
    return f"{distance.relative_error:.2%}"


_OUTPUTS: dict[str, Callable[[LayerComparison], str]] = {
    "alone": lambda layer: _share(layer.fprop),
    "SQNR": lambda layer: f"{float(layer.fprop.sqnr):.1f} dB",
    "accumulated": lambda layer: _share(layer.output),
    "largest": lambda layer: f"{layer.output.largest:.2%}",
    "1 - cos": lambda layer: f"{layer.output.cosine_distance:.1e}",
}
_GRADIENTS: dict[str, Callable[[LayerComparison], str]] = {
    "dgrad\nalone": lambda layer: _share(layer.dgrad),
    "wgrad\nalone": lambda layer: _share(layer.wgrad),
    "output's": lambda layer: _share(layer.output_grad),
    "kernel's": lambda layer: _share(layer.kernel_grad),
    "1 - cos": lambda layer: f"{layer.kernel_grad.cosine_distance:.1e}",
}


def _tables(layers: list[tuple[str, LayerComparison]], *, gradients: bool) -> Iterator[RenderableType]:
    """One table for the outputs, and one for the gradients."""
    titles = {"Outputs: the relative error of a layer alone, and what has accumulated": _OUTPUTS}
    if gradients:
        titles["Gradients: of a layer's products alone; accumulated, of output and kernel"] = _GRADIENTS
    for title, columns in titles.items():
        is_reached = lambda layer: not np.isnan(layer.fprop.relative_error)
        # As wide as a number: on one line it would take room from the names.
        unreached = ("not\nreached", *[""] * (len(columns) - 1))
        rows = {
            path: tuple(cell(layer) for cell in columns.values()) if is_reached(layer) else unreached
            for path, layer in layers
        }
        yield _Table(title, tuple(columns), rows)


@dataclasses.dataclass(frozen=True)
class _Table:
    """A row for each layer, with what several paths begin with said once; columns that do not fit follow below."""

    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        names: list[tuple[str, DottedName]] = []
        for group in groups(list(self.rows)):
            names += [("", DottedName(group.prefix))] if group.prefix else []
            names += [(path, DottedName(name, 2 if group.prefix else 0)) for path, name in group.names.items()]
        segment = max((name.longest_segment for _, name in names), default=0)
        piece = max((name.longest_piece for _, name in names), default=0)
        # A quarter of the width is enough for a long segment, if its pieces fit. A column has 3 more, a table an edge.
        room = options.max_width - 4 - min(segment, max(piece, options.max_width // 4))
        longest = lambda i: max(
            len(x) for c in (self.columns[i], *(r[i] for r in self.rows.values())) for x in c.split("\n")
        )
        widths = [longest(i) + 3 for i in range(len(self.columns))]
        yield Text(self.title, "bold")
        start = 0
        while start < len(widths):
            stop = start + 1
            while stop < len(widths) and sum(widths[start : stop + 1]) <= room:
                stop += 1
            table = new_table()
            heads = self.columns[start:stop]
            table.add_column("\n" * max(head.count("\n") for head in heads) + "layer", overflow="fold")
            for head in heads:
                table.add_column(head, justify="right", no_wrap=len(self.columns) > 1)
            for path, name in names:
                table.add_row(name, *self.rows.get(path, ())[start:stop])
            yield table
            start = stop


def compare(
    plain: Any,
    converted: Any,
    function: Callable[..., Any],
    *batch: Any,
    rules: tuple[LayerRule, ...] = default_rules,
) -> ModelComparison:
    """Runs both models side by side on one batch, forward and backward, and compares them at every linear layer.

    Each layer is compared twice. *Alone*: the converted layer gets what the plain model has there, so the error is its
    own. *Accumulated*: each model goes on with its own numbers, so the error is that of all layers up to here, or in
    the backward pass from the loss down to here. Layers that are not converted accumulate errors too.

    It is exact under `vmap`, in a `scan` and with checkpointing, and works under `jax.jit`. It takes the memory of two
    steps, and computes each product three times.

    Args:
        plain: The model in high precision, such as `restore_linear_layers(converted)`.
        converted: The same model with FP8 layers; calibrated or trained, with keys if a recipe needs them.
        function: `function(model, *batch)`. If it returns one number, a loss, the gradients are compared as well;
            else the sum of what it returns is differentiated to get there, and gradients are not shown.
        *batch: The arguments after the model.
        rules: The rules of `Fp8Config(rules=...)` that the model was converted with.

    Returns:
        The distances of each layer; `print` shows them in the order of the network, `print(comparison.worst())` those
        layers first that are worst on their own.

    Raises:
        ValueError: If the models differ in more than their products: other classes, shapes or dtypes; if no linear
            layer is in them; if `function` returns nothing with a gradient.

    Example:
        >>> comparison = compare(model, fp8_linear_layers(model), loss_fn, x)
        >>> bool(comparison["layers.0"].output.sqnr > 20.0)
        True
        >>> bool(comparison["layers.0"].fprop.relative_error == comparison["layers.0"].output.relative_error)
        True
    """
    for name, model in (("plain", plain), ("converted", converted)):
        require_layers(model, "compare(plain, converted, function, *batch)", name)
    check_not_modified(converted)
    require_no_quantized_kernels(converted)
    require_calibrated(converted)
    layers = find_layers(converted, rules)
    twins = {path: twin for path, (layer, stack) in layers.items() if (twin := _twin(layer, stack, rules)) is not None}
    if not twins:
        raise nothing_to_convert(converted, rules, {})
    if not all_ops(converted):
        remedy = (
            "plain has them, so they are swapped; use compare(plain, converted, function, *batch)"
            if all_ops(plain)
            else "convert it: converted = fp8_linear_layers(plain)"
        )
        raise ValueError(f"converted has no FP8 layer, so there is nothing to compare; {remedy}")

    def with_twins(model: Any) -> Any:
        def put(path: str, layer: Any, stack: tuple[hax.Axis, ...]) -> Any:
            if (twin := twins.get(path)) is None:
                return layer
            # By way of an op, which is what rules know how to put into a layer.
            op = Fp8DotGeneral.init(named["current"])
            return jax.tree.map(
                lambda node: twin if is_op(node) else node, rule_of(layer, rules).with_op(layer, op), is_leaf=is_op
            )

        return map_layers_in_stacks(put, model, rules)

    models = [eqx.partition(with_twins(model), eqx.is_array, is_leaf=_is_twin) for model in (plain, converted)]
    _require_alike(*(arrays for arrays, _ in models))
    return _compared(models[0][0], models[1][0], models[1][1], function, batch, tuple(twins))


def _twin(layer: Any, stack: tuple[hax.Axis, ...], rules: tuple[LayerRule, ...]) -> Twin | None:
    """What a layer of both models multiplies with; None for layers that are left alone."""
    rule = rule_of(layer, rules)
    op = rule.op(layer)
    if op is None and rule.refusal(layer) is not None:
        return None
    kernel = rule.kernel(layer)
    members, stack = kernel.members_and_stack(stack)
    axes = (*stack, hax.Axis("fp8_compared", COLUMNS))
    slot = hax.named(jnp.zeros(tuple(axis.size for axis in axes), jnp.float32), axes)
    # In front, where the names do not count: as the weights of an ensemble.
    slot = jax.tree.map(lambda x: jnp.broadcast_to(x, (*members, *x.shape)), slot)
    known = kernel.init_op(named["current"], None, stack) if op is None else op
    return Twin(op, slot, known.kernel_shape, known.kernel_first)


def _is_twin(node: Any) -> bool:
    return isinstance(node, Twin)


def _require_alike(plain: Any, converted: Any) -> None:
    """Raises unless both models have the same arrays beside their products."""

    def described(model: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_flatten_with_path(model)[0]
        return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}

    ours, theirs = described(plain), described(converted)
    for path in (*ours, *theirs):
        if ours.get(path) != theirs.get(path):
            raise ValueError(
                f"plain and converted differ at {path}: {ours.get(path, 'nothing')} and {theirs.get(path, 'nothing')}. "
                "Compare a converted model with restore_linear_layers(converted), or with the model that it was "
                "converted from, in the same dtype"
            )


# Jitted as a whole: outside, JAX has no arrays whose gradients add up by maximum.
@eqx.filter_jit
def _compared(
    plain: Any,
    converted: Any,
    static: Any,
    function: Callable[..., Any],
    batch: tuple[Any, ...],
    paths: tuple[str, ...],
) -> ModelComparison:
    slots = [node.slot for node in jax.tree.leaves(static, is_leaf=_is_twin) if _is_twin(node)]

    def summed(slots: list[hax.NamedArray]) -> tuple[Array, tuple[Any, bool]]:
        slots = in_max_grad(slots)
        following = iter(slots)
        fill = lambda node: eqx.tree_at(lambda twin: twin.slot, node, next(following)) if _is_twin(node) else node
        rest, is_loss = jax.tree.map(fill, static, is_leaf=_is_twin), []

        def run(arrays: Any) -> tuple[Array, list[Array]]:
            out = function(eqx.combine(arrays, rest, is_leaf=_is_twin), *batch)
            leaves = [leaf for leaf in jax.tree.leaves(out) if eqx.is_inexact_array(leaf)]
            if not leaves:
                raise ValueError(
                    f"function returned {type(out).__name__} without floating-point arrays; return the loss, or what "
                    "the model computes"
                )
            is_loss.append(len(leaves) == 1 and leaves[0].ndim == 0)
            return sum((jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves), start=jnp.float32(0.0)), leaves

        both = jax.tree.map(lambda *x: jnp.stack(x), plain, converted)
        values, leaves = jax.vmap(run, axis_name=MODELS, axis_size=2)(both)
        whole = jnp.concatenate([leaf.reshape(2, -1).astype(jnp.float32) for leaf in leaves], axis=1)
        return jnp.sum(values), (distances(whole[0], whole[1]), is_loss[0])

    with warnings.catch_warnings():
        # This gradient trains nothing.
        warnings.filterwarnings("ignore", "the gradient of an FP8 layer's weight was taken without that of its state")
        gradients, (result, is_loss) = jax.grad(summed, has_aux=True)(slots)
    layers = tuple(_layer(slot.array) for slot in gradients)
    return ModelComparison(paths, layers, Distance(*(result[i] for i in range(len(NUMBERS)))), is_loss)


def _layer(numbers: Array) -> LayerComparison:
    """The comparison of a layer, from a slot's gradient."""
    reached = numbers[..., -1] > 0.0

    def distance(index: int) -> Distance:
        first = index * len(NUMBERS)
        columns = (numbers[..., first + i] for i in range(len(NUMBERS)))
        return Distance(*(jnp.where(reached, column, jnp.float32(jnp.nan)) for column in columns))

    return LayerComparison(**{name: distance(i) for i, name in enumerate(COMPARED)})
