"""nearest: the names that somebody may have meant, for the errors about unknown ones."""

import difflib
from collections.abc import Iterable


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
