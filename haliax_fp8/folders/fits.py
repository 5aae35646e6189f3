"""Whether a checkpoint's numbers fit the model's dtype: a cast to fewer bits could change integers or overflow."""

from typing import Any

import ml_dtypes
import numpy as np


def require_fits(array: np.ndarray, dtype: Any, name: str) -> None:
    """Raises a ValueError if a cast would change an integer, or turn a finite number into infinity or NaN.

    Args:
        array: The numbers of the checkpoint.
        dtype: The model's dtype.
        name: The leaf, for the error.
    """
    if array.dtype == dtype or not array.size:
        return
    if (limits := _limits(ml_dtypes.iinfo, dtype)) is not None:
        extremes = array.argmin(), array.argmax()
        wrong = next((i for i in extremes if not limits.min <= int(array.flat[i]) <= limits.max), None)
    elif (limits := _limits(ml_dtypes.finfo, dtype)) is not None:
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


def _limits(of: Any, dtype: Any) -> Any:
    """The limits of a dtype as an integer's or a number's; None if it is neither."""
    try:
        return None if np.dtype(dtype).kind == "c" else of(dtype)
    except ValueError:
        return None
