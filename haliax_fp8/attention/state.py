"""The scales that an attention reads from its record, and what it returns for it: see `_state/record.py`."""

import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from .._jax.max_grad import to_float32
from .._numerics.formats import E4M3
from .tensors import TENSORS


LIMITS = (E4M3.max,) * len(TENSORS)
"""The largest values of the tensors' formats."""


def scales_of(record: Array) -> Float32[Array, "*ensemble 10"]:
    """The scales of the ten tensors.

    Args:
        record: The state, as it enters the attention.
    """
    return lax.slice_in_dim(to_float32(record), 0, len(TENSORS), axis=record.ndim - 1)


def as_record(amaxes: Float32[Array, "*ensemble 10"]) -> Float32[Array, "*ensemble 21"]:
    """What was measured, as long as the record; what comes after the amaxes is not read.

    Args:
        amaxes: Of the ten tensors.
    """
    rest = lax.full((*amaxes.shape[:-1], len(TENSORS) + 1), 0.0, np.float32)
    return lax.concatenate([amaxes, rest], amaxes.ndim - 1)
