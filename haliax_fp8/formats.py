"""Formats: element types with their limits.

A *format* is what hardware multiplies: E4M3 and E5M2 for training (arXiv:2209.05433, table 1), their `fnuz` variants on
AMD's MI300. NumPy's type (from `ml_dtypes`) defines the rounding; this file adds the limits and a
display name, and `casts.py` the cast that saturates.
"""

import dataclasses
import functools
import math

import ml_dtypes
import numpy as np


__all__ = [
    "E2M1",
    "E4M3",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "FORMATS",
    "LARGEST_MULTIPLIER",
    "Format",
]


@dataclasses.dataclass(frozen=True)
class Format:
    """An element type of eight bits or fewer, with its limits.

    Args:
        name: Its name in tables and error messages.
        dtype: The NumPy element type, for example `np.dtype(jnp.float8_e4m3fn)`.
        container: The element type of arrays that hold the format's values, if it is not `dtype`.

    Raises:
        ValueError: If `dtype` is not a floating-point type of at most eight bits.

    References:
        arXiv:2209.05433, table 1 (E4M3, E5M2); arXiv:2206.02915 (the fnuz variants).

    Example:
        >>> E4M3.max, E4M3.smallest_normal, E4M3.smallest_subnormal
        (448.0, 0.015625, 0.001953125)
    """

    name: str
    dtype: np.dtype
    container: np.dtype | None = None

    def __post_init__(self) -> None:
        dtype = np.dtype(self.dtype)
        object.__setattr__(self, "dtype", dtype)
        try:
            bits = ml_dtypes.finfo(dtype).bits
        except ValueError:
            bits = 0
        if not 0 < bits <= 8:
            raise ValueError(
                f"dtype={dtype} of format {self.name!r} is not a floating-point type of eight bits or fewer; "
                "use one such as jnp.float8_e4m3fn or jnp.float8_e5m2"
            )

    @functools.cached_property
    def storage(self) -> np.dtype:
        """The element type of arrays that hold the format's values."""
        return self.dtype if self.container is None else self.container

    @functools.cached_property
    def max(self) -> float:
        """The largest finite value."""
        return float(ml_dtypes.finfo(self.dtype).max)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with full precision."""
        return float(ml_dtypes.finfo(self.dtype).smallest_normal)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value."""
        return float(ml_dtypes.finfo(self.dtype).smallest_subnormal)

    @property
    def bits(self) -> int:
        """Bits of one value."""
        return int(ml_dtypes.finfo(self.dtype).bits)

    @property
    def mantissa_bits(self) -> int:
        """Stored bits of the significand."""
        return int(ml_dtypes.finfo(self.dtype).nmant)

    @property
    def relative_error(self) -> float:
        """The largest relative error of rounding a normal value to nearest: `2**-(mantissa_bits + 1)`."""
        return 2.0 ** -(self.mantissa_bits + 1)

    @property
    def dynamic_range(self) -> float:
        """`log2(max / smallest_subnormal)`, in binades."""
        return math.log2(self.max / self.smallest_subnormal)

    def __repr__(self) -> str:
        return self.name


E4M3 = Format("E4M3", np.dtype(ml_dtypes.float8_e4m3fn))
"""4 bits of exponent, 3 of mantissa, maximum 448: for inputs and kernels."""

E5M2 = Format("E5M2", np.dtype(ml_dtypes.float8_e5m2))
"""5 bits of exponent, 2 of mantissa, maximum 57344: for gradients."""

# Stored in E4M3's type, which can represent all of its values, and NaN: XLA's CPU compiler fails on programs with 4-bit
# arrays ("does not support custom element sizes on non-sub-byte types").
E2M1 = Format("E2M1", np.dtype(ml_dtypes.float4_e2m1fn), container=np.dtype(ml_dtypes.float8_e4m3fn))
"""2 bits of exponent, 1 of mantissa, maximum 6: the 4-bit elements of NVFP4, stored in bytes of E4M3's type."""

E4M3FNUZ = Format("E4M3FNUZ", np.dtype(ml_dtypes.float8_e4m3fnuz))
"""E4M3 as on AMD's MI300: no negative zero, no infinities, maximum 240."""

E5M2FNUZ = Format("E5M2FNUZ", np.dtype(ml_dtypes.float8_e5m2fnuz))
"""E5M2 as on AMD's MI300: no negative zero, no infinities, maximum 57344."""

FORMATS: dict[np.dtype, Format] = {format.dtype: format for format in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)}
"""The 8-bit formats, by their dtypes."""

LARGEST_MULTIPLIER = 2.0**126
"""Its reciprocal is float32's smallest normal number; a smaller scale is flushed to zero on a CPU."""
