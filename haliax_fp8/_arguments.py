"""Checks of arguments, and the near names that their errors suggest."""

import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any


def require(name: str, value: object, kind: Any, example: str, of: str) -> None:
    """Raises a ValueError unless a value is an instance of a class.

    Args:
        name: The argument's name.
        value: Its value.
        kind: The class.
        example: What to pass instead.
        of: The function or class that takes the argument.
    """
    if not isinstance(value, kind):
        kind_name = kind.__name__.removeprefix("Abstract")
        article = "an" if kind_name[0] in "AEIOU" else "a"
        raise ValueError(f"{name}={value!r} of {of} is not {article} {kind_name}; use {example}")


def require_bool(name: str, value: object, of: str) -> None:
    """Raises a ValueError for anything but True and False: a string such as `"no"` would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} of {of} must be True or False")


def require_number(name: str, value: object, example: str, of: str) -> None:
    """Raises a ValueError for anything but a finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r} of {of} must be a finite number; use one such as {example}")


def require_integer(name: str, value: object, of: str) -> None:
    """Raises a ValueError for anything but an integer; True and False do not count."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} of {of} must be an integer")


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names closest to an unknown one, ignoring case, closest first; may be empty.

    Args:
        name: The unknown name.
        known: The known names.
        count: How many to return at most.

    Example:
        >>> nearest("H10", ["a100", "h100", "cpu"])
        ['h100', 'a100']
    """
    by_lower = {one.lower(): one for one in known}
    return [by_lower[one] for one in difflib.get_close_matches(name.lower(), by_lower, n=count, cutoff=0.4)]
