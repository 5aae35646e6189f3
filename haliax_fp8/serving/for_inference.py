"""quantize_for_inference: a model with FP8 weights and without its training state; and the way back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from jaxtyping import DTypeLike

from .._printing.progress import Watcher, progress_of
from .._tensor_names import is_head
from ..layers.checks import check_not_modified, require_layers, require_merged, require_model
from ..layers.config import default_rules
from ..layers.quantized import is_quantized_layer
from ..layers.roles import routers, sharing
from ..layers.rule import LayerRule
from ..layers.walk import (
    Targets,
    as_patterns,
    find_layers,
    map_layers_in_stacks,
    matches,
    nothing_to_convert,
    rule_of,
    unmatched_error,
)
from ..layouts import Layout
from .constructors import Constructor, constructors_with, quantized_layer
from .layout import require_served
from .of_training import served_kernel
from .unstack import holds_quantized_layers, unstacked


def quantize_for_inference[M](
    model: M,
    layout: str | Layout = "FP8",
    *,
    targets: Targets | None = None,
    exclude: Targets = (),
    unstack: bool = True,
    rules: tuple[LayerRule, ...] = default_rules,
    quantized_layers: Mapping[type, Constructor] | None = None,
    progress: Watcher | None = None,
) -> M:
    """The model with the weights of its linear layers in FP8: one byte each, and scales.

    | layout | kernels | inputs |
    |---|---|---|
    | `"FP8"` | the scale that the training state holds for the next step | the scale that the training state holds |
    | `"FP8_DYNAMIC"` | a scale for each output | a scale for each row, computed at run time |
    | `"FP8_BLOCK"` | blocks of 128x128 | blocks of 1x128, computed at run time |
    | `"MXFP8"` | blocks of 32, powers of two | blocks of 32, computed at run time |
    | `"W8A16"` | a scale for each output | high precision |

    The names are those of `layouts.named`. The default has the numbers of training; that of `huggingface.export_model`,
    `"FP8_DYNAMIC"`, needs no state of training and suits most engines. `"FP8_TENSOR"` and `"modelopt"` multiply as
    `"FP8"` does, and `"HF_FP8"` as `"FP8_BLOCK"`: only their folders differ.

    A layer computes the same as in training with such scales, bit for bit. State, histories and high-precision copies
    are dropped, and it has no gradient. Stacks are unstacked into separate layers, because in a loop XLA copies FP8
    kernels before it multiplies. On NVIDIA GPUs, products of fewer than 16 rows are padded to 16.

    Kernels are rounded to the dtype that their products compute in, then quantized. If your loss casts parameters to a
    dtype, cast the model to it first: `cast_params(model, jnp.bfloat16)`.

    Args:
        model: A model that trains in FP8, whose FP8 layers are quantized; or a plain model, whose linear layers are
            quantized except heads, embeddings, routers, and those that `eqx.nn.Shared` ties.
        layout: The name of a layout, or a `layouts.Layout`.
        targets: The layers to quantize instead: patterns as in `fp8_linear_layers`; heads, embeddings and routers too.
        exclude: Layers to leave in high precision.
        unstack: Whether each `haliax.nn.Stacked` with such a layer becomes a `BlockSeq`, with the same numbers and the
            same keys in state dicts. Stacks in ensembles stay.
        rules: The rules of the layer classes, as in `Fp8Config`.
        quantized_layers: For each class of your own, a function that takes a layer of it and the `QuantizedKernel` that
            it multiplies by, and returns an `AbstractQuantizedLayer`: `{Dense: QuantizedDense.of}`.
        progress: Called as `progress(path, done, total)` with each layer, in bytes of FP8. By default there is a bar if
            the standard error is a terminal.

    Returns:
        The model for inference.

    Raises:
        ValueError: If the layout needs a stored scale that a layer lacks or that is not calibrated; if a pattern
            selects no layer, or one that cannot be quantized; if a kernel holds an infinity or NaN; or if a layer's
            class has no form for inference, or `quantized_layers` has a class without a rule.

    Example:
        >>> model = eqx.nn.MLP(64, 64, 128, 2, key=jax.random.key(0))
        >>> served = quantize_for_inference(model, "FP8_DYNAMIC")
        >>> served.layers[0].kernel.quantized.data.dtype, served.layers[0].kernel.bytes
        (dtype(float8_e4m3fn), 8704)
    """
    require_layers(model, "quantize_for_inference(model, layout)")
    require_merged(model)
    chosen = require_served(layout)
    check_not_modified(model)
    constructors = constructors_with(quantized_layers, rules)
    selected = _selected(model, rules, targets, exclude)
    layers = {path: layer for path, (layer, _) in find_layers(model, rules).items() if path in selected}
    sizes = {path: _elements(rule_of(layer, rules).kernel(layer).weight) for path, layer in layers.items()}
    done: dict[int, Any] = {}

    def quantized(path: str, layer: Any, stack: tuple[hax.Axis, ...]) -> Any:
        rule = rule_of(layer, rules)
        if is_quantized_layer(layer):
            return layer
        if path not in selected:
            return layer if rule.op(layer) is None else rule.with_op(layer, None)
        # An object that appears at two paths stays one object.
        if id(layer) not in done:
            kernel = served_kernel(path, rule, layer, stack, chosen)
            done[id(layer)] = quantized_layer(path, rule, layer, kernel, constructors)
        advance(path, sizes[path])
        return done[id(layer)]

    with progress_of("quantizing", sum(sizes.values()), progress) as advance:
        served = map_layers_in_stacks(quantized, model, rules)
    return unstacked(served) if unstack else served


def dequantize[M](model: M, dtype: DTypeLike = "float32") -> M:
    """The model with plain layers whose weights are `data * scale`: exact in float32, rounded once in other dtypes.

    Args:
        model: A model made by `quantize_for_inference` or `import_model`, or a part of one.
        dtype: The dtype of these weights.

    Example:
        >>> served = quantize_for_inference(eqx.nn.Linear(64, 64, key=jax.random.key(0)), "W8A16")
        >>> type(dequantize(served)), dequantize(served).weight.dtype
        (<class 'equinox.nn._linear.Linear'>, dtype('float32'))
    """
    require_model(model, "dequantize(model)")
    return jax.tree.map(
        lambda node: node.dequantized(dtype) if is_quantized_layer(node) else node, model, is_leaf=is_quantized_layer
    )


def freeze[M](model: M) -> M:
    """The model with its layers for inference frozen: a base for adapters, without a folder.

    Data and scales stay. Layers multiply by `data * scale` in the dtype of their inputs, with gradients to these.

    Args:
        model: A model made by `quantize_for_inference`, or by `import_model` with `weights="served"`.

    Raises:
        ValueError: If no layer is quantized.

    Example:
        >>> from haliax_fp8.models import add_lora
        >>> served = quantize_for_inference(eqx.nn.MLP(64, 8, 64, 2, key=jax.random.key(0)), "FP8_DYNAMIC")
        >>> adapted = add_lora(freeze(served), rank=4, key=jax.random.key(1))
        >>> jax.eval_shape(jax.grad(lambda x: adapted(x).sum()), jnp.ones(64)).shape
        (64,)
    """
    require_model(model, "freeze(model)")
    if not holds_quantized_layers(model):
        raise ValueError(
            "model has no quantized layer to freeze; quantize it first: freeze(quantize_for_inference(model, "
            "'FP8_DYNAMIC'))"
        )

    def frozen(node: Any) -> Any:
        if not is_quantized_layer(node):
            return node
        kernel = dataclasses.replace(node.kernel, layout=None, compute_dtype=None)
        return eqx.tree_at(lambda layer: layer.kernel, node, kernel)

    return jax.tree.map(frozen, model, is_leaf=is_quantized_layer)


def _elements(weight: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(weight))


def _selected(model: Any, rules: tuple[LayerRule, ...], targets: Targets | None, exclude: Targets) -> frozenset[str]:
    """The paths of the layers to quantize."""
    layers = {path: layer for path, (layer, _) in find_layers(model, rules).items()}
    by_path = {path: rule_of(layer, rules) for path, layer in layers.items()}
    excluded = as_patterns("exclude", exclude)
    named = as_patterns("targets", () if targets is None else targets)
    for name, patterns in (("targets", named), ("exclude", excluded)):
        for pattern in patterns:
            if not any(matches(pattern, path, layer) for path, layer in layers.items()):
                raise unmatched_error(name, pattern, list(layers))
    is_any = lambda patterns, path: any(matches(pattern, path, layers[path]) for pattern in patterns)
    refused = {
        path: reason
        for path, rule in by_path.items()
        if rule.op(layers[path]) is None and isinstance(reason := rule.refusal(layers[path]), str)
    }
    tied = sharing(model, layers)
    refused |= dict.fromkeys(tied, "eqx.nn.Shared shares its weight; exclude it, or give the model separate weights")
    if targets is not None:
        selected = [path for path in layers if is_any(named, path)]
        for path in selected:
            if path in refused and not is_any(excluded, path):
                raise ValueError(f"targets select {path}, which cannot be quantized: {refused[path]}")
    elif any(rule.op(layers[path]) is not None for path, rule in by_path.items()):
        selected = [path for path, rule in by_path.items() if rule.op(layers[path]) is not None]
        if left := [path for path in selected if path in tied and not is_any(excluded, path)]:
            raise ValueError(f"{left[0]} cannot be quantized: {refused[left[0]]}")
    else:
        are_routers = routers({path: rule.kernel(layers[path]) for path, rule in by_path.items()})
        optional = {path for path, rule in by_path.items() if rule.refusal(layers[path]) is not None} | are_routers
        selected = [path for path in layers if path not in optional | tied and not is_head(path)]
    selected = [path for path in selected if not is_any(excluded, path)]
    if not selected:
        left = {path: refused.get(path, "a head, an embedding or a router, tied, or excluded") for path in layers}
        raise nothing_to_convert(model, rules, left)
    return frozenset(selected)
