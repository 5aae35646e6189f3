"""What an export reads: each matrix and each other array of a model, by name, without copying any."""

import dataclasses
import itertools
from typing import Any

import haliax as hax
import haliax.nn as hnn
import numpy as np

from ..._numerics.formats import E4M3
from ..._op import Fp8DotGeneral
from ...attention.op import Fp8Attention
from ...layers.only_if_named import OnlyIfNamed
from ...layers.patterns import Pattern, matches
from ...layers.router import routers
from ...layers.rule import LayerRule
from ...layers.served import AbstractServedLayer
from ...layers.uncalibrated import unrecorded_operands
from ...recipes.recipe import OperandName
from ...recipes.scaling import AbstractScaling
from ..frozen import is_frozen
from ..scaled_matrix import ScaledMatrix
from .cache_scale import CacheScale
from .matrices import Parts, of_array, of_kernel, plain
from .served_matrices import ServedMatrices
from .tree import ModelPath, is_array, visit


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One kernel of a model.

    Args:
        name: The name of its layer in the state dict, numbers filled in.
        array: The layer's weight; None if its values are in FP8 for good.
        parts: Where the matrices of the layer lie in it.
        index: Which of them this is.
        factor: What the layer multiplies its weight by.
        op: The op of its products; None if it has none.
        frozen: The layer itself, if its values are in FP8.
        quantizable: Whether a layout with FP8 weights quantizes it.
    """

    name: str
    array: Any
    parts: Parts
    index: tuple[int, ...]
    factor: float
    op: Fp8DotGeneral | None
    frozen: Any
    quantizable: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the kernel, `[out, in]`."""
        return self.parts.shape[0], self.parts.shape[1]

    def values(self, dtype: np.dtype | None) -> np.ndarray:
        """The kernel as a layer that computes in a dtype hands it to its product, `[out, in]`.

        Args:
            dtype: The dtype; None for the array's own. The op's, if it has one, decides.
        """
        values = self.parts.read(self.array, self.index)
        if self.factor != 1.0:
            values = (values * np.asarray(self.factor, values.dtype)).astype(values.dtype)
        dtype = self.op.compute_dtype if self.op is not None and self.op.compute_dtype is not None else dtype
        return values if dtype is None else values.astype(dtype)

    def frozen_values(self) -> ScaledMatrix:
        """The data and scales of a layer whose weight is in FP8."""
        if isinstance(self.frozen, AbstractServedLayer):
            return ServedMatrices.of(self.frozen).matrix(self.index)
        kernel = self.frozen.kernel
        data, scale = (np.asarray(plain(x))[self.index] for x in (kernel.data, kernel.scale))
        return ScaledMatrix(
            data.view(kernel.format), scale.view(np.float32), kernel.block, "FP8 in the model", self.input_scale
        )

    @property
    def frozen_dtype(self) -> np.dtype | None:
        """The dtype of the data, if the layer's weight is in FP8."""
        if self.frozen is None:
            return None
        kernel = self.frozen.kernel
        return np.dtype(kernel.scheme.format.dtype if isinstance(self.frozen, AbstractServedLayer) else kernel.format)

    @property
    def scaling(self) -> AbstractScaling | None:
        """The kernel's scaling in training; None if there is none that an export in E4M3 can have."""
        if self.op is None:
            return None
        quantization = self.op.recipe.quantization["kernel", "fprop"]
        return quantization.scaling if quantization.format == E4M3 and quantization.scaling.quantizes else None

    @property
    def stored_scale(self) -> float | None:
        """The scale that the next step quantizes the kernel with, if the state has it."""
        return self._stored("kernel") if self.scaling is not None and self.scaling.stores_scale else None

    @property
    def input_scale(self) -> float | None:
        """The scale that the next step quantizes the input with, if the state has it; or that of a frozen layer."""
        if isinstance(self.frozen, AbstractServedLayer):
            return self.frozen_values().input_scale
        if self.frozen is not None:
            scale = self.frozen.kernel.input_scale
            if scale is None:
                return None
            scale = np.asarray(plain(scale))
            return float(scale[self.index[: scale.ndim]].view(np.float32))
        if self.op is None:
            return None
        quantization = self.op.recipe.quantization["input", "fprop"]
        if quantization.format != E4M3 or not quantization.scaling.stores_scale:
            return None
        return self._stored("input")

    def _stored(self, operand: OperandName) -> float:
        assert self.op is not None
        if operand in unrecorded_operands(self.op.state):
            without = {
                "kernel": "training_scales=False computes the scales of kernels from the weights",
                "input": "'FP8_DYNAMIC' needs no scale of inputs",
            }
            raise ValueError(
                f"the state of {self.name} has no scale of its {operand} yet, as before the first step. Calibrate the "
                f"model, model = calibrate(model, loss_fn, batches), or train a step; or else {without[operand]}"
            )
        scale = np.asarray(self.op.scale(operand))
        return float(scale[self.index[: scale.ndim]])


@dataclasses.dataclass(frozen=True)
class Other:
    """Any other array of a model, or a part of it.

    Args:
        name: Its name in the state dict, numbers filled in.
        array: The array.
        parts: Where its parts lie in it.
        index: Which of them this is.
    """

    name: str
    array: Any
    parts: Parts
    index: tuple[int, ...]

    def values(self, dtype: np.dtype | None) -> np.ndarray:
        """The part; floating-point ones in a dtype, if one is given."""
        values = self.parts.read(self.array, self.index)
        is_float = values.dtype.kind == "f" or values.dtype.name.startswith(("bfloat", "float"))
        return values.astype(dtype) if dtype is not None and is_float else values


