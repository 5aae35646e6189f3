"""What a layer is in its model, where that decides what becomes of it: an embedding, a router, a part of an adapter.

What tells it are classes, axes, and names; `_tensor_names` has what names alone tell, and that is also how heads are
known.
"""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import haliax.nn as hnn
import jax

from .._tensor_names import is_router
from .kernel import Kernel, axes_of
from .rule import OnlyIfNamed


__all__ = [
    "AbstractAdapter",
    "is_embedding",
    "routers",
    "sharing",
]


class AbstractAdapter(eqx.Module):
    """A frozen layer, and two small ones beside it that are trained; see `models.LoraLinear`."""

    base: eqx.AbstractVar[Any]
    A: eqx.AbstractVar[Any]
    B: eqx.AbstractVar[Any]


_ROUTER = OnlyIfNamed(
    "a router is converted only if a target names it: its rounding errors change which experts a row gets"
)

_OF_ADAPTER = OnlyIfNamed(
    "part of an adapter, of too low a rank for FP8 to save time; converted only if a target names it"
)

_BESIDE_A_HEAD = OnlyIfNamed("an embedding; as a tied head only if a target names it")


def only_if_named(model: Any, layers: Mapping[str, Any], kernels: Mapping[str, Kernel]) -> dict[str, OnlyIfNamed]:
    """The layers that stay in high precision for what they are in the model, unless a pattern names them, and why.

    Args:
        model: The model.
        layers: Its layers by path.
        kernels: Their kernels.
    """
    is_adapter = lambda node: isinstance(node, AbstractAdapter)
    adapters = [node for node in jax.tree.leaves(model, is_leaf=is_adapter) if is_adapter(node)]
    parts = {id(part) for node in adapters for part in (node.A, node.B)}
    heads = [kernels[path].Out for path, layer in layers.items() if not is_embedding(layer)]
    return {
        **{path: _BESIDE_A_HEAD for path, x in layers.items() if isinstance(x, hnn.Embedding) and x.Vocab in heads},
        **dict.fromkeys(routers(kernels), _ROUTER),
        **{path: _OF_ADAPTER for path, layer in layers.items() if id(layer) in parts},
    }


def is_embedding(node: Any) -> bool:
    """Whether it is a layer that looks up rows of a table."""
    return isinstance(node, hnn.Embedding | eqx.nn.Embedding)


def routers(kernels: Mapping[str, Kernel]) -> frozenset[str]:
    """The paths of a model's routers.

    A router is a layer whose outputs are the experts of another one, `Experts` of a `haliax.nn.MoELinear`, whatever its
    name; or one that its name tells, as `_tensor_names.is_router` says. A router has few outputs, so FP8 would save no
    time.

    Args:
        kernels: The kernels of a model's layers by path.

    Example:
        >>> import haliax as hax
        >>> Embed, Experts = hax.Axis("embed", 8), hax.Axis("experts", 4)
        >>> gate, up = Kernel(None, Embed, Experts), Kernel(None, Embed, hax.Axis("mlp", 16), Experts)
        >>> sorted(routers({"moe.gate": gate, "moe.up": up})), sorted(routers({"mlp.gate": gate}))
        (['moe.gate'], [])
    """
    experts = [_names(kernel.Experts) for kernel in kernels.values() if kernel.Experts is not None]
    return frozenset(
        path
        for path, kernel in kernels.items()
        if kernel.Experts is None and (is_router(path, kernels) or _names(kernel.Out) in experts)
    )


def sharing(model: Any, layers: Mapping[str, Any]) -> frozenset[str]:
    """The paths of the layers whose weight an `eqx.nn.Shared` gives to another layer, or takes from one.

    Args:
        model: The model.
        layers: Its layers by path.
    """
    is_shared = lambda node: isinstance(node, eqx.nn.Shared)
    owners = filter(is_shared, jax.tree.leaves(model, is_leaf=is_shared))
    arrays = {id(x) for node in owners for x in jax.tree.leaves(node.get(node.pytree))}
    # A layer that takes its weight from another has a placeholder there instead of an array.
    is_one = lambda x: id(x) in arrays or not hasattr(x, "dtype")
    weights = {path: getattr(layer, "weight", None) for path, layer in layers.items()}
    return frozenset(path for path, weight in weights.items() if any(map(is_one, jax.tree.leaves(weight))))


def _names(axes: Any) -> tuple[str, ...] | None:
    """The names of axes; None if there are none, but a number."""
    return None if axes is None or isinstance(axes, int | str) else tuple(axis.name for axis in axes_of(axes))
