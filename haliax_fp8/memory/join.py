"""join_linear: joins layers that read the same tensor into one layer, whose output is split again."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax.numpy as jnp

from ..layers.config import default_rules
from ..layers.equinox import rebuilt
from ..layers.kernel import Features, number_of_features
from ..layers.walk import rule_of


type Linear = hnn.Linear | eqx.nn.Linear


class JoinedLinear(eqx.Module):
    """Linear layers of the same input as one layer, with one weight and one product. Made by `join_linear`.

    Args:
        linear: The joined layer, which concatenates the outputs of all layers (Haliax: along an axis `joined`).
        parts: The output axes, or the number of output features, of each layer.
    """

    linear: Linear
    parts: tuple[Features, ...] = eqx.field(static=True)

    def __call__(self, x: Any, *, key: Any = None) -> tuple[Any, ...]:
        """The output of each layer.

        Args:
            x: Their input.
            key: Passed to the layer.
        """
        out = self.linear(x, key=key)
        # As in Equinox's layers, a matrix has examples in its columns, and "scalar" features have no axis.
        axis = -min(2, out.ndim)
        outputs = zip(_split(out, self.parts, axis), self.parts, strict=True)
        return hax.auto_sharded(tuple(jnp.squeeze(out, axis) if part == "scalar" else out for out, part in outputs))


def join_linear(layers: Sequence[Linear]) -> JoinedLinear:
    """Makes one layer of several that read the same tensor, such as q/k/v, to be called in your own module.

    The products of the layers become one, in the forward pass and for each gradient: fewer launches, and less to
    compile. In high precision the numbers are the same, up to the order of summation.

    `fp8_linear_layers` converts the joined layer like any other. Its kernel then has one scale, and so has its output
    gradient, whose parts have to be concatenated before it is quantized. For q/k/v that moves more bytes than one
    product saves (`docs/performance.md`). If output axes are sharded, as in tensor parallelism, parts of the output
    also have to move between devices. `share_input_scales` has none of these costs.

    Args:
        layers: `haliax.nn.Linear` or `eqx.nn.Linear` layers, not converted yet. They may be stacked, and may differ
            only in their outputs.

    Returns:
        A module that maps the input to a tuple of the layers' outputs.

    Raises:
        ValueError: If layers have another class, are converted already, or differ in more than their outputs.

    References:
        TransformerEngine's `fuse_qkv_params`.

    Example:
        >>> class Attention(eqx.Module):
        ...     qkv: JoinedLinear
        ...     def __call__(self, x):
        ...         q, k, v = self.qkv(x)
        ...         return hax.dot(q, k, axis="head") * v
        >>> In, Out = hax.make_axes(embed=16, head=16)
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> q, k, v = (hnn.Linear.init(In, Out, key=key) for key in keys)
        >>> model = fp8_linear_layers(Attention(join_linear([q, k, v])))
        >>> model.qkv.linear.weight.axes
        (Axis(name='joined', size=48), Axis(name='embed', size=16))
        >>> model(hax.ones(In)).axes
        (Axis(name='head', size=16),)
    """
    _check(layers)
    parts = tuple(layer.Out if isinstance(layer, hnn.Linear) else layer.out_features for layer in layers)
    weight = _concatenated([layer.weight for layer in layers], parts, -2)
    bias = None if layers[0].bias is None else _concatenated([layer.bias for layer in layers], parts, -1)
    total = sum(map(number_of_features, parts))
    outputs = hax.Axis(_JOINED, total) if isinstance(layers[0], hnn.Linear) else total
    return JoinedLinear(_with(layers[0], weight, bias, outputs), parts)


def split_linear(joined: JoinedLinear) -> list[Linear]:
    """The inverse of `join_linear`, for checkpoints: plain layers with their parts of the weight, bit for bit.

    The joined layer may have been converted and trained since. Its FP8 state is dropped, because its scales belong to
    all layers together: to go on in FP8, convert the layers again and calibrate them.

    Args:
        joined: The joined layers. For an ensemble of Haliax's layers, use `eqx.filter_vmap(split_linear)`.

    Example:
        >>> layers = [eqx.nn.Linear(16, size, key=jax.random.key(size)) for size in (32, 8)]
        >>> trained = fp8_linear_layers(join_linear(layers))
        >>> bool(eqx.tree_equal(split_linear(trained), layers))
        True
    """
    linear = rule_of(joined.linear, default_rules).with_op(joined.linear, None)
    weights = _split(linear.weight, joined.parts, -2)
    biases = [None] * len(weights) if linear.bias is None else _split(linear.bias, joined.parts, -1)
    parts = zip(weights, biases, joined.parts, strict=True)
    return [_with(linear, weight, bias, outputs) for weight, bias, outputs in parts]


_JOINED = "joined"


def _check(layers: Any) -> None:
    if not layers:
        raise ValueError("layers of join_linear is empty; pass a sequence of them, such as [q, k, v]")
    for i, layer in enumerate(layers):
        if not isinstance(layer, hnn.Linear | eqx.nn.Linear) or not hasattr(layer.weight, "dtype"):
            what = f"layers[{i}] of join_linear is a {type(layer).__name__}"
            raise ValueError(f"{what}, but must be a haliax.nn.Linear or an eqx.nn.Linear whose weight is an array")
        rule = rule_of(layer, default_rules)
        refusal = rule.refusal(layer) if rule.op(layer) is None else "it is converted already; join, then convert"
        if isinstance(refusal, str):
            raise ValueError(f"layers[{i}] of join_linear cannot be joined: {refusal}")
    kinds = [_common(layer) for layer in layers]
    for name, value in kinds[0].items():
        if any(kind.get(name) != value for kind in kinds):
            raise ValueError(f"layers of join_linear differ in {name}: {[kind.get(name) for kind in kinds]}")


def _common(layer: Linear) -> dict[str, Any]:
    """The properties that layers must have in common."""
    kind = {"class": type(layer), "dtype": str(layer.weight.dtype), "bias": "no" if layer.bias is None else "yes"}
    if isinstance(layer, eqx.nn.Linear):
        return kind | {"input features": layer.in_features, "stacked axes": layer.weight.shape[:-2]}
    axes = layer.weight.flatten_axes(layer.Out, _JOINED).axes
    others = [_JOINED if axis.name == _JOINED else axis for axis in axes]
    return kind | {"input axes": layer.In, "axes of the weight": others, "reparametrization": layer._reparam_cls}


def _with(layer: Linear, weight: Any, bias: Any, outputs: Any) -> Linear:
    name = "Out" if isinstance(layer, hnn.Linear) else "out_features"
    return rebuilt(type(layer), vars(layer) | {"weight": weight, "bias": bias, name: outputs})


def _concatenated(arrays: Sequence[Any], parts: Sequence[Any], axis: int) -> Any:
    """Concatenates along `joined`, which replaces the output axes; or plain arrays along an axis."""
    if not isinstance(arrays[0], hax.NamedArray):
        return jnp.concatenate(arrays, axis)
    return hax.concatenate(_JOINED, [x.flatten_axes(part, _JOINED) for x, part in zip(arrays, parts, strict=True)])


def _split(x: Any, parts: Sequence[Any], axis: int) -> list[Any]:
    """The inverse of `_concatenated`."""
    ends = list(accumulate(map(number_of_features, parts)))[:-1]
    if not isinstance(x, hax.NamedArray):
        return jnp.split(x, ends, axis)
    arrays = zip(jnp.split(x.array, ends, x.axis_names.index(_JOINED)), parts, strict=True)
    return [hax.NamedArray(array, x.axis_names).unflatten_axis(_JOINED, part) for array, part in arrays]
