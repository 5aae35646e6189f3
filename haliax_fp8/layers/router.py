"""Which layers are routers, those that choose the experts of a row in a mixture of experts."""

from collections.abc import Mapping
from typing import Any

from .kernel import Kernel, axes_of
from .only_if_named import OnlyIfNamed


ROUTER = OnlyIfNamed(
    "a router is converted only if a target names it: its rounding errors change which experts a row gets"
)


def routers(kernels: Mapping[str, Kernel]) -> frozenset[str]:
    """The paths of a model's routers.

    A router is a layer whose outputs are the experts of another one, `Experts` of a `haliax.nn.MoELinear`, whatever its
    name; or one with a part of its path called `router`. The name `gate` alone does not make a router: gated units have
    gates too. A router has few outputs, so FP8 would save no time.

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
        if kernel.Experts is None and ("router" in path.split(".") or _names(kernel.Out) in experts)
    )


def _names(axes: Any) -> tuple[str, ...] | None:
    """The names of axes; None if there are none, but a number."""
    return None if axes is None or isinstance(axes, int | str) else tuple(axis.name for axis in axes_of(axes))
