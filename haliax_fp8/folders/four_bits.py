"""Weights in four bits, E2M1: folders hold two codes in a byte, and scales in one level or two.

`presented` shows them as one code for each element beside float32 scales, by the usual names. What reads FP8 data and
their scales (check, import, frozen layers, conversion) then reads these too.
"""

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from .header import Stored
from .scaled_matrix import Unit


E2M1, E4M3 = np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.float8_e4m3fn)
_E8M0, _FLOAT32 = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(np.float32)

# Both codes of each byte: the lower half comes first.
_BYTES = np.arange(256, dtype=np.uint8)
_PAIRS = np.stack([_BYTES & 15, _BYTES >> 4], axis=1).reshape(-1).view(np.uint16)


def unpacked(bytes: np.ndarray) -> np.ndarray:
    """The codes in E2M1, one in each byte: `[..., n]` bytes hold `[..., 2 n]`."""
    codes = _PAIRS[np.ascontiguousarray(bytes).view(np.uint8)]
    return codes.view(np.uint8).reshape(*bytes.shape[:-1], 2 * bytes.shape[-1]).view(E2M1)


def packed(data: np.ndarray) -> np.ndarray:
    """The inverse of `unpacked`: `[..., 2 n]` codes as `[..., n]` bytes."""
    codes = np.ascontiguousarray(data).view(np.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


@dataclasses.dataclass(frozen=True)
class FourBits(Stored):
    """A weight in four bits, presented as codes of E2M1, `[..., out, in]`.

    Args:
        packed: Where its bytes are.
    """

    packed: Stored

    @staticmethod
    def of(packed: Stored, rank: int) -> "FourBits":
        """A weight of so many axes; further ones at the end of its bytes are joined, as in gpt-oss."""
        front, rest = packed.shape[: rank - 1], packed.shape[rank - 1 :]
        shape = (*front, 2 * int(np.prod(rest)))
        place = (packed.file, packed.name, packed.type, shape, packed.offset, packed.bytes)
        return FourBits(*place, E2M1, True, E2M1.name, packed)

    @property
    def parts(self) -> tuple[Stored, ...]:
        return (self.packed,)

    def array(self, index: tuple[int, ...] = ()) -> np.ndarray:
        shape = self.shape[len(index) :]
        return unpacked(self.packed.array(index).reshape(*shape[:-1], shape[-1] // 2))


@dataclasses.dataclass(frozen=True)
class TwoLevels(Stored):
    """E4M3 scales of blocks and one of the tensor, presented as float32 scales.

    Args:
        blocks: Where the scales of blocks are.
        tensor: Where that of the tensor is; None if it is missing.
        tensor_name: Its name.
        divides: Whether it divides, as in compressed-tensors, or multiplies, as in ModelOpt.
    """

    blocks: Stored
    tensor: Stored | None
    tensor_name: str
    divides: bool

    @staticmethod
    def of(blocks: Stored, tensor: Stored | None, tensor_name: str, *, divides: bool) -> "TwoLevels":
        """Scales of which the files have these two."""
        size = blocks.bytes + (0 if tensor is None else tensor.bytes)
        place = (blocks.file, blocks.name, blocks.type, blocks.shape, blocks.offset, size)
        return TwoLevels(*place, _FLOAT32, blocks.is_known, _FLOAT32.name, blocks, tensor, tensor_name, divides)

    @property
    def parts(self) -> tuple[Stored, ...]:
        return (self.blocks,) if self.tensor is None else (self.blocks, self.tensor)

    def array(self, index: tuple[int, ...] = ()) -> np.ndarray:
        blocks = self.blocks.array(index).astype(np.float32)
        return blocks if self.tensor is None else self.unit(index).scales(blocks)

    def unit(self, index: tuple[int, ...] = ()) -> Unit:
        """The scale of the tensor."""
        assert self.tensor is not None
        value = self.tensor.array().astype(np.float32)
        if value.size > 1:  # One for each expert.
            value = value.reshape(*self.blocks.shape[:-2], 1, 1)[index]
        return Unit(value if value.size > 1 else value.reshape(()), self.divides)


@dataclasses.dataclass(frozen=True)
class Reciprocal(Stored):
    """A scale that divides, presented as the one that multiplies; in float64, so that its reciprocal has the same bits.

    Args:
        divisor: Where it is.
    """

    divisor: Stored

    @staticmethod
    def of(divisor: Stored) -> "Reciprocal":
        """The scale of an input."""
        return Reciprocal(**{f.name: getattr(divisor, f.name) for f in dataclasses.fields(Stored)}, divisor=divisor)

    @property
    def parts(self) -> tuple[Stored, ...]:
        return (self.divisor,)

    def array(self, index: tuple[int, ...] = ()) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return 1.0 / self.divisor.array(index).astype(np.float64)


def presented(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of a folder, those of weights in four bits as described above. Knows the names of

    - compressed-tensors: `weight_packed`, `weight_scale`, and for NVFP4 `weight_global_scale`, `input_global_scale`;
    - ModelOpt: `weight` in bytes, `weight_scale` in E4M3 and `weight_scale_2`;
    - gpt-oss: `*_blocks` `[experts, out, blocks, 16]` and `*_scales` `[experts, out, blocks]`;
    - DeepSeek-V4: `weight` in bytes beside `scale` in E8M0, and `scale` beside weights in E4M3.

    Bytes without scales of their own are whole numbers, and stay so.

    Args:
        tensors: Where each is.
    """
    by_name = dict(tensors)
    for name, stored in tensors.items():
        layer, dot, last = name.rpartition(".")
        of = lambda part, layer=layer, dot=dot: f"{layer}{dot}{part}"
        scale = tensors.get(of("weight_scale"))
        if last == "weight_packed" and stored.type == "U8" and stored.shape:
            del by_name[name]
            by_name[of("weight")] = FourBits.of(stored, len(stored.shape))
            unit, inputs = of("weight_global_scale"), by_name.pop(of("input_global_scale"), None)
            if scale is not None and (unit in tensors or scale.dtype == E4M3):
                by_name[scale.name] = TwoLevels.of(scale, by_name.pop(unit, None), unit, divides=True)
            if inputs is not None:
                by_name[of("input_scale")] = Reciprocal.of(inputs)
        elif last == "weight" and stored.type in ("U8", "I8") and stored.shape:
            unit, exponents = of("weight_scale_2"), tensors.get(of("scale"))
            if scale is not None and (unit in tensors or scale.dtype == E4M3):
                by_name[name] = FourBits.of(stored, len(stored.shape))
                by_name[scale.name] = TwoLevels.of(scale, by_name.pop(unit, None), unit, divides=False)
            elif any(x is not None and x.dtype == _E8M0 for x in (exponents, tensors.get(of("weight_scale_inv")))):
                by_name[name] = FourBits.of(stored, len(stored.shape))
        elif last.endswith("_blocks") and len(stored.shape) == 4 and f"{name[:-7]}_scales" in tensors:
            del by_name[name]
            by_name[f"{name[:-7]}.weight"] = FourBits.of(stored, 3)
            by_name[f"{name[:-7]}.weight_scale"] = by_name.pop(f"{name[:-7]}_scales")
    for name in [name for name in by_name if name.endswith(".scale")]:
        weight = by_name.get(f"{name[:-6]}.weight")
        if weight is not None and weight.dtype in (E4M3, E2M1):
            by_name[f"{name[:-6]}.weight_scale_inv"] = by_name.pop(name)
    return by_name
