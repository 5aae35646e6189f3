"""How modules between FP8 products are recomputed: the rules for their classes, and the subclasses that do it."""

import abc
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from haliax.nn.normalization import LayerNormBase
from jaxtyping import DTypeLike

from .._jax.xla import read_together
from .._numerics.checks import require
from .._product.arguments import floating_dtype
from .._state.op_state import is_state
from ..layers.equinox import rebuilt
from ..layers.walk import AbstractRematerialized


def rematerialized(function: Callable[..., Any], compute_dtype: DTypeLike | None = None) -> Callable[..., Any]:
    """The function, for which automatic differentiation keeps only the inputs and recomputes everything else.

    Use it for cheap functions between products: activation functions and norms. Otherwise their intermediate values are
    kept, often in float32, and a scan over layers writes them to memory and reads them back. Once operands are in FP8,
    that is several times the bytes of the activations themselves. If layers are unrolled, the compiler decides anyway.

    In float32, a gated activation such as `silu(gate) * up` also fuses better on an H100: both of its gradients are
    cast to FP8 where they are computed. In bfloat16, XLA rounds after each operation, considers that too much work to
    do twice, and writes one gradient to memory first. On an H200 and on Blackwell, whose memory is faster, it is the
    other way around.

    Args:
        function: Maps arrays (or NamedArrays, or trees of them) to the same kinds; a module, or any other callable.
        compute_dtype: The dtype that floating inputs, and a module's parameters, are cast to. The results are rounded
            back to the dtype that the function returns without it. By default nothing is cast, and values equal the
            function's bit for bit, unless XLA omits roundings to bfloat16 (`xla_allow_excess_precision`).

    Returns:
        A function with the same arguments and the same gradients.

    Raises:
        ValueError: If `function` is not callable, or `compute_dtype` is not a floating dtype of 16 bits or more.

    References:
        `jax.checkpoint` with `nothing_saveable`; selective recomputation, arXiv:2205.05198, section 5.

    Example:
        >>> swiglu = rematerialized(lambda gate, up: jax.nn.silu(gate) * up, compute_dtype=jnp.float32)
        >>> gate, up = jnp.bfloat16([[0.3, -1.0]]), jnp.bfloat16([[2.0, 0.7]])
        >>> swiglu(gate, up)
        Array([[0.345703, -0.188477]], dtype=bfloat16)
        >>> kept = jax.tree.leaves(jax.vjp(swiglu, gate, up)[1])
        >>> [(x.shape, x.dtype.name) for x in kept]
        [((1, 2), 'bfloat16'), ((1, 2), 'bfloat16')]
    """
    require("function", function, Callable, "a function or a module", of="rematerialized")
    dtype = None if compute_dtype is None else floating_dtype("compute_dtype", compute_dtype)

    def computed(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if dtype is None:
            return function(*args, **kwargs)
        returned = eqx.filter_eval_shape(function, *args, **kwargs)
        function, args, kwargs = (_cast(tree, dtype) for tree in (function, args, kwargs))
        return jax.tree.map(_cast_like, function(*args, **kwargs), returned)

    # If layers are unrolled, the compiler may reuse the forward pass's values instead. A barrier against that would
    # also keep it from fusing both passes of a checkpointed block.
    keeping_inputs = eqx.filter_checkpoint(computed, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)

    @functools.wraps(function, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return keeping_inputs(function, args, kwargs)

    return wrapped


def _cast(tree: Any, dtype: np.dtype) -> Any:
    is_floating = lambda x: isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)
    # The scales of FP8 layers are not cast.
    cast = lambda x: x if is_state(x) or not is_floating(x) else x.astype(dtype)
    return jax.tree.map(cast, tree, is_leaf=is_state)


def _cast_like(x: Any, like: Any) -> Any:
    return x.astype(like.dtype) if eqx.is_array(x) else x


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


default_rematerialization: tuple[RematerializationRule, ...] = (
    # Haliax's `LayerNorm` and `RmsNorm`, and Levanter's, which derive from the same class.
    WholeCall((LayerNormBase, eqx.nn.LayerNorm, eqx.nn.RMSNorm, eqx.nn.GroupNorm)),
    BetweenLayers(
        # For Llama, Mistral, Qwen and Gemma; and for OLMo 2.
        ("levanter.models.llama:LlamaMlp", "levanter.models.olmo:Olmo2MLP"),
        before=("gate_proj", "up_proj"),
        after=("down_proj",),
        gated=True,
    ),
    BetweenLayers(("levanter.models.mixtral:MixtralMoEMlp",), before=("w1", "w3"), after=("w2",), gated=True),
    BetweenLayers(("levanter.models.modernbert:ModernBertMlp",), before=("Wi",), after=("Wo",), gated=True),
    BetweenLayers(("levanter.models.apertus:ApertusMlp",), before=("up_proj",), after=("down_proj",)),
    BetweenLayers(("levanter.models.gpt2:Gpt2Mlp",), before=("c_fc",), after=("c_proj",)),
    BetweenLayers(("levanter.models.whisper:WhisperMlp",), before=("fc1",), after=("fc2",)),
    BetweenLayers((hnn.MLP, eqx.nn.MLP), before=("layers",), after=("layers",)),
)
"""The default rules of `rematerialize`: Haliax's, Equinox's and Levanter's norms and feed-forward layers."""
