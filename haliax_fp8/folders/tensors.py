"""Tensor: one tensor of a checkpoint, read when it is asked for; exports, imports and conversions pass it on."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from .._tensor_names import SAME_INPUT
from ..layouts import Layout
from .checked import is_quantized
from .configuration import presented, read_layout
from .folder import TensorFolder, TensorSpec
from .four_bits import E2M1, TwoLevels
from .layout import E4M3, INPUT_BOUND, SCALES, WEIGHT_SCALES, arrays_of, decode, encode, layout_of_layer
from .scaled_matrix import ScaledMatrix


type Values = np.ndarray | ScaledMatrix


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint: one that a folder has, or that is made of a model.

    Args:
        name: Its name, with the numbers of blocks and experts.
        shape: Its shape; of a layer's weight `[out, in]`.
        dtype: Its dtype, or that of its FP8 data.
        read: Gives its values, or FP8 data and scales; of experts in one array of a folder, `read(index)` gives one.
        layout: The layout of its FP8 data and scales; None if it is stored as it is.
        op: The op of the layer's products in training, with its scales; None if it has none.
        layer: The layer itself, if its weight is in FP8 for good.
        index: Which of the op's or the layer's matrices it is.
        is_chosen: Whether it is the weight of a layer that a layout in FP8 quantizes.
        whole: The name of the array that it is a part of; empty if it is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[..., Values]
    layout: Layout | None = None
    op: Any = None
    layer: Any = None
    index: tuple[int, ...] = ()
    is_chosen: bool = False
    whole: str = ""

    @property
    def path(self) -> str:
        """The name of its layer."""
        return self.name.rpartition(".")[0]

    @property
    def is_weight(self) -> bool:
        """Whether it is called the weight of a layer."""
        return self.name.rpartition(".")[2] == "weight"

    @property
    def specs(self) -> list[TensorSpec]:
        """What is written: the tensor, or its data and scales; those of experts have their axis in front."""
        if self.layout is None:
            return [TensorSpec(self.name, self.dtype, self.shape)]
        front, (rows, columns) = self.shape[:-2], self.shape[-2:]
        arrays = arrays_of(self.layout, (rows, columns))
        name = lambda part: f"{self.path}.{part}".removeprefix(".")
        return [TensorSpec(name(part), dtype, (*front, *shape)) for part, (dtype, shape) in arrays.items()]

    def encoded(self, values: Values) -> list[np.ndarray]:
        """The arrays of `specs`, of what `read` gave."""
        if self.layout is None:
            assert isinstance(values, np.ndarray)
            return [values]
        assert isinstance(values, ScaledMatrix)
        return list(encode(self.layout, values).values())


def tensors_in(folder: TensorFolder) -> dict[str, Tensor]:
    """The tensors of a folder by name, weights in FP8 with their scales; none is read.

    Args:
        folder: The folder.

    Raises:
        ValueError: If an FP8 weight has no scale, or the configuration is broken.
        NotSupported: If the layout is not read here.
    """
    layout, folder = read_layout(folder), presented(folder)
    tensors = {}
    for name, stored in folder.tensors.items():
        if name.rpartition(".")[2] in (*SCALES, INPUT_BOUND):
            continue
        of_layer = None if layout is None else layout_of_layer(layout, name.rpartition(".")[0])
        tensor = Tensor(name, stored.shape, stored.dtype, functools.partial(_read, folder, of_layer, name))
        if tensor.is_weight and stored.dtype in (E4M3, E2M1) and layout is None:
            problem = f"{name} is in {stored.shown}, and config.json of {folder.directory} has no quantization_config"
            raise ValueError(problem)
        is_one = tensor.is_weight and is_quantized(stored)
        tensors[name] = dataclasses.replace(tensor, layout=of_layer) if is_one else tensor
    return tensors


def with_each_expert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, and beside each array of experts its parts: `experts.3.up_proj.weight` of `experts.up_proj.weight`.

    Args:
        tensors: Those of a folder.
    """
    with_parts = dict(tensors)
    for name, tensor in tensors.items():
        before, dot, after = name.partition(".experts.")
        if dot and len(tensor.shape) == 3:
            for i in range(tensor.shape[0]):
                part = f"{before}{dot}{i}.{after}"
                read = functools.partial(tensor.read, index=(i,))
                with_parts.setdefault(
                    part, dataclasses.replace(tensor, name=part, shape=tensor.shape[1:], read=read, whole=name)
                )
    return with_parts


def fused_with(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """The weights that engines make one with this, by its name; itself alone if they do not.

    Args:
        name: The weight's.
        names: Those of all tensors.
    """
    parent, dot, last = name.removesuffix(".weight").rpartition(".")
    groups = (
        [f"{parent}{dot}{part}.weight" for part in parts] for parts in (*SAME_INPUT, ("w1", "w3")) if last in parts
    )
    return tuple(other for other in next(groups, [name]) if other in names)


def _read(folder: TensorFolder, layout: Layout | None, name: str, index: tuple[int, ...] = ()) -> Values:
    stored, (layer, _, field) = folder.tensors[name], name.rpartition(".")
    if not is_quantized(stored):
        return stored.array(index)
    remedy = "dequantize the checkpoint to bfloat16 with the library that wrote it, and import that"
    if field != "weight":
        raise ValueError(f"{name} is in {stored.shown}, and only weights of layers have scales; {remedy}")
    if stored.dtype not in (E4M3, E2M1):
        raise ValueError(f"{name} is in {stored.shown}, but FP8 weights are read in {E4M3} alone; {remedy}")
    parts, unit = {}, None
    for part in ("weight", *SCALES):
        if (of_part := folder.tensors.get(f"{layer}.{part}".removeprefix("."))) is not None:
            is_each = of_part.shape[: len(index)] == stored.shape[: len(index)]
            parts[part] = of_part.array(index if is_each else ())
            if part in WEIGHT_SCALES and isinstance(of_part, TwoLevels) and of_part.tensor is not None:
                unit = of_part.unit(index)
    return decode(layer, parts, None if layout is None else layout.size, unit)
