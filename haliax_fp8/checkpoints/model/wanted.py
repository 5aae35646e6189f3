"""The tensors of a checkpoint as a model wants them: by the model's names, in its shapes."""

import dataclasses
import math
from typing import Any

import numpy as np

from ..._numerics.nearest import nearest
from ...layers.rule import LayerRule
from ...layers.tensor_names import JOINED
from ..names import NameMap
from ..scaled_matrix import ScaledMatrix
from .collected import collect
from .folder_tensors import FolderTensors


_HEAD, _EMBEDDING = "lm_head", "embed_tokens"

# What a model need not have: tables that follow from the configuration, and scales of caches.
_DERIVED = ("rotary_emb.inv_freq", ".k_scale", ".v_scale", ".q_scale", ".prob_scale")


@dataclasses.dataclass(frozen=True)
class Found:
    """The matrix of a layer in a checkpoint.

    Args:
        name: The layer's name in the checkpoint.
        values: Its FP8 data and scales, or its values.
    """

    name: str
    values: ScaledMatrix | np.ndarray

    @property
    def is_quantized(self) -> bool:
        """Whether it is in FP8."""
        return isinstance(self.values, ScaledMatrix)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix."""
        return (self.values.data if isinstance(self.values, ScaledMatrix) else self.values).shape

    def dense(self) -> np.ndarray:
        """`data * scale` in float32, or the values."""
        return self.values.dequantized() if isinstance(self.values, ScaledMatrix) else self.values

    def scaled(self) -> ScaledMatrix:
        """The FP8 data and scales."""
        if not isinstance(self.values, ScaledMatrix):
            raise ValueError(
                f"{self.name} is in {self.values.dtype}, but in FP8 in other blocks or experts; import the checkpoint "
                "dequantized, or into a model without stacks"
            )
        return self.values

    def rows(self, start: int, stop: int) -> "Found":
        """The rows of some of its outputs."""
        if not isinstance(self.values, ScaledMatrix):
            return Found(self.name, self.values[start:stop])
        matrix = self.values
        (height, width), scale = matrix.block, matrix.scale
        if start % height or (stop % height and stop != matrix.data.shape[0]):
            # Blocks that lie across the edge: a scale for each row, the same numbers.
            scale = np.repeat(scale, height, axis=0)[: matrix.data.shape[0]]
            height = 1
        part = scale[start // height : -(-stop // height)]
        return Found(
            self.name, dataclasses.replace(matrix, data=matrix.data[start:stop], scale=part, block=(height, width))
        )


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a model wants of a checkpoint.

    Args:
        tensors: The checkpoint's tensors.
        names: From the model's names to the checkpoint's.
        outputs: The number of outputs of each layer of the model, by the checkpoint's names.
        available: The checkpoint's names.
        used: The names that were read.
    """

    tensors: FolderTensors
    names: NameMap
    outputs: dict[str, int]
    available: frozenset[str]
    used: set[str]

    @staticmethod
    def of(tensors: FolderTensors, names: NameMap, model: Any, rules: tuple[LayerRule, ...]) -> "Wanted":
        """Nothing read yet.

        Args:
            tensors: The checkpoint's tensors.
            names: From the model's names to the checkpoint's.
            model: The model.
            rules: The rules of its layer classes.
        """
        matrices = collect(model, rules, targets=None, exclude=()).matrices
        outputs = {names.to_checkpoint(matrix.name): matrix.shape[0] for matrix in matrices}
        return Wanted(tensors, names, outputs, frozenset(tensors.names), set())

    def matrix(self, name: str, shape: tuple[int, ...]) -> Found:
        """The matrix of a layer, `[out, in]`.

        Args:
            name: The layer's name in the model.
            shape: Its shape there.

        Raises:
            ValueError: If there is none, or it has another shape.
        """
        layer = self.names.to_checkpoint(name)
        found = self._found(layer, "weight")
        _require_shape(f"{found.name}.weight", found.shape, name, shape)
        return found

    def array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Any other array.

        Args:
            name: Its name in the model.
            shape: Its shape there.

        Raises:
            ValueError: If there is none, or it has another shape.
        """
        layer, _, field = self.names.to_checkpoint(name).rpartition(".")
        values = self._found(layer, field).dense() if layer else self._read("", field).dense()
        _require_shape(self.names.to_checkpoint(name), values.shape, name, shape)
        return values

    def unused(self) -> list[str]:
        """The checkpoint's tensors that nothing read."""
        rest = [name for name in self.tensors.names if name not in self.used and not name.endswith(_DERIVED)]
        tied = f"{_HEAD}.weight"
        if tied in rest and self.tensors.ties_head:
            embedding = next((name for name in self.used if name.endswith(f"{_EMBEDDING}.weight")), None)
            if embedding and np.array_equal(self.tensors.folder[tied], self.tensors.folder[embedding]):
                rest.remove(tied)
        return rest

    def _found(self, layer: str, field: str) -> Found:
        if f"{layer}.{field}" in self.available:
            return self._read(layer, field)
        parent, _, last = layer.rpartition(".")
        for fused, parts in JOINED.items():
            whole = f"{parent}.{fused}" if parent else fused
            if last in parts and f"{whole}.{field}" in self.available:
                sizes = [self.outputs.get(f"{parent}.{part}" if parent else part) for part in parts]
                if None in sizes:
                    raise ValueError(
                        f"{whole} holds {', '.join(parts)}, and the model lacks some of them; join its layers"
                    )
                start = sum(size for size in sizes[: parts.index(last)] if size)
                found = self._read(whole, field)
                total = sum(size for size in sizes if size)
                _require_shape(f"{whole}.{field}", found.shape[:1], f"{', '.join(parts)} of {parent}", (total,))
                return found.rows(start, start + self.outputs[layer])
        if last == _HEAD and field == "weight" and self.tensors.ties_head:
            embedding = next((name for name in self.available if name.endswith(f"{_EMBEDDING}.weight")), None)
            if embedding is not None:
                return self._read(embedding.removesuffix(".weight"), "weight")
        near = nearest(f"{layer}.{field}", self.tensors.names, 3)
        raise ValueError(
            f"the checkpoint has no {layer}.{field}; the nearest are {', '.join(near) or 'none'}. If it has the tensor "
            "under another name, map it with names=..."
        )

    def _read(self, layer: str, field: str) -> Found:
        name = f"{layer}.{field}" if layer else field
        if name not in self.available:
            raise ValueError(f"the checkpoint has no {name}; map it with names=...")
        self.used.add(name)
        kernel = self.tensors.kernel(layer) if field == "weight" else None
        return Found(layer, self.tensors.array(name) if kernel is None else kernel)


def _require_shape(name: str, found: tuple[int, ...], ours: str, shape: tuple[int, ...]) -> None:
    if tuple(found) != tuple(shape):
        # Haliax's layers may have several axes; a checkpoint's vector is the same numbers.
        hint = "; it is transposed" if tuple(found) == tuple(shape)[::-1] and len(shape) == 2 else ""
        raise ValueError(
            f"{name} has shape {tuple(found)}, and {ours} of the model {tuple(shape)}{hint}; "
            f"{math.prod(found)} and {math.prod(shape)} numbers. Build the model with the sizes of config.json"
        )
