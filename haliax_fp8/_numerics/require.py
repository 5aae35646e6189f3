"""Checks that many classes need, with errors that name the argument, its value and the remedy."""

import math
import numbers
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


def require_margin(value: int, of: str) -> None:
    """Raises a ValueError for a margin, positive or negative, that uses up a format's range.

    Args:
        value: Headroom as a power of two.
        of: The scaling that has the margin.
    """
    if isinstance(value, float) and value > 0.0:
        power = round(math.log2(value))
        raise ValueError(
            f"margin={value} of {of} must be an integer: scales are multiplied by 2**margin. For a factor of {value:g}"
            f"{'' if 2.0**power == value else f', about {2.0**power:g}'}, use margin={power}"
        )
    require_integer("margin", value, of)
    if not -_BINADES <= value <= _BINADES:
        raise ValueError(
            f"margin={value} of {of} must lie between {-_BINADES} and {_BINADES}: scales are multiplied by 2**margin, "
            "and E4M3 spans 18 binades, so a larger margin turns every value into zero, and a smaller one clips every "
            "value; 0 is usual, 1 leaves room for tensors that double from one step to the next"
        )


# E4M3 spans 17.8 binades, from its smallest subnormal, 2**-9, to its maximum, 448.
_BINADES = 17
