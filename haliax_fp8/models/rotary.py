"""Rotary position embeddings, and how their frequencies are changed for longer sequences.

References:
    RoPE: arXiv:2104.09864; position interpolation: arXiv:2306.15595; YaRN: arXiv:2309.00071; LongRoPE:
    arXiv:2402.13753.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray


@dataclasses.dataclass(frozen=True)
class LinearRope:
    """RoPE's frequencies divided by a factor: positions are interpolated.

    Args:
        factor: How much longer sequences are than in pretraining.
    """

    factor: float

    def __call__(self, frequencies: Any) -> Any:
        """The scaled frequencies."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's frequencies: slow ones are divided by a factor, fast ones stay, and those between are blended.

    Args:
        factor: How much the slow ones are slowed down.
        low_frequency_factor: Wavelengths above `original_length` divided by this are slow.
        high_frequency_factor: Wavelengths below `original_length` divided by this are fast.
        original_length: The longest sequence of pretraining.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int

    def __call__(self, frequencies: Any) -> Any:
        """The scaled frequencies."""
        turns = self.original_length * frequencies / (2.0 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        unscaled = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (unscaled + (1.0 - unscaled) / self.factor)


@dataclasses.dataclass(frozen=True)
class YarnRope:
    """YaRN's frequencies: divided by a factor, but those that turn often in a sequence of pretraining.

    Args:
        factor: How much longer sequences are than in pretraining.
        original_length: The longest sequence of pretraining.
        attention_factor: What cosine and sine are multiplied by.
        beta_fast: From so many turns on, a frequency stays.
        beta_slow: Up to so many turns, it is divided.
        truncate: Whether the bounds between are rounded to whole frequencies.
    """

    factor: float
    original_length: int
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __call__(self, frequencies: Any) -> Any:
        """The scaled frequencies."""
        count = len(frequencies)
        log_ratio = -math.log(frequencies[1])  # Of each frequency to the next one, the first of which is 1.
        first_with = lambda turns: math.log(self.original_length / (turns * 2 * math.pi)) / log_ratio
        low, high = first_with(self.beta_fast), first_with(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * count - 1)
        divided = np.clip((np.arange(count) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return frequencies * (1.0 - divided + divided / self.factor)


@dataclasses.dataclass(frozen=True)
class LongRope:
    """LongRoPE's frequencies: each divided by a number of its own, and by another one in long sequences.

    Args:
        short_factor: The numbers for sequences as long as in pretraining.
        long_factor: Those for longer ones.
        original_length: The longest sequence of pretraining.
        attention_factor: What cosine and sine are multiplied by.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    attention_factor: float = 1.0

    def __call__(self, frequencies: Any, length: int) -> Any:
        """The scaled frequencies for sequences of a length."""
        return frequencies / np.array(self.long_factor if length > self.original_length else self.short_factor)


@dataclasses.dataclass(frozen=True)
class NtkRope:
    """Frequencies of a larger base, of which the fastest stays and the slowest is divided by a factor.

    Args:
        alpha: The factor.
    """

    alpha: float

    def __call__(self, frequencies: Any) -> Any:
        """The scaled frequencies."""
        count = len(frequencies)
        return frequencies * self.alpha ** (-np.arange(count) / (count - 1))


@dataclasses.dataclass(frozen=True)
class Rope:
    """How query and key are rotated in some of the layers.

    Args:
        theta: The base of the wavelengths; with None, nothing is rotated.
        scaling: Changes the frequencies, such as `Llama3Rope`.
    """

    theta: float | None
    scaling: Callable[..., Any] | None = None


def rotary_tables(
    Position: Axis, HeadDim: Axis, theta: float | None, scaling: Callable[..., Any] | None = None
) -> tuple[NamedArray, NamedArray]:
    """Cosine and sine of each position's angles, `position * theta**(-2i / head_dim)`.

    Args:
        Position: The positions.
        HeadDim: What is rotated of a head.
        theta: The base of the wavelengths; with None, all angles are zero.
        scaling: Changes the frequencies, such as `Llama3Rope`.

    Returns:
        Two float32 arrays `(Position, HeadDim)`; the second half of `HeadDim` repeats the first.
    """
    half = np.arange(HeadDim.size // 2)
    frequencies = np.zeros(half.size) if theta is None else theta ** (-2.0 * half / HeadDim.size)
    if isinstance(scaling, LongRope):
        frequencies = scaling(frequencies, Position.size)
    elif scaling is not None:
        frequencies = scaling(frequencies)
    angles = jnp.arange(Position.size, dtype=jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
    angles = hax.named(jnp.concatenate([angles, angles], axis=-1), (Position, HeadDim))
    factor = getattr(scaling, "attention_factor", 1.0)
    return (hax.cos(angles), hax.sin(angles)) if factor == 1.0 else (factor * hax.cos(angles), factor * hax.sin(angles))


def rotate(x: NamedArray, cos: NamedArray, sin: NamedArray, *, interleaved: bool = False) -> NamedArray:
    """Rotates each pair `(x[i], x[i + head_dim / 2])` by its position's angle.

    Args:
        x: The heads. If they are wider than the tables, the rest of each is not rotated.
        cos: From `rotary_tables`.
        sin: The same.
        interleaved: Whether pairs are `(x[2i], x[2i + 1])` instead.
    """
    HeadDim, Rotated = x.resolve_axis("head_dim"), cos.resolve_axis("head_dim")
    half, rest = Rotated.size // 2, None
    if Rotated.size < HeadDim.size:
        x, rest = x["head_dim", : Rotated.size], x["head_dim", Rotated.size :]
    if interleaved:
        Half, Pair = Axis("half", half), Axis("pair", 2)
        each = x.unflatten_axis("head_dim", (Half, Pair))
        first, second = each["pair", 0], each["pair", 1]
        cos, sin = (table["head_dim", :half].rename({"head_dim": "half"}) for table in (cos, sin))
        cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
        pairs = hax.stack(Pair, [first * cos - second * sin, second * cos + first * sin])
        rotated = pairs.rearrange((..., "half", "pair")).flatten_axes(("half", "pair"), Rotated)
        rotated = rotated.rearrange(x.axes)
    else:
        first, second = x["head_dim", :half], x["head_dim", half:]
        turned = hax.concatenate("head_dim", [-second, first])
        rotated = x * cos.astype(x.dtype) + turned * sin.astype(x.dtype)
    return rotated if rest is None else hax.concatenate("head_dim", [rotated, rest])
