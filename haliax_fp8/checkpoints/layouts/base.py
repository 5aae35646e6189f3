"""The interface of layouts, and how one layer is read whatever its layout is."""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..scaled_matrix import ScaledMatrix


FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT32, UINT8 = np.dtype(np.float32), np.dtype(np.uint8)

# Other names that a layer's scales have, the usual one first.
WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
INPUT_SCALES = ("input_scale", "activation_scale")


@dataclasses.dataclass(frozen=True)
class AbstractLayout(abc.ABC):
    """How FP8 weights are written: their blocks, the tensors beside them, and the configuration that says so."""

    @property
    @abc.abstractmethod
    def is_static(self) -> bool:
        """Whether each layer has a scale for its input."""

    @abc.abstractmethod
    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The blocks of a kernel that share a scale.

        Args:
            shape: `[out, in]`.
        """

    @abc.abstractmethod
    def config_files(
        self, ignore: Sequence[str], *, cached: bool = False
    ) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
        """What `config.json` gets, and the content of other files.

        Args:
            ignore: The linear layers that stay in high precision.
            cached: Whether there are scales of keys and values, for engines that keep those in FP8.
        """

    @property
    def cache_scales(self) -> tuple[str, str] | None:
        """The names of the scales of keys and values, after that of their attention; None if it has none."""
        return None

    @property
    def scale_name(self) -> str:
        """The name of a weight's scales."""
        return WEIGHT_SCALES[0]

    @property
    def is_microscaled(self) -> bool:
        """Whether scales are exponents in bytes."""
        return False

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """The shape of the scales' tensor.

        Args:
            shape: The shape of the kernel.
        """
        return tuple(-(-size // b) for size, b in zip(shape, self.block(shape), strict=True))

    def tensors(self, shape: tuple[int, int]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """The tensors of a layer: by the last part of their names, dtype and shape.

        Args:
            shape: The shape of its kernel.
        """
        scale = UINT8 if self.is_microscaled else FLOAT32
        found: dict[str, tuple[np.dtype, tuple[int, ...]]] = {"weight": (FP8, shape)}
        found[self.scale_name] = scale, self.scale_shape(shape)
        return found | ({INPUT_SCALES[0]: (FLOAT32, (1,))} if self.is_static else {})

    def encode(self, matrix: ScaledMatrix) -> dict[str, np.ndarray]:
        """A layer's tensors.

        Args:
            matrix: Its kernel.
        """
        scale = matrix.scale
        if self.is_microscaled:
            scale = (np.ascontiguousarray(scale).view(np.uint32) >> 23).astype(np.uint8)
        shape = matrix.data.shape[0], matrix.data.shape[1]
        found = {"weight": matrix.data, self.scale_name: scale.reshape(self.scale_shape(shape))}
        if self.is_static:
            found[INPUT_SCALES[0]] = np.array([matrix.input_scale], np.float32)
        return found


def require_elements(weight: str, shape: tuple[int, ...]) -> None:
    """Raises a ValueError if a weight that is to be quantized has no elements: no scale would follow from them.

    Args:
        weight: Its name.
        shape: Its shape.
    """
    if 0 in shape:
        raise ValueError(f"{weight} has shape {shape}: it has no elements, and so no scale; leave it out")


def decode(layer: str, tensors: Mapping[str, np.ndarray], block_size: tuple[int, int] | None) -> ScaledMatrix:
    """The FP8 data and scales of a layer, whichever layout wrote them.

    Scales may have the shapes `[]`, `[1]`, `[out]`, `[out, 1]` or one for each block, in float32, bfloat16 or float16,
    or be exponents in bytes (E8M0).

    Args:
        layer: The layer's name, for errors.
        tensors: Its tensors, by the last part of their names.
        block_size: The blocks that the configuration names; blocks may be cut by the edge.

    Raises:
        ValueError: If a scale is missing, not positive and finite, or does not fit; each names the tensor.
    """
    data = tensors["weight"]
    name = next((name for name in WEIGHT_SCALES if name in tensors), None)
    if name is None:
        raise ValueError(f"{layer}.weight is in {data.dtype} and has no {' or '.join(WEIGHT_SCALES)}")
    if data.ndim != 2:
        raise ValueError(f"{layer}.weight has shape {data.shape}; FP8 weights have two axes, [out, in]")
    scale = _values(f"{layer}.{name}", tensors[name])
    shape = data.shape[0], data.shape[1]
    scale, block = _as_blocks(f"{layer}.{name}", scale, shape, block_size)
    given = next((tensors[name] for name in INPUT_SCALES if name in tensors), None)
    input_scale = None
    if given is not None:
        values = _values(f"{layer}.input_scale", given)
        if values.size != 1:
            raise ValueError(f"{layer}.input_scale has shape {values.shape}; a static input has one scale")
        input_scale = float(values.reshape(()))
    return ScaledMatrix(data, scale, block, "checkpoint", input_scale)


def _values(name: str, scale: np.ndarray) -> np.ndarray:
    if scale.dtype == UINT8 or scale.dtype == np.dtype(ml_dtypes.float8_e8m0fnu):
        exponents = scale.view(np.uint8).astype(np.uint32)
        if (exponents == 255).any():
            raise ValueError(f"{name} holds a NaN (255 in E8M0)")
        # 0 means 2**-127, which is subnormal in float32.
        return (
            np.where(exponents == 0, np.uint32(0x00400000), exponents << np.uint32(23))
            .astype(np.uint32)
            .view(np.float32)
        )
    if scale.dtype.kind not in "fV" or scale.dtype.itemsize < 2:
        raise ValueError(f"{name} is in {scale.dtype}, which is not a dtype of scales")
    values = scale.astype(np.float32)
    if (wrong := ~(np.isfinite(values) & (values > 0))).any():
        raise ValueError(f"{name} holds a scale that is not positive and finite: {values[wrong].ravel()[:1]}")
    return values


def _as_blocks(
    name: str, scale: np.ndarray, shape: tuple[int, int], block_size: tuple[int, int] | None
) -> tuple[np.ndarray, tuple[int, int]]:
    if scale.size == 1 and (block_size is None or math.prod(shape) == 1 or scale.ndim < 2):
        return scale.reshape(1, 1), shape
    if scale.shape in ((shape[0],), (shape[0], 1)) and (block_size is None or scale.ndim == 1):
        return scale.reshape(-1, 1), (1, shape[1])
    if block_size is not None:
        block = block_size[0] or shape[0], block_size[1] or shape[1]
        if scale.shape == tuple(-(-size // b) for size, b in zip(shape, block, strict=True)):
            return scale, block
    elif scale.ndim == 2 and scale.shape[0] == shape[0] and shape[1] % 32 == 0 and scale.shape[1] == shape[1] // 32:
        return scale, (1, 32)
    raise ValueError(
        f"{name} has shape {scale.shape}, which fits no kernel of shape {shape}"
        + (f" in blocks of {block_size}" if block_size else "; the configuration names no blocks")
    )
