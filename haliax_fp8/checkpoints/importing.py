"""import_model: a checkpoint in any of the layouts, made by anyone, into a model of Haliax or Equinox."""

import dataclasses
import enum
import os
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np

from ..attention.op import Fp8Attention
from ..layers.config import Fp8Config, as_config
from ..layers.kernel import Kernel, axes_of
from ..layers.model_argument import require_layers
from ..layers.rebuilt import rebuilt
from ..layers.rule import LayerRule
from ..layers.served import AbstractServedLayer
from ..serving.unstack import unstacked
from .files import require_folder_name
from .fits import require_fits
from .frozen import FrozenEquinoxLinear, FrozenLinear, FrozenMoELinear, is_frozen
from .frozen_kernel import FrozenKernel
from .imported_kernels import served_layer
from .model.collected import is_norm, other_arrays
from .model.folder_tensors import FolderTensors
from .model.matrices import Parts, of_array, of_kernel, plain
from .model.tree import ModelPath, visit
from .model.wanted import Wanted
from .names import NameMap
from .scaled_matrix import ScaledMatrix


class Weights(enum.Enum):
    """What becomes of weights that a checkpoint holds in FP8."""

    DEQUANTIZED = "dequantized"
    """`data * scale`, in the dtype of the model's parameters: to train them."""

    FROZEN = "frozen"
    """FP8 data and scales as they are, which never change: a base for adapters."""

    SERVED = "served"
    """FP8 data and scales as they are, multiplied in FP8: for inference."""


def import_model[M](
    directory: str | os.PathLike[str],
    model: M,
    *,
    names: Any = None,
    weights: Weights | str = Weights.DEQUANTIZED,
    strict: bool = True,
    config: Fp8Config | None = None,
) -> M:
    """Reads a checkpoint into a model, without PyTorch.

    The layout is the one that `config.json` names; a folder without quantization is read as it is. Weights that the
    checkpoint has in FP8 become what `weights` says, all others take the dtype of the model's parameters. Layers that
    engines fuse (`qkv_proj`, `gate_up_proj`) are taken apart, and a head that the checkpoint ties to its embedding gets
    the embedding. A converted model keeps its FP8 state, which is that of other weights: calibrate it.

    Args:
        directory: The folder of the checkpoint.
        model: A model of the same sizes, whose weights do not matter: it may be abstract (`eqx.filter_eval_shape`).
            Arrays are divided as its own are, if they have a sharding.
        names: The `NameMap`, or a dict from the model's names to the checkpoint's: `names.LLAMA` for the demo's.
        weights: `"dequantized"`, `"frozen"` or `"served"`; see `Weights`. A served model is as
            `serving.quantize_for_inference` makes it: inputs are quantized as the checkpoint says, stacks become one
            block after the other, and layers compute in the dtype of the model's parameters.
        strict: Whether a tensor of the checkpoint that the model does not have is an error.
        config: Only its `rules` matter; needed for layers of your own classes.

    Returns:
        The model with the checkpoint's weights.

    Raises:
        ValueError: If the folder is broken, in the sense of the checks of its layout; if a tensor is missing, has
            another shape than in the model, or that it does not have; each names the tensor.
    """
    require_folder_name(directory, "import_model(directory, model)")
    require_layers(model, "import_model(directory, model)")
    try:
        weights = Weights(weights)
    except ValueError:
        options = ", ".join(repr(member.value) for member in Weights)
        raise ValueError(f"weights={weights!r} must be one of {options}") from None
    rules = as_config(config).rules
    checkpoint = Wanted.of(FolderTensors.open(directory), NameMap.of(names), model, rules)
    loaded = visit(model, _Loader(checkpoint, weights), rules)
    if strict and (unused := checkpoint.unused()):
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        raise ValueError(
            f"the model has no array for {', '.join(unused[:3])}{more} of {os.fspath(directory)}; map their names with "
            "names=..., or leave them out with strict=False"
        )
    return unstacked(loaded) if weights is Weights.SERVED else loaded


