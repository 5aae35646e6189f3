"""What `compare` found: how far two models are apart, layer by layer."""

from collections.abc import Iterator

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float32
from rich.console import Group, RenderableType
from rich.text import Text

from ..._printing import Printable
from ..result import numbered
from .layer import Distance, LayerComparison, has_numbers
from .table import tables


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
        if not has_numbers(self):
            return Text(f"{len(self.paths)} layers, traced or abstract: no numbers")
        error = float(self.result.relative_error)
        name = "the loss" if self.has_gradients else "the result"
        return Group(*tables(_on_host(self), gradients=self.has_gradients), Text(f"{name} differs by {error:.2%}"))


class WorstLayers(Printable, eqx.Module):
    """The layers of a comparison with the largest errors of their own.

    Args:
        layers: Their names and what was found of them, the worst first.
        has_gradients: As in `ModelComparison`.
    """

    layers: tuple[tuple[str, LayerComparison], ...]
    has_gradients: bool

    def __rich__(self) -> RenderableType:
        return Group(*tables(self.layers, gradients=self.has_gradients))


_FORWARD = ("fprop", "output")


def _on_host(comparison: ModelComparison) -> list[tuple[str, LayerComparison]]:
    """Each layer, with NumPy's numbers."""
    return list(jax.tree.map(np.asarray, comparison).each())
