"""The rule for modules that compute something cheap between linear layers, such as a gated activation."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jax.xla import read_together
from ...layers.rebuilt import rebuilt
from .function import rematerialized
from .rule import RematerializationRule, loaded


@dataclasses.dataclass(frozen=True)
class BetweenLayers(RematerializationRule):
    """Modules such as `down(silu(gate(x)) * up(x))`: the computation between their layers keeps only its inputs.

    The layers run once, as before. The module's own code computes the rest: for the input of a layer in `after`, it is
    called again, with the known outputs in place of the earlier layers, up to its call of that layer. So this works for
    any code that does nothing expensive between its layers, and gives the same results.

    Args:
        types: The classes; or their full names, such as `"package.module:Class"`, if a package may be missing.
        before: The attributes that hold the layers whose outputs are kept; or sequences of layers.
        after: The attributes that hold the layers whose inputs are computed again.
        gated: Whether outputs of several `before` layers are multiplied in between.

    Example:
        >>> class GLU(eqx.Module):
        ...     gate: hnn.Linear
        ...     up: hnn.Linear
        ...     down: hnn.Linear
        ...     def __call__(self, x):
        ...         return self.down(hnn.sigmoid(self.gate(x)) * self.up(x))
        >>> rule = BetweenLayers((GLU,), before=("gate", "up"), after=("down",), gated=True)
        >>> Embed, Inner = hax.make_axes(embed=16, inner=32)
        >>> gate, up = (hnn.Linear.init(Embed, Inner, key=jax.random.key(i)) for i in range(2))
        >>> glu = GLU(gate, up, hnn.Linear.init(Inner, Embed, key=jax.random.key(2)))
        >>> model = rematerialize(glu, rules=(rule, *default_rematerialization))
        >>> bool((model(hax.ones(Embed)).array == glu(hax.ones(Embed)).array).all())
        True
    """

    types: tuple[type | str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    gated: bool = False

    def __post_init__(self) -> None:
        for name in ("before", "after"):
            value = getattr(self, name)
            if isinstance(value, str) or not value:
                raise ValueError(f"{name}={value!r} of BetweenLayers must be a tuple of attributes, such as ('down',)")

    @property
    def module_types(self) -> tuple[type, ...]:
        """The classes that are loaded."""
        return loaded(self.types)

    def refusal(self, module: Any) -> str | None:
        """Names the attributes that the module lacks."""
        missing = [name for name in (*self.before, *self.after) if not hasattr(module, name)]
        return f"it has no attribute {', '.join(missing)}" if missing else None

    @property
    def is_gated(self) -> bool:
        """Whether the layers were declared a gate."""
        return self.gated

    def call(
        self,
        plain: Callable[..., Any],
        module: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        compute_dtype: np.dtype | None,
    ) -> Any:
        """Calls the module, with a recomputed input for each layer in `after`."""
        outputs: list[Any] = []
        rest = with_attributes(module, dict.fromkeys((*self.before, *self.after)))

        def input_of_next(rest: Any, outputs: list[Any], args: Any, kwargs: Any) -> Any:
            """The input of the layer that the code calls next, computed from the outputs of the earlier layers."""
            calls = iter(outputs)

            def replay(layer: Any, x: Any, layer_args: Any, layer_kwargs: Any, *, is_after: bool) -> Any:
                for out in calls:
                    return out
                raise _Stop(x)

            try:
                plain(self._with_stand_ins(rest, module, replay), *args, **kwargs)
            except _Stop as stop:
                return stop.x
            raise ValueError(f"{type(module).__name__} called its layers differently when it was called again")

        recomputed = rematerialized(input_of_next, compute_dtype)

        def call(layer: Any, x: Any, layer_args: Any, layer_kwargs: Any, *, is_after: bool) -> Any:
            if is_after and outputs:
                # Nothing reads the input that the code computed here, so compilers drop its computation.
                try:
                    x = recomputed(rest, jax.tree.map(_as_read, list(outputs)), args, kwargs)
                except jax.errors.UnexpectedTracerError as error:
                    raise ValueError(
                        f"{type(module).__name__} maps its layers one by one, as in jax.vmap(self.{self.after[0]})(x), "
                        "so BetweenLayers does not see their outputs; map the module as a whole"
                    ) from error
            outputs.append(layer(x, *layer_args, **layer_kwargs))
            return outputs[-1]

        return plain(self._with_stand_ins(module, module, call), *args, **kwargs)

    def _with_stand_ins(self, module: Any, layers: Any, called: Callable[..., Any]) -> Any:
        """The module with a function in place of each layer; `layers` is the module that has the layers."""
        stand_ins = {}
        for name in dict.fromkeys((*self.before, *self.after)):
            layer, is_after = getattr(layers, name), name in self.after
            is_sequence = isinstance(layer, list | tuple)
            found = [_StandIn(one, called, is_after) for one in (layer if is_sequence else [layer])]
            stand_ins[name] = tuple(found) if is_sequence else found[0]
        return with_attributes(module, stand_ins)


def _as_read(x: Any) -> Any:
    is_floating = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    return read_together(x) if is_floating else x


class _Stop(BaseException):
    """Ends a call at a layer; an `except Exception` in the module's code does not catch it.

    Args:
        x: The layer's input.
    """

    def __init__(self, x: Any) -> None:
        self.x = x


@dataclasses.dataclass(frozen=True, eq=False)
class _StandIn:
    """Replaces a layer while its module is called, with the layer's attributes."""

    layer: Any
    called: Callable[..., Any]
    is_after: bool

    def __call__(self, x: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self.called(self.layer, x, args, kwargs, is_after=self.is_after)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def with_attributes(module: Any, attributes: Mapping[str, Any]) -> Any:
    """A copy of a module with new values, of any type, for some attributes.

    Args:
        module: The module.
        attributes: The values by name.
    """
    return rebuilt(type(module), {**vars(module), **attributes})