@dataclasses.dataclass(frozen=True)
class _Loader:
    checkpoint: Wanted
    weights: Weights

    def layer(self, layer: Any, rule: LayerRule, path: ModelPath) -> Any:
        if is_frozen(layer) or isinstance(layer, AbstractServedLayer):
            raise ValueError(f"model has a layer in FP8 at {path}; pass the plain model that it was imported into")
        changes: dict[str, Any] = {}
        for name, array, parts in other_arrays(layer, rule, path):
            changes[name] = _filled(array, parts, path, self.checkpoint.array, f".{name}")
        kernel = rule.kernel(layer)
        parts = of_kernel(kernel, path)
        found = [(index, self.checkpoint.matrix(name, parts.shape)) for name, index in parts.named(path)]
        if self.weights is not Weights.DEQUANTIZED and any(matrix.is_quantized for _, matrix in found):
            op, layer = rule.op(layer), rule.with_op(_with(layer, changes), None)
            scaled = [(index, matrix.scaled()) for index, matrix in found]
            if self.weights is Weights.FROZEN:
                return _frozen(layer, kernel, parts, path, scaled)
            compute_dtype = None if op is None else op.compute_dtype
            return served_layer(layer, kernel, compute_dtype, parts, path, scaled, self.checkpoint.tensors.inputs)
        values = iter([matrix for _, matrix in found])
        dense = lambda name, shape: next(values).dense() / kernel.factor
        weight = _filled(kernel.weight, parts, path, dense, ".weight")
        return _with(layer, {**changes, _field_of(layer, kernel): weight})

    def attention(self, op: Fp8Attention, path: ModelPath) -> Any:
        del path
        return op

    def array(self, array: Any, owner: Any, path: ModelPath) -> Any:
        dtype = np.dtype(plain(array).dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            return array
        return _filled(array, of_array(array, path, flat=is_norm(owner)), path, self.checkpoint.array)


def _filled(like: Any, parts: Parts, path: ModelPath, read: Any, field: str = "") -> Any:
    """An array like another one, part by part."""
    template = plain(like)
    values = np.empty(template.shape, template.dtype)
    for name, index in parts.named(path):
        numbers = read(f"{name}{field}", parts.shape)
        require_fits(numbers, template.dtype, f"{name}{field}")
        parts.write(values, index, numbers.astype(template.dtype))
    array = _on_devices(values, template)
    if not isinstance(like, hax.NamedArray):
        return array
    return jax.tree.unflatten(jax.tree.structure(like), [array])


def _on_devices(values: np.ndarray, template: Any) -> jax.Array:
    """Places values on the devices of a template, if it says where it is; an abstract one may not."""
    sharding = getattr(template, "sharding", None)
    return jnp.asarray(values) if sharding is None else jax.device_put(values, sharding)


def _field_of(layer: Any, kernel: Kernel) -> str:
    for field in dataclasses.fields(layer):
        if getattr(layer, field.name, None) is kernel.weight:
            return field.name
    raise ValueError(
        f"the weight of a {type(layer).__name__}, as its LayerRule gives it, is not one of its fields; give a rule "
        "whose Kernel holds the field itself"
    )


def _with(layer: Any, changes: dict[str, Any]) -> Any:
    """The layer with other fields; without its constructor, which may take other arguments."""
    names = [field.name for field in dataclasses.fields(layer) if hasattr(layer, field.name)]
    return rebuilt(type(layer), {name: getattr(layer, name) for name in names} | changes)


def _frozen(
    layer: Any, kernel: Kernel, parts: Parts, path: ModelPath, found: list[tuple[tuple[int, ...], ScaledMatrix]]
) -> Any:
    """The layer with FP8 data and scales instead of its weight."""
    first = found[0][1]
    if any((matrix.block, matrix.data.dtype) != (first.block, first.data.dtype) for _, matrix in found):
        raise ValueError(f"the blocks of {path} have scales for blocks of different sizes; import it dequantized")
    data = np.empty((*parts.leading, *first.data.shape), np.uint8)
    scale = np.empty((*parts.leading, *first.scale.shape), np.uint32)
    with_input = all(matrix.input_scale is not None for _, matrix in found)
    inputs = np.empty(parts.leading, np.uint32) if with_input else None
    for index, matrix in found:
        data[index] = matrix.data.view(np.uint8)
        scale[index] = np.ascontiguousarray(matrix.scale, np.float32).view(np.uint32)
        if inputs is not None:
            inputs[index] = np.float32(matrix.input_scale).view(np.uint32)
    axes = _leading_axes(kernel, parts, path)

    def named(array: np.ndarray, *last: str) -> Any:
        if axes is None:
            return parts.sharded_like(array, kernel.weight)
        sizes = array.shape[array.ndim - len(last) :] if last else ()
        all_axes = (*axes, *(hax.Axis(name, size) for name, size in zip(last, sizes, strict=True)))
        template = hax.named(np.zeros([axis.size for axis in all_axes], bool), all_axes)
        return jax.tree.unflatten(jax.tree.structure(template), [parts.sharded_like(array, kernel.weight)])

    bits = FrozenKernel(
        named(data, "fp8_out", "fp8_in"),
        named(scale, "fp8_rows", "fp8_columns"),
        None if inputs is None else named(inputs),
        first.data.dtype,
        first.block,
    )
    match layer:
        case hnn.Linear():
            fields: tuple[Any, ...] = (None, layer.bias, layer.In, layer.Out, layer.dot_general, layer._reparam_cls)
            return FrozenLinear(*fields, kernel=bits)
        case hnn.MoELinear():
            fields = (None, layer.bias, layer.Experts, layer.In, layer.Out)
            return FrozenMoELinear(*fields, use_gmm=layer.use_gmm, kernel=bits)
        case eqx.nn.Linear():
            return FrozenEquinoxLinear(layer, bits)
    raise ValueError(
        f"{path} is a {type(layer).__name__}, which has no frozen form; import it with weights='dequantized', "
        "or leave it in high precision in the checkpoint"
    )


def _leading_axes(kernel: Kernel, parts: Parts, path: ModelPath) -> tuple[hax.Axis, ...] | None:
    """The named axes in front of the matrices; None for plain arrays."""
    if not isinstance(kernel.weight, hax.NamedArray):
        return None
    stack = [axis for axis, block in zip(path.stack, parts.blocks, strict=True) if block is not None]
    return (*stack, *(() if kernel.Experts is None else axes_of(kernel.Experts)))