@dataclasses.dataclass(frozen=True)
class Collected:
    """All that a model holds.

    Args:
        matrices: The kernels of its layers.
        others: The rest.
        caches: The attentions that know the scales of keys and values.
    """

    matrices: list[Matrix]
    others: list[Other]
    caches: list[CacheScale]


def collect(
    model: Any, rules: tuple[LayerRule, ...], *, targets: tuple[Pattern, ...] | None, exclude: tuple[Pattern, ...]
) -> Collected:
    """The matrices and arrays of a model.

    Args:
        model: The model.
        rules: The rules of the layer classes.
        targets: The layers to quantize, by their names in the state dict with `*` for the numbers of blocks; None for
            those that have an op, or for all but routers and embeddings if none has.
        exclude: The layers to leave in high precision.
    """
    found = _Collector([], [], [])
    visit(model, found, rules)
    any_fp8 = any(layer.op is not None or is_in_fp8(layer.layer) for layer in found.layers)
    kernels = {str(layer.path): layer.rule.kernel(layer.layer) for layer in found.layers if not is_in_fp8(layer.layer)}
    are_routers = routers(kernels)
    matrices, others = [], list(found.others)
    for layer in found.layers:
        path = str(layer.path)
        named = targets is not None and any(matches(pattern, path, layer.layer) for pattern in targets)
        if targets is None:
            only_if_named = path in are_routers or isinstance(layer.rule.refusal(layer.layer), OnlyIfNamed)
            named = layer.op is not None or is_in_fp8(layer.layer) if any_fp8 else not only_if_named
        left = any(matches(pattern, path, layer.layer) for pattern in exclude)
        # An embedding is read by rows too: its table stays as it is.
        quantizable = named and not left and not isinstance(layer.layer, hnn.Embedding)
        matrices += layer.matrices(quantizable=quantizable)
    return Collected(matrices, others, found.caches)


@dataclasses.dataclass(frozen=True)
class _Layer:
    layer: Any
    rule: LayerRule
    path: ModelPath

    @property
    def op(self) -> Fp8DotGeneral | None:
        return None if is_in_fp8(self.layer) else self.rule.op(self.layer)

    def matrices(self, *, quantizable: bool) -> list[Matrix]:
        if is_in_fp8(self.layer):
            if isinstance(self.layer, AbstractServedLayer):
                parts = ServedMatrices.of(self.layer).parts(self.path)
            else:
                parts = _parts_of_data(self.layer.kernel.data, self.path)
            names = parts.named(self.path)
            return [Matrix(name, None, parts, index, 1.0, None, self.layer, quantizable) for name, index in names]
        kernel = self.rule.kernel(self.layer)
        parts, array = of_kernel(kernel, self.path), plain(kernel.weight)
        return [
            Matrix(name, array, parts, index, kernel.factor, self.op, None, quantizable)
            for name, index in parts.named(self.path)
        ]


@dataclasses.dataclass(frozen=True)
class _Collector:
    layers: list[_Layer]
    others: list[Other]
    caches: list[CacheScale]

    def attention(self, op: Fp8Attention, path: ModelPath) -> Any:
        for blocks in itertools.product(*(range(axis.size) for axis in path.stack)):
            # The engine's attention is what holds the projections.
            self.caches.append(CacheScale(path.name(blocks).rpartition(".")[0], op, blocks))
        return op

    def layer(self, layer: Any, rule: LayerRule, path: ModelPath) -> Any:
        self.layers.append(_Layer(layer, rule, path))
        for name, array, parts in other_arrays(layer, rule, path):
            named = parts.named(path)
            self.others.extend(Other(f"{layer_name}.{name}", plain(array), parts, i) for layer_name, i in named)
        return layer

    def array(self, array: Any, owner: Any, path: ModelPath) -> Any:
        parts = of_array(array, path, flat=is_norm(owner))
        self.others.extend(Other(name, plain(array), parts, index) for name, index in parts.named(path))
        return array


def is_in_fp8(layer: Any) -> bool:
    """Whether the weight of a layer is FP8 data and scales, frozen or for inference."""
    return is_frozen(layer) or isinstance(layer, AbstractServedLayer)


def is_norm(owner: Any) -> bool:
    """Whether the arrays of a module are vectors in a checkpoint, whatever axes they have."""
    return isinstance(owner, hnn.LayerNorm | hnn.RmsNorm)


def other_arrays(layer: Any, rule: LayerRule, path: ModelPath) -> list[tuple[str, Any, Parts]]:
    """The arrays of a layer other than its weight, such as its bias: the field, the array and where its parts lie.

    Args:
        layer: The layer.
        rule: Its rule.
        path: Where it is.
    """
    weight = None if is_in_fp8(layer) else rule.kernel(layer).weight
    found = []
    for field in dataclasses.fields(layer):
        value: Any = getattr(layer, field.name, None)
        if not field.metadata.get("static", False) and is_array(value) and value is not weight:
            members = 0 if isinstance(value, hax.NamedArray) else max(0, value.ndim - 1 - len(path.stack))
            found.append((field.name, value, of_array(value, path, members=members, flat=True)))
    return found


def _parts_of_data(data: Any, path: ModelPath) -> Parts:
    """Where each matrix of FP8 data lies; the last two axes are those of a matrix."""
    array = plain(data)
    n = array.ndim - 2
    if isinstance(data, hax.NamedArray):
        names, members = data.axis_names, array.ndim - len(data.axis_names)
        blocks = tuple(members + names.index(a.name) if a.name in names else None for a in path.stack)
    else:
        members = n - len(path.stack)
        blocks = tuple(members + i for i in range(len(path.stack)))
    return Parts(tuple(range(array.ndim)), array.shape[:n], blocks, array.shape[n:], array.shape[n:])
