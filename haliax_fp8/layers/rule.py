"""The interface of rules, each for the layers of one class."""

import abc
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp

from .._op import Fp8DotGeneral
from ..devices.device import Device
from ..recipes.recipe import Recipe
from ..recipes.support import Support, supported
from .layer_work import LayerSize


@dataclasses.dataclass(frozen=True)
class LayerRule(abc.ABC):
    """How the layers of one class are converted.

    Write one for your own class and pass it in `Fp8Config(rules=(MyRule(), *default_rules))`. The first rule whose
    class matches a layer is used.
    """

    @property
    @abc.abstractmethod
    def layer_type(self) -> type | tuple[type, ...]:
        """The class or classes, subclasses included."""

    @abc.abstractmethod
    def refusal(self, layer: Any) -> str | None:
        """Why this layer cannot be converted, or None if it can be."""

    @abc.abstractmethod
    def shape(self, layer: Any) -> str:
        """The kernel's axes for a table, such as `embed 64 -> mlp 256`."""

    @abc.abstractmethod
    def op(self, layer: Any) -> Fp8DotGeneral | None:
        """The op of a converted layer; None if it is not converted."""

    @abc.abstractmethod
    def convert(self, layer: Any, recipe: Recipe, compute_dtype: Any, stack: tuple[hax.Axis, ...]) -> Any:
        """The layer with an `Fp8DotGeneral`, state included; `stack` holds the axes of the stacks that it is in."""

    @abc.abstractmethod
    def with_op(self, layer: Any, op: Fp8DotGeneral) -> Any:
        """A converted layer with another op."""

    @abc.abstractmethod
    def restore(self, layer: Any) -> Any:
        """The layer as it was before `convert`."""

    def support(self, recipe: Recipe, device: Device) -> Support:
        """How the products of such a layer run on a device; for most layers, as `supported` says."""
        return supported(recipe, device)

    def size(self, layer: Any, stack: tuple[hax.Axis, ...]) -> LayerSize | None:
        """The matrices of one layer of the stacks; None if unknown, and then its time is not predicted."""
        return None

    def part(self, layer: Any) -> Hashable | None:
        """What `split` needs to know of a layer that is joined with others; None if it cannot be joined."""
        return None

    def join(self, layers: Sequence[Any]) -> Any:
        """One plain layer with the concatenated outputs of several plain ones.

        Args:
            layers: Layers that have a `part`.

        Raises:
            ValueError: If they differ in more than their outputs.
        """
        raise ValueError(f"layers of {type(layers[0]).__name__} cannot be joined")

    def split(self, joined: Any, parts: Sequence[Any]) -> list[Any]:
        """The layers that were joined, from a joined one that may have been converted and trained since.

        Args:
            joined: The layer. If it is converted, all get its op.
            parts: The `part` of each.
        """
        raise ValueError(f"a {type(joined).__name__} cannot be split")

    def only_if_named(self, layer: Any) -> str | None:
        """Why a layer is converted only if `targets` or an override selects it; None for most layers."""
        return None


@dataclasses.dataclass(frozen=True)
class Refused(LayerRule):
    """Layers with matrix products that cannot run in FP8; `describe` lists them with the reason.

    Args:
        types: Their classes.
        reason: Why they stay in high precision.
    """

    types: tuple[type, ...]
    reason: str

    @property
    def layer_type(self) -> tuple[type, ...]:
        """The classes given."""
        return self.types

    def refusal(self, layer: Any) -> str:
        """The reason given."""
        return self.reason

    def shape(self, layer: Any) -> str:
        """The shape of its weight, if it has one by that name."""
        weight = getattr(layer, "weight", getattr(layer, "weight_ih", None))
        array = weight.array if isinstance(weight, hax.NamedArray) else weight
        return " × ".join(map(str, getattr(array, "shape", ())))

    def op(self, layer: Any) -> None:
        """None: it is never converted."""
        return None

    def convert(self, layer: Any, recipe: Recipe, compute_dtype: Any, stack: tuple[hax.Axis, ...]) -> Any:
        """Raises a ValueError with the reason."""
        raise ValueError(f"a {type(layer).__name__} cannot be converted: {self.reason}")

    def with_op(self, layer: Any, op: Fp8DotGeneral) -> Any:
        """Raises a ValueError with the reason."""
        raise ValueError(f"a {type(layer).__name__} has no op: {self.reason}")

    def restore(self, layer: Any) -> Any:
        """The layer itself."""
        return layer


def integer_weight(weight: Any) -> str | None:
    """The refusal of weights that are not floating-point; None if they are, or are not arrays at all."""
    array = weight.array if isinstance(weight, hax.NamedArray) else weight
    dtype = getattr(array, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jnp.floating):
        return None
    return f"its weight has dtype {dtype}, which is not floating-point"


def state_like(op: Fp8DotGeneral, weight: Any, members: tuple[int, ...]) -> Fp8DotGeneral:
    """The op with its state repeated for each member of an ensemble, and abstract where the weight is abstract."""
    abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(weight))

    def repeat(x: jax.Array) -> jax.Array | jax.ShapeDtypeStruct:
        shape = members + x.shape
        return jax.ShapeDtypeStruct(shape, x.dtype) if abstract else jnp.broadcast_to(x, shape)

    return jax.tree.map(repeat, op)
