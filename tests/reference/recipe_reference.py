"""Recipes in NumPy, for 2-D operands whose last axis is contracted; independent of the package."""

import ml_dtypes
import numpy as np


F32 = np.float32
LIMIT = {"E4M3": 448.0, "E5M2": 57344.0, "E4M3FNUZ": 240.0, "E5M2FNUZ": 57344.0, "E2M1": 6.0}
DTYPE = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "E2M1": ml_dtypes.float4_e2m1fn,
}


def cast(x, format):
    limit = F32(LIMIT[format])
    with np.errstate(invalid="ignore"):
        return np.clip(x.astype(F32), -limit, limit).astype(DTYPE[format])


def multiplier(amax, limit, power_of_two):
    """limit / amax in float32, optionally rounded down to a power of two; 1 for an amax of 0, NaN for inf and NaN.

    At most `2**126`, whose reciprocal is the smallest scale that XLA does not flush to zero on a CPU.
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        m = np.minimum((F32(limit) / amax.astype(F32)).astype(F32), F32(2.0**126))
        if power_of_two:
            m = np.ldexp(F32(1.0), np.frexp(m)[1] - 1).astype(F32)
        return np.where(np.isfinite(amax), np.where(amax > 0, m, F32(1.0)), F32(np.nan)).astype(F32)


def amax(x, axis):
    with np.errstate(invalid="ignore"):
        return np.abs(x).max(axis=axis, keepdims=True)


def blocks(x, rows, columns):
    """Pads with zeros to whole blocks: `[R, rows, C, columns]`."""
    padded = np.pad(x, [(0, -x.shape[0] % rows), (0, -x.shape[1] % columns)])
    return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def expand(scale, shape, rows, columns):
    return np.repeat(np.repeat(scale, rows, 0), columns, 1)[: shape[0], : shape[1]]


def current(x, format="E4M3", power_of_two=False):
    m = multiplier(amax(x, None), LIMIT[format], power_of_two)
    return cast(x.astype(F32) * m, format), F32(1.0) / m


def rowwise(x, format="E4M3", power_of_two=True):
    m = multiplier(amax(x, 1), LIMIT[format], power_of_two)
    return cast(x.astype(F32) * m, format), F32(1.0) / m


def block(x, rows=1, columns=128, format="E4M3", power_of_two=True):
    with np.errstate(invalid="ignore"):
        a = np.abs(blocks(x, rows, columns)).max(axis=(1, 3))
    m = multiplier(a, LIMIT[format], power_of_two)
    with np.errstate(invalid="ignore"):
        return cast(x.astype(F32) * expand(m, x.shape, rows, columns), format), F32(1.0) / m


def mxfp8(x, rows=1, format="E4M3", scale_rounding="up"):
    """E8M0 scales: `2**ceil(log2(amax / limit))`, in exact arithmetic; inf and NaN give NaN.

    Rounded down, the exponent is that of the amax, less that of the limit (OCP, section 6.3). To nearest, the amax is
    first rounded to a multiple of half its power of two, halves up (compressed-tensors).

    From `2**-126` on, since `2**-127` is flushed to zero on a CPU; zeros have that.
    """
    with np.errstate(invalid="ignore"):
        a = np.abs(blocks(x, rows, 32)).max(axis=(1, 3))
    target = (a.astype(F32) * F32(1.0 / LIMIT[format])).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        mantissa, exponent = np.frexp(target)
        exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
        if scale_rounding != "up":
            mantissa, exponent = np.frexp(a.astype(np.float64))
            carries = (scale_rounding == "nearest") & (np.floor(4 * mantissa + 0.5) == 4)
            exponent = exponent + carries - np.frexp(LIMIT[format])[1]
    exponent = np.where(a == 0, -127, np.clip(exponent, -126, 127))
    scale = np.where(np.isfinite(target), np.ldexp(1.0, np.where(np.isfinite(target), exponent, 0)), np.nan)
    with np.errstate(invalid="ignore"):
        return cast((x.astype(np.float64) / expand(scale, x.shape, rows, 32)).astype(F32), format), scale.astype(F32)


def nvfp4(x, rows=1):
    """E2M1 in blocks of 16, E4M3 scales of blocks, one float32 scale of the tensor. Data as E4M3, which has a NaN.

    arXiv:2509.25149, appendix C, with TransformerEngine's guard: an encoding scale is 1 for a tensor of zeros. A block
    that holds an infinity or NaN has a scale of NaN, and the tensor's scale is that of the other blocks.
    """
    largest = np.finfo(F32).max
    with np.errstate(all="ignore"):
        x = x.astype(F32)
        block_amax = np.abs(blocks(x, rows, 16)).max(axis=(1, 3))
        tensor_amax = np.where(np.isfinite(block_amax), block_amax, F32(0.0)).max()
        encode = multiplier(tensor_amax, 448.0 * 6.0, power_of_two=False)
        of_block = cast(block_amax * (encode / F32(6.0)), "E4M3").astype(F32)
        scale = np.where(np.isfinite(block_amax), of_block * (F32(1.0) / encode), F32(np.nan))
        scaled = x * expand(np.minimum(F32(1.0) / scale, largest), x.shape, rows, 16)
        data = np.where(np.isnan(scaled), F32(np.nan), cast(scaled, "E2M1").astype(F32))
    return data.astype(DTYPE["E4M3"]), scale
