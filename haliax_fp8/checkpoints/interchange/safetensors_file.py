"""Safetensors files, read one tensor at a time."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import safetensors

from .checkpoint import HostArrays


# The format's names of types that models have, as https://github.com/huggingface/safetensors lists them.
_DTYPES = {
    "F64": jnp.float64,
    "F32": jnp.float32,
    "F16": jnp.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "I64": jnp.int64,
    "I32": jnp.int32,
    "I16": jnp.int16,
    "I8": jnp.int8,
    "U64": jnp.uint64,
    "U32": jnp.uint32,
    "U16": jnp.uint16,
    "U8": jnp.uint8,
    "BOOL": jnp.bool_,
}


def open_safetensors(path: pathlib.Path) -> HostArrays:
    """The tensors of a file.

    Raises:
        ValueError: If the file is damaged, or a tensor has a type that JAX lacks.
    """
    try:
        # Open as long as the checkpoint: the file is mapped, and may be replaced meanwhile.
        file: Any = safetensors.safe_open(path, framework="np")  # pyright: ignore[reportAttributeAccessIssue]
    except safetensors.SafetensorError as error:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(f"path {path} is not a sound safetensors file: {error}") from error
    entries = {}
    for name in file.keys():
        described = file.get_slice(name)
        if described.get_dtype() not in _DTYPES:
            raise ValueError(f"{name} in {path} has type {described.get_dtype()}, which JAX does not have")
        entries[name] = jax.ShapeDtypeStruct(tuple(described.get_shape()), _DTYPES[described.get_dtype()])
    return HostArrays(entries, file.get_tensor)
