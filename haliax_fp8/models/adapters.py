"""Low-rank adapters: `add_lora` freezes a model and puts a small trainable product beside each chosen layer.

Everything else becomes its bits, in whole numbers, as those of a frozen `serving.QuantizedLinear` are. Gradients and
optimizers see floating-point arrays alone, so every training loop trains the adapters and nothing else.

References:
    LoRA: arXiv:2106.09685.
"""

import math
import warnings
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Key

from .._tensor_names import is_head
from ..layers import Kernel, axes_of, default_rules, is_quantized_layer, number_of_features
from ..layers.checks import floating_dtype, require_layers, require_single_key, require_weights
from ..layers.frozen_array import frozen, is_frozen_array, thawed
from ..layers.roles import AbstractAdapter, routers, sharing
from ..layers.walk import Targets, as_patterns, find_layers, map_layers, matches, rule_of, unmatched_error
from ..training import OverwriteWithGradient


# --- what is trained --------------------------------------------------------------------------------------------------


class LoraLinear(AbstractAdapter):
    """`base(x) + alpha / rank * B(A(dropout(x)))`: a frozen layer, and two small ones that are trained.

    The adapter computes in the dtype of its input, whatever its own is.

    Args:
        base: The layer, with its weight, bias and FP8 product.
        A: From the inputs of the layer to the rank.
        B: From the rank to the outputs; zero at first.
        dropout: Drops inputs of the adapter; off with `eqx.nn.inference_mode(model)`.
        key: The key of its dropout, from `with_dropout_keys`.
        alpha: Divided by the rank, what the adapter's output is multiplied by.
    """

    base: Any
    A: Any
    B: Any
    dropout: eqx.nn.Dropout
    key: Key[Array, "..."] | None
    alpha: float | int = eqx.field(static=True)

    @property
    def rank(self) -> int:
        """The number of outputs of `A`."""
        return number_of_features(self.A.Out if isinstance(self.A, hnn.Linear) else self.A.out_features)

    def __call__(self, x: Any, *, key: Key[Array, ""] | None = None) -> Any:
        """Maps inputs of the layer to outputs.

        Args:
            x: As the layer takes it.
            key: Another key for dropout than that of `with_dropout_keys`.
        """
        array = x.array if isinstance(x, hax.NamedArray) else x
        dropped = self.dropout(array, key=self.key if key is None else key)
        x_of_adapter = hax.named(dropped, x.axes) if isinstance(x, hax.NamedArray) else dropped
        A, B = (_with_weight(layer, layer.weight.astype(x.dtype)) for layer in (self.A, self.B))
        return self.base(x) + B(A(x_of_adapter)) * (self.alpha / self.rank)

    def __getattr__(self, name: str) -> Any:
        # What models ask of their layers. Not the weight: the adapter belongs to it.
        if name in ("In", "Out", "in_features", "out_features"):
            return getattr(self.base, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; its layer is `base`")

    def merged(self, dtype: DTypeLike) -> Any:
        """The plain layer with the adapter in its weight.

        Args:
            dtype: That of the weight if it is in FP8; any other keeps its own.
        """
        layer = self.base.dequantized(jnp.float32) if is_quantized_layer(self.base) else self.base
        weight, factor = layer.weight, rule_of(layer, default_rules).kernel(layer).factor
        a, b = (_matrices(each).astype(jnp.float32) for each in (self.A, self.B))
        product = jnp.matmul(b, a, precision=lax.Precision.HIGHEST) * (self.alpha / self.rank / factor)
        array = weight.array if isinstance(weight, hax.NamedArray) else weight
        if isinstance(weight, hax.NamedArray):
            axes = (*axes_of(layer.Out), *axes_of(layer.In))
            product = product.reshape(*product.shape[:-2], *(axis.size for axis in axes))
            names = (*self.B.weight.axis_names[: -1 - len(axes_of(layer.Out))], *(axis.name for axis in axes))
            members = array.ndim - len(names)
            product = product.transpose(*range(members), *(members + names.index(name) for name in weight.axis_names))
        wide = np.promote_types(array.dtype, np.float32)
        merged = (array.astype(wide) + product.astype(wide)).astype(
            dtype if is_quantized_layer(self.base) else array.dtype
        )
        return _with_weight(layer, jax.tree.unflatten(jax.tree.structure(weight), [merged]))


def _with_weight(layer: Any, weight: Any) -> Any:
    return eqx.tree_at(lambda layer: layer.weight, layer, weight)


def _matrices(layer: Any) -> Array:
    """The weight of an adapter's half as matrices `[*leading, out, in]`."""
    if not isinstance(layer, hnn.Linear):
        return layer.weight
    array = layer.weight.array
    leading = array.shape[: array.ndim - len(axes_of(layer.Out)) - len(axes_of(layer.In))]
    return array.reshape(*leading, number_of_features(layer.Out), number_of_features(layer.In))


# --- the model --------------------------------------------------------------------------------------------------------


class AdaptedModel(eqx.Module):
    """A model with adapters, used as the model itself: its methods and fields are those of the model.

    Its floating-point arrays are the adapters' and, of layers that `fp8_linear_layers` converted, their FP8 state.

    Args:
        adapted: The model; a `LoraLinear` stands for each layer that has an adapter, a `FrozenArray` for each array.
    """

    adapted: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model."""
        return thawed(self.adapted)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "adapted" or name.startswith("__"):
            raise AttributeError(name)
        is_property = isinstance(getattr(type(self.adapted), name, None), property)
        # Of a method, the module that it is bound to.
        return thawed(getattr(thawed(self.adapted) if is_property else self.adapted, name))


# --- the functions ----------------------------------------------------------------------------------------------------


def add_lora(
    model: Any,
    *,
    rank: int,
    key: Key[Array, ""],
    targets: Targets | None = None,
    alpha: float | int | None = None,
    dropout: float | int = 0.0,
) -> AdaptedModel:
    """Freezes a model, and adds adapters to its linear layers.

    The layers may be plain, converted by `fp8_linear_layers`, or in FP8 from a folder that was loaded with
    `weights="frozen"`; of Haliax or Equinox, stacked or not. The model computes the same until the first step, because
    `B` is zero. `trainable(model)` is the adapters alone, so `TrainStep` and every other loop train nothing else.

    Args:
        model: The model. Cast it to the dtype to compute in first: `cast_params` in a loss would cast adapters alone.
        rank: The rank of each adapter; a warning where the layer has no more inputs or outputs than that.
        key: A key, from which each `A` is drawn.
        targets: The layers: patterns as in `fp8_linear_layers`. By default all linear layers but heads, routers, and
            those whose weight `eqx.nn.Shared` shares.
        alpha: Divided by the rank, what an adapter's output is multiplied by; by default the rank.
        dropout: The share of an adapter's inputs that are dropped in training. See `with_dropout_keys`.

    Returns:
        The model with adapters, whose weights are float32.

    Raises:
        ValueError: If a pattern selects no layer (the nearest paths are listed), or a layer that is not linear or
            shares its weight; if the model has adapters already, or was made for inference; or if a number is out of
            range, or `key` not a single key.

    Example:
        >>> model = add_lora(eqx.nn.MLP(64, 8, 128, 1, key=jax.random.key(0)), rank=4, key=jax.random.key(1))
        >>> sorted(x.shape for x in jax.tree.leaves(trainable(model)))
        [(4, 64), (4, 128), (8, 4), (128, 4)]
        >>> jax.vmap(model)(jnp.ones((2, 64))).shape, model.depth
        ((2, 8), 1)
    """
    call = "add_lora(model, rank=8, key=key)"
    require_layers(model, call)
    if not isinstance(model, eqx.Module):
        raise ValueError(f"model is of type {type(model).__name__}, and has to be a module; use {call}")
    if isinstance(model, AdaptedModel):
        raise ValueError("model has adapters already; merge_lora(model) first, or give all targets in one call")
    require_weights(model, "model", "Load it with weights='frozen'")
    require_single_key(key)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"rank={rank!r} must be a positive integer; 8 and 16 are usual")
    alpha = rank if alpha is None else alpha
    for name, value, top in (("alpha", alpha, math.inf), ("dropout", dropout, 1.0)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < top:
            raise ValueError(f"{name}={value!r} must be a number of at least 0 and less than {top}")
    layers = find_layers(model, default_rules)
    chosen = _chosen(model, {path: layer for path, (layer, _) in layers.items()}, targets)
    _warn_of_high_rank({path: layers[path][0] for path in chosen}, rank)
    keys = dict(zip(chosen, jax.random.split(key, len(chosen)), strict=True))

    def adapt(path: str, layer: Any) -> Any:
        if path not in keys:
            return layer
        A, B = _halves(*layers[path], rank, keys[path])
        return LoraLinear(layer, A, B, eqx.nn.Dropout(float(dropout)), None, alpha)

    is_state = lambda node: isinstance(node, OverwriteWithGradient)
    return AdaptedModel(map_layers(adapt, jax.tree.map(frozen, model, is_leaf=is_state), default_rules))


def merge_lora(model: AdaptedModel, *, dtype: DTypeLike | None = None) -> Any:
    """The model without adapters: each is added to the weight of its layer, in float32, and rounded to its dtype.

    All weights can be trained again. Export it as any model: `huggingface.export_model(merge_lora(model), folder)`.

    Args:
        model: What `add_lora` returned, trained.
        dtype: The dtype of weights that were loaded with `weights="frozen"`; all others keep their own. By default the
            widest one that the rest of the model has.

    Raises:
        ValueError: If `model` has no adapters, or `dtype` is not a floating-point one.

    Example:
        >>> plain = eqx.nn.MLP(64, 8, 128, 1, key=jax.random.key(0))
        >>> bool(eqx.tree_equal(merge_lora(add_lora(plain, rank=4, key=jax.random.key(1))), plain))
        True
    """
    require_adapters(model, "merge_lora(model)")
    leaves = filter(is_frozen_array, jax.tree.leaves(model, is_leaf=is_frozen_array))
    dtypes = (node.dtype for node in leaves if jnp.issubdtype(node.dtype, jnp.floating))
    widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=jnp.bfloat16)
    to = floating_dtype("dtype", widest if dtype is None else dtype)

    def merge(node: Any) -> Any:
        if isinstance(node, LoraLinear):
            return node.merged(to)
        return node.dequantized(to) if is_quantized_layer(node) else node

    return jax.tree.map(
        merge, thawed(model.adapted), is_leaf=lambda n: isinstance(n, LoraLinear) or is_quantized_layer(n)
    )


def with_dropout_keys(model: AdaptedModel, key: Key[Array, ""]) -> AdaptedModel:
    """The model with a key for the dropout of each adapter, and of each block of a stack.

    Call it inside the loss, with a new key in each step, such as the `loss_key` of a `TrainStep`. Examples of a batch
    drop different inputs, but under `vmap` the same ones. `eqx.nn.inference_mode(model)` needs no keys.

    Args:
        model: What `add_lora` returned.
        key: A key, from `jax.random.key`.

    Raises:
        ValueError: If `model` has no adapters, or `key` is not a single key.
    """
    require_adapters(model, "with_dropout_keys(model, key)")
    require_single_key(key)
    nodes, structure = jax.tree.flatten(model, is_leaf=lambda node: isinstance(node, LoraLinear))

    def with_keys(index: int, node: Any) -> Any:
        if not isinstance(node, LoraLinear):
            return node
        keys = jax.random.split(jax.random.fold_in(key, index), _matrices(node.A).shape[:-2])
        return eqx.tree_at(lambda node: node.key, node, keys, is_leaf=lambda leaf: leaf is None)

    return jax.tree.unflatten(structure, [with_keys(i, node) for i, node in enumerate(nodes)])


def require_adapters(model: Any, call: str) -> None:
    """Raises a ValueError unless `add_lora` made the model.

    Args:
        model: The argument.
        call: How the function is called.
    """
    if not isinstance(model, AdaptedModel):
        raise ValueError(
            f"model is of type {type(model).__name__}, without adapters; use {call} with what add_lora(model, rank=8, "
            "key=key) returned"
        )


def _chosen(model: Any, layers: dict[str, Any], targets: Targets | None) -> list[str]:
    """The paths of the layers that get an adapter."""
    are_linear = {path: isinstance(layer, hnn.Linear | eqx.nn.Linear) for path, layer in layers.items()}
    shared = sharing(model, layers)
    if targets is None:
        kernels = {path: rule_of(layer, default_rules).kernel(layer) for path, layer in layers.items()}
        left_out = {*shared, *routers(kernels), *(path for path in layers if path and is_head(path))}
        chosen = [path for path, is_linear in are_linear.items() if is_linear and path not in left_out]
        if not chosen:
            raise ValueError("model has no linear layer but heads and routers; name those that you mean in targets")
        return chosen
    patterns = as_patterns("targets", targets)
    if not patterns:
        raise ValueError(f"targets={targets!r} selects no layer; None selects all but heads and routers")
    for pattern in patterns:
        if not any(matches(pattern, path, layer) for path, layer in layers.items()):
            raise unmatched_error("targets", pattern, list(layers))
    chosen = [path for path, layer in layers.items() if any(matches(pattern, path, layer) for pattern in patterns)]
    if others := [path for path in chosen if not are_linear[path]]:
        raise ValueError(
            f"targets selects {others[0]}, a {type(layers[others[0]]).__name__}; adapters are for haliax.nn.Linear and "
            "equinox.nn.Linear, so name these"
        )
    if tied := shared.intersection(chosen):
        raise ValueError(
            f"targets selects {min(tied)}, whose weight eqx.nn.Shared shares with another layer; leave it out, or give "
            "the model with separate weights"
        )
    return chosen


def _warn_of_high_rank(layers: dict[str, Any], rank: int) -> None:
    kernels = {path: rule_of(layer, default_rules).kernel(layer) for path, layer in layers.items()}
    high = [f"{path or 'the model itself'} ({k.text})" for path, k in kernels.items() if rank >= min(_sizes(k))]
    if high:
        more = f" and {len(high) - 3} more" if len(high) > 3 else ""
        warnings.warn(
            f"rank={rank} is not below the inputs and outputs of {', '.join(high[:3])}{more}: such an adapter has more "
            "weights than its layer. Choose a lower rank, or name other layers in targets",
            stacklevel=3,
        )


def _sizes(kernel: Kernel) -> list[int]:
    return [number_of_features(features) for features in (kernel.In, kernel.Out) if features is not None]


def _halves(layer: Any, stack: tuple[hax.Axis, ...], rank: int, key: Array) -> tuple[Any, Any]:
    """The two layers of an adapter; for a stack or an ensemble as many as it has layers."""
    weight = layer.kernel.stored.data if is_quantized_layer(layer) else layer.weight
    members, stack = Kernel(weight).members_and_stack(stack)
    sizes = (*members, *(axis.size for axis in stack))

    def drawn(fan_in: int, *shape: int) -> Array:
        limit = 1.0 / math.sqrt(fan_in)
        return jax.random.uniform(key, (*sizes, *shape), jnp.float32, -limit, limit)

    if isinstance(layer, eqx.nn.Linear):
        inputs, outputs = number_of_features(layer.in_features), number_of_features(layer.out_features)
        plain = lambda n, m, weight: _with_weight(eqx.nn.Linear(n, m, use_bias=False, key=key), weight)
        A = plain(layer.in_features, rank, drawn(inputs, rank, inputs))
        return A, plain(rank, layer.out_features, jnp.zeros((*sizes, outputs, rank)))
    Rank, inputs, outputs = hax.Axis("lora_rank", rank), axes_of(layer.In), axes_of(layer.Out)

    def named(array: Array, axes: tuple[hax.Axis, ...]) -> hax.NamedArray:
        # As a tree: the members of an ensemble have no names.
        template = hax.named(np.zeros([axis.size for axis in axes], bool), axes)
        return jax.tree.unflatten(jax.tree.structure(template), [array])

    of_A, of_B = (Rank, *inputs), (*outputs, Rank)
    a = drawn(number_of_features(layer.In), *(axis.size for axis in of_A))
    b = jnp.zeros((*sizes, *(axis.size for axis in of_B)))
    return (
        hnn.Linear(named(a, (*stack, *of_A)), None, layer.In, Rank),
        hnn.Linear(named(b, (*stack, *of_B)), None, Rank, layer.Out),
    )
