"""The subclass of a module's class whose call is rematerialized."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import numpy as np

from ...layers.rebuilt import rebuilt
from ...layers.rematerialization import AbstractRematerialized
from .rule import RematerializationRule


@dataclasses.dataclass(frozen=True)
class Rematerialization:
    """How a module's call is rematerialized.

    Args:
        rule: Its rule.
        compute_dtype: The dtype of the recomputed part; None leaves it unchanged.
    """

    rule: RematerializationRule
    compute_dtype: np.dtype | None


def with_rematerialization(module: Any, how: Rematerialization) -> Any:
    """The module as an instance of a subclass of its class, with otherwise the same tree.

    Args:
        module: An Equinox module, which may have been changed before.
        how: How its call is rematerialized from now on.
    """
    plain = without_rematerialization(module)
    return rebuilt(_subclass(type(plain)), {**vars(plain), "rematerialization": how})


def without_rematerialization(module: Any) -> Any:
    """The module as an instance of its original class; unchanged if it was never rematerialized.

    Args:
        module: An Equinox module.
    """
    if not isinstance(module, AbstractRematerialized):
        return module
    fields = {name: value for name, value in vars(module).items() if name != "rematerialization"}
    return rebuilt(type(module).__base__, fields)


# One subclass per class, so that trees that are made twice have the same structure.
@functools.cache
def _subclass(plain: type) -> type:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        how = self.rematerialization
        return how.rule.call(plain.__call__, self, args, kwargs, how.compute_dtype)

    def in_short(self: Any) -> str:
        dtype = self.rematerialization.compute_dtype
        return plain.__name__ if dtype is None else f"{plain.__name__} in {dtype}"

    def reduce(self: Any) -> Any:
        # `pickle` cannot find this class by its name.
        return with_rematerialization, (without_rematerialization(self), self.rematerialization)

    members = {
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        "__annotations__": {"rematerialization": Rematerialization},
        "__call__": call,
        "__reduce__": reduce,
        "rematerialization": eqx.field(static=True, kw_only=True),
        "in_short": property(in_short),
    }
    return type(plain)(f"Rematerialized{plain.__name__}", (plain, AbstractRematerialized), members)
