"""What `compare` found: how far two models are apart, layer by layer."""

from collections.abc import Callable, Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float32
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..._tables import Printable, new_table
from ..result import numbered


class Distance(eqx.Module):
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


class LayerComparison(eqx.Module):
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
        """What was found of the layer at a path."""
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

    def worst(self, count: int = 10) -> "WorstLayers":
        """The layers that alone have the largest error of one product, the worst first; print it for a table.

        Args:
            count: How many.
        """
        own = ("fprop", "dgrad", "wgrad") if self.has_gradients else ("fprop",)

        def largest(layer: LayerComparison) -> float:
            errors = [float(getattr(layer, name).relative_error) for name in own]
            return float(np.nan_to_num(np.fmax.reduce(errors), nan=-1.0))

        rows = sorted(_on_host(self), key=lambda row: -largest(row[1]))
        return WorstLayers(tuple(rows[:count]), self.has_gradients)

    def __rich__(self) -> RenderableType:
        if any(isinstance(leaf, Tracer) or not eqx.is_array(leaf) for leaf in jax.tree.leaves(self)):
            return Text(f"{len(self.paths)} layers, traced or abstract: no numbers")
        error = float(self.result.relative_error)
        name = "the loss" if self.has_gradients else "the result"
        return Group(*_tables(_on_host(self), gradients=self.has_gradients), Text(f"{name} differs by {error:.2%}"))


class WorstLayers(Printable, eqx.Module):
    """The layers of a comparison with the largest errors of their own.

    Args:
        layers: Their names and what was found of them, the worst first.
        has_gradients: As in `ModelComparison`.
    """

    layers: tuple[tuple[str, LayerComparison], ...]
    has_gradients: bool

    def __rich__(self) -> RenderableType:
        return Group(*_tables(self.layers, gradients=self.has_gradients))


_FORWARD = ("fprop", "output")


def _on_host(comparison: ModelComparison) -> list[tuple[str, LayerComparison]]:
    """Each layer, with NumPy's numbers."""
    return list(jax.tree.map(np.asarray, comparison).each())


type _Layers = Sequence[tuple[str, LayerComparison]]
type _Columns = list[tuple[str, Callable[[LayerComparison], str]]]


def _tables(layers: _Layers, *, gradients: bool) -> Iterator[Table]:
    columns: _Columns = [
        ("alone", lambda layer: _share(layer.fprop)),
        ("SQNR", lambda layer: f"{float(layer.fprop.sqnr):.1f} dB"),
        ("accumulated", lambda layer: _share(layer.output)),
        ("largest", lambda layer: f"{layer.output.largest:.2%}"),
        ("1 - cos", lambda layer: f"{layer.output.cosine_distance:.1e}"),
    ]
    yield _table("Outputs: the relative error of a layer alone, and what has accumulated", columns, layers)
    if gradients:
        columns = [
            ("dgrad alone", lambda layer: _share(layer.dgrad)),
            ("wgrad alone", lambda layer: _share(layer.wgrad)),
            ("output's", lambda layer: _share(layer.output_grad)),
            ("kernel's", lambda layer: _share(layer.kernel_grad)),
            ("1 - cos", lambda layer: f"{layer.kernel_grad.cosine_distance:.1e}"),
        ]
        yield _table("Gradients: of a layer's products alone; accumulated, of output and kernel", columns, layers)


def _table(title: str, columns: _Columns, layers: _Layers) -> Table:
    table = new_table(title)
    table.add_column("layer", overflow="fold")
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for path, layer in layers:
        if np.isnan(layer.fprop.relative_error):
            table.add_row(path, "not reached")
        else:
            table.add_row(path, *(cell(layer) for _, cell in columns))
    return table


def _share(distance: Distance) -> str:
    return f"{distance.relative_error:.2%}"
