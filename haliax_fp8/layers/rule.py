"""LayerRule: how the layers of one class are converted, and why some are not."""

import abc
import dataclasses
from typing import Any

import haliax as hax
import jax.numpy as jnp

from .._arguments import require
from .._op import Fp8DotGeneral
from .kernel import Kernel


@dataclasses.dataclass(frozen=True)
class OnlyIfNamed:
    """What `LayerRule.refusal` returns for a layer that stays in high precision unless a pattern names it.

    A pattern of `targets` or `overrides` names it, even one that matches many layers.

    Args:
        reason: Why it stays in high precision; `describe` shows it.

    Raises:
        ValueError: If the reason is not a string.

    Example:
        >>> class SmallLast(EquinoxLinear):
        ...     def refusal(self, layer):
        ...         few = layer.out_features < 32
        ...         return super().refusal(layer) or (OnlyIfNamed("few outputs gain little") if few else None)
        >>> model = eqx.nn.MLP(64, 10, 128, 1, key=jax.random.key(0))
        >>> rules = (SmallLast(), *default_rules)
        >>> config = Fp8Config(rules=rules)
        >>> describe(fp8_linear_layers(model, config), config=config)["layers.1"].reason
        'few outputs gain little'
        >>> config = Fp8Config(rules=rules, targets="layers.*")
        >>> describe(fp8_linear_layers(model, config), config=config)["layers.1"].is_fp8
        True
    """

    reason: str

    def __post_init__(self) -> None:
        require("reason", self.reason, str, "a sentence such as 'few outputs gain little'", of="OnlyIfNamed")


@dataclasses.dataclass(frozen=True)
class LayerRule(abc.ABC):
    """How the layers of one class are converted.

    Write one for your own class and pass it in `Fp8Config(rules=(MyRule(), *default_rules))`. The first rule whose
    class matches a layer is used.

    A class that cannot carry an op itself gets a subclass that does, as `Fp8Linear` is for `eqx.nn.Linear`: `with_op`
    returns the subclass, or the plain layer for None, and `layer_type` matches both. For a weight that is stored as
    `(out, in)` and a layer that calls `op(weight, x)`, say which axis is contracted, and the order:
    `Kernel(weight, *weight.shape[::-1], contracted=(1,), first=True)`.

    Functions that change or measure a converted model take the rules again, in a configuration or as `rules=`.
    `join_linear` knows the layers of Haliax and Equinox only.

    Example:
        >>> class Dense(eqx.Module):
        ...     weight: jax.Array
        ...     op: Fp8DotGeneral | None = None
        ...     def __call__(self, x):
        ...         multiply = jax.lax.dot_general if self.op is None else self.op
        ...         return multiply(x, self.weight, (((x.ndim - 1,), (0,)), ((), ())))
        >>> class DenseRule(LayerRule):
        ...     layer_type = Dense
        ...     def refusal(self, layer):
        ...         return None
        ...     def kernel(self, layer):
        ...         return Kernel(layer.weight, *layer.weight.shape[-2:])
        ...     def op(self, layer):
        ...         return layer.op
        ...     def with_op(self, layer, op):
        ...         return Dense(layer.weight, op)
        >>> config = Fp8Config(rules=(DenseRule(), *default_rules))
        >>> fp8_linear_layers(Dense(jnp.ones((64, 256))), config).op
        Fp8DotGeneral(DelayedScaling E4M3/E4M3/E5M2)
    """

    @property
    @abc.abstractmethod
    def layer_type(self) -> type | tuple[type, ...]:
        """The class or classes, subclasses included."""

    @abc.abstractmethod
    def refusal(self, layer: Any) -> str | OnlyIfNamed | None:
        """Why this layer cannot be converted; or `OnlyIfNamed`, with why a pattern has to name it; None if it can be.

        A reason that it cannot be converted counts only for a layer without an op.
        """

    @abc.abstractmethod
    def kernel(self, layer: Any) -> Kernel:
        """The kernel of a layer, converted or not."""

    @abc.abstractmethod
    def op(self, layer: Any) -> Fp8DotGeneral | None:
        """The op of a converted layer; None if it is not converted."""

    @abc.abstractmethod
    def with_op(self, layer: Any, op: Fp8DotGeneral | None) -> Any:
        """The layer with an op, converted if it was not; with None, the layer as it was before conversion."""


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
        """The classes of `types`."""
        return self.types

    def refusal(self, layer: Any) -> str:
        """`reason`, for every layer."""
        return self.reason

    def kernel(self, layer: Any) -> Kernel:
        """Its weight, if it has one by that name."""
        return Kernel(getattr(layer, "weight", getattr(layer, "weight_ih", None)))

    def op(self, layer: Any) -> None:
        """None: it is never converted."""
        return None

    def with_op(self, layer: Any, op: Fp8DotGeneral | None) -> Any:
        """The layer without an op; with one, raises a ValueError with the reason."""
        if op is not None:
            raise ValueError(f"a {type(layer).__name__} cannot be converted: {self.reason}")
        return layer


def integer_weight(weight: Any) -> str | None:
    """The refusal of weights that are missing or not floating-point; None if they are, or are not arrays at all."""
    if weight is None:
        return "its weight is missing: the layer was probably quantized for inference"
    array = weight.array if isinstance(weight, hax.NamedArray) else weight
    if isinstance(array, str | bytes | bool | int | float | complex):
        return f"its weight is of type {type(array).__name__}, not an array"
    dtype = getattr(array, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16:
        return f"its weight has dtype {dtype} already, and training needs 16 bits or more"
    if dtype is None or jnp.issubdtype(dtype, jnp.floating):
        return None
    return f"its weight has dtype {dtype}, which is not floating-point"
