"""FolderTensors: what a model is imported from."""

import dataclasses
import os

import numpy as np

from ..check import is_fp8
from ..files import TensorFolder
from ..layout import E4M3, SCALES, Inputs, Layout, decode, read_layout
from ..scaled_matrix import ScaledMatrix


@dataclasses.dataclass(frozen=True)
class FolderTensors:
    """The tensors of a folder, by the checkpoint's names.

    Args:
        folder: The folder.
        quantization: What its configuration says; None if nothing is quantized.
    """

    folder: TensorFolder
    quantization: Layout | None

    @staticmethod
    def open(directory: str | os.PathLike[str]) -> "FolderTensors":
        """Reads headers and configuration.

        Args:
            directory: The folder.

        Raises:
            ValueError: As in `TensorFolder.open`; or if an FP8 weight has no scale.
        """
        folder = TensorFolder.open(directory)
        quantization = read_layout(folder)
        for name, stored in folder.tensors.items():
            if stored.dtype == E4M3 and name.endswith(".weight") and quantization is None:
                raise ValueError(f"{name} is in FP8, and config.json of {folder.directory} has no quantization_config")
        return FolderTensors(folder, quantization)

    @property
    def names(self) -> list[str]:
        """The names of all tensors except scales."""
        return [name for name in self.folder.tensors if name.rpartition(".")[2] not in SCALES]

    @property
    def ties_head(self) -> bool:
        """Whether the configuration says that the head is the embedding."""
        return bool(self.folder.config.get("tie_word_embeddings"))

    @property
    def inputs(self) -> Inputs | None:
        """How the inputs of layers in FP8 are quantized; None if they are not."""
        return None if self.quantization is None else self.quantization.inputs

    def kernel(self, layer: str) -> ScaledMatrix | None:
        """The FP8 data and scales of a layer; None if its weight is not in FP8.

        Args:
            layer: Its name.

        Raises:
            ValueError: If its weight is in another 8-bit float, or a scale is missing or wrong.
        """
        stored = self.folder.tensors.get(f"{layer}.weight")
        if stored is None or not is_fp8(stored):
            return None
        if stored.dtype != E4M3:
            raise ValueError(
                f"{layer}.weight is in {stored.shown}, but FP8 weights are read in {E4M3} alone; dequantize the "
                "checkpoint to bfloat16 with the library that wrote it, and import that"
            )
        block = None if self.quantization is None else self.quantization.size
        present = [name for name in ("weight", *SCALES) if f"{layer}.{name}" in self.folder.tensors]
        return decode(layer, {name: self.folder[f"{layer}.{name}"] for name in present}, block)

    def array(self, name: str) -> np.ndarray:
        """A tensor as it is.

        Args:
            name: Its name.

        Raises:
            ValueError: If it is in FP8: without scales, its data are not its numbers.
        """
        stored = self.folder.tensors.get(name)
        if stored is not None and is_fp8(stored):
            raise ValueError(
                f"{name} is in {stored.shown}, and only weights of layers have scales; dequantize the checkpoint to "
                "bfloat16 with the library that wrote it, and import that"
            )
        return self.folder[name]
