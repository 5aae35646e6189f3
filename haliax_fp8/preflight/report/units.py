"""Figures for people."""

from collections.abc import Sequence


def size(count: int | float) -> str:
    """Bytes for people.

    Example:
        >>> size(4123456789)
        '4.12 GB'
    """
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def operations(count: int | float) -> str:
    """FLOPs for people.

    Example:
        >>> operations(3.161e12)
        '3.16 TFLOP'
    """
    return _scaled(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def _scaled(count: int | float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        # What three digits would round up to 1000 has the next unit.
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {units[-1]}"
