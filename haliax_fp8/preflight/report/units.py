"""Figures for people."""


def size(count: int | float) -> str:
    """Bytes for people.

    Example:
        >>> size(4123456789)
        '4.12 GB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
