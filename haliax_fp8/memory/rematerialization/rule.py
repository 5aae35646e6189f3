"""The interface of rules, each of which handles some classes of modules; and the rule for norms."""

import abc
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .function import rematerialized


@dataclasses.dataclass(frozen=True)
class RematerializationRule(abc.ABC):
    """How modules of some classes are made to keep only their inputs.

    Two rules cover most modules: `WholeCall` and `BetweenLayers`. Pass your own as
    `rematerialize(model, rules=(..., *default_rematerialization))`. The first rule that matches a module's class is
    used.
    """

    @property
    @abc.abstractmethod
    def module_types(self) -> tuple[type, ...]:
        """The classes, subclasses included."""

    @abc.abstractmethod
    def refusal(self, module: Any) -> str | None:
        """Why this module cannot be changed, or None if it can be."""

    @property
    @abc.abstractmethod
    def is_gated(self) -> bool:
        """Whether the recomputed part multiplies layers' outputs; it is then computed in float32 if requested."""

    @abc.abstractmethod
    def call(
        self,
        plain: Callable[..., Any],
        module: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        compute_dtype: np.dtype | None,
    ) -> Any:
        """Calls the changed module.

        Args:
            plain: The `__call__` of its class, a function of the module and its arguments.
            module: The module.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            compute_dtype: See `rematerialized`.
        """


@dataclasses.dataclass(frozen=True)
class WholeCall(RematerializationRule):
    """Modules that are cheap as a whole, such as norms: their call keeps nothing but their input.

    Args:
        types: The classes; or their full names, such as `"package.module:Class"`, if a package may be missing.

    Example:
        >>> class Scale(eqx.Module):
        ...     weight: jax.Array
        ...     def __call__(self, x):
        ...         return jnp.tanh(x * self.weight)
        >>> rules = (WholeCall((Scale,)), *default_rematerialization)
        >>> model = rematerialize(Scale(jnp.ones(3)), rules=rules)
        >>> model(jnp.zeros(3)), model.weight.shape, isinstance(model, Scale)
        (Array([0., 0., 0.], dtype=float32), (3,), True)
    """

    types: tuple[type | str, ...]

    @property
    def module_types(self) -> tuple[type, ...]:
        """The classes that are loaded."""
        return loaded(self.types)

    def refusal(self, module: Any) -> None:
        """Always None: every module has a call."""
        return None

    @property
    def is_gated(self) -> bool:
        """Always False: norms compute in float32 themselves where it matters."""
        return False

    def call(
        self,
        plain: Callable[..., Any],
        module: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        compute_dtype: np.dtype | None,
    ) -> Any:
        return rematerialized(plain, compute_dtype)(module, *args, **kwargs)


def loaded(types: tuple[type | str, ...]) -> tuple[type, ...]:
    """The classes, without those of modules that have not been imported: no model can contain these.

    Args:
        types: Classes, or full names such as `"package.module:Class"`.
    """
    found = []
    for one in types:
        if isinstance(one, str):
            module, _, name = one.partition(":")
            one = getattr(sys.modules.get(module), name, None)
        if one is not None:
            found.append(one)
    return tuple(found)
