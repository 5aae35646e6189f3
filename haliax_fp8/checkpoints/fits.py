"""Whether the numbers of a checkpoint fit the dtype of a model, where fewer bits would make them others."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def require_fits(array: np.ndarray, dtype: Any, name: str) -> None:
    """Raises a ValueError where a cast would make another integer, or infinity or NaN of a finite number.

    Args:
        array: The numbers of the checkpoint.
        dtype: The model's dtype.
        name: The leaf, for the error.
    """
    if array.dtype == dtype or not array.size:
        return
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        extremes = array.argmin(), array.argmax()
        wrong = next((i for i in extremes if not limits.min <= int(array.flat[i]) <= limits.max), None)
    elif jnp.issubdtype(dtype, jnp.floating):
        limits = jnp.finfo(dtype)
        with np.errstate(all="ignore"):
            lost = np.isfinite(array) & ~np.isfinite(array.astype(dtype))
        wrong = lost.argmax() if lost.any() else None
    else:
        return
    if wrong is None:
        return
    index = [int(i) for i in np.unravel_index(wrong, array.shape)]
    raise ValueError(
        f"{name} is {array.flat[wrong]}{f' at {index}' if index else ''} in the checkpoint, which does not fit the "
        f"model's {np.dtype(dtype).name} ({limits.min} to {limits.max}); load it into a model whose {name} is "
        f"{array.dtype.name}"
    )
