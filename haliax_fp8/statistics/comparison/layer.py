"""What `compare` found of one layer: how far its products, and what has accumulated, are apart."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float32
from rich.console import RenderableType
from rich.text import Text

from ..._printing import Printable, new_table


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
        if not has_numbers(self):
            return Text(_NO_NUMBERS)
        worst = _worst(self)
        if worst is None:
            return Text("not reached")
        stacked = ", the worst of a stack" if self.relative_error.ndim else ""
        return Text(", ".join(f"{name} {number}" for name, number in worst.items()) + stacked)


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
        if not has_numbers(self):
            return Text(_NO_NUMBERS)
        stacked = " (the worst of a stack)" if self.output.relative_error.ndim else ""
        table = new_table(f"A converted layer against the plain one{stacked}")
        for column in ("", *_NUMBERS):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        for name in self.__dataclass_fields__:
            worst = _worst(getattr(self, name))
            table.add_row(name, *(["not reached"] if worst is None else worst.values()))
        return table


def has_numbers(tree: Any) -> bool:
    """Whether every array can be read: none is traced or abstract.

    Args:
        tree: The arrays.
    """
    return not any(isinstance(leaf, Tracer) or not eqx.is_array(leaf) for leaf in jax.tree.leaves(tree))


_NO_NUMBERS = "traced or abstract: no numbers"


def _worst(distance: Distance) -> dict[str, str] | None:
    """The numbers of a layer, or the worst of a stack, by what they are called; None where nothing was reached."""
    # NaN, for members that the result does not depend on, gives way to numbers.
    error, cosine, largest = (
        np.fmax.reduce(np.asarray(x), axis=None)
        for x in (distance.relative_error, distance.cosine_distance, distance.largest)
    )
    if np.isnan(error):
        return None
    with np.errstate(divide="ignore"):
        sqnr = -20.0 * np.log10(error)
    numbers = f"{error:.2%}", f"{sqnr:.1f} dB", f"{largest:.2%}", f"{cosine:.1e}"
    return dict(zip(_NUMBERS, numbers, strict=True))


_NUMBERS = ("relative error", "SQNR", "largest", "1 - cos")
