"""nearest: the names that somebody may have meant, for the errors about unknown ones."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any


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


def require_known(options: Mapping[Any, Any], known: Iterable[str], synonyms: Mapping[str, str], of: str) -> None:
    """Raises a ValueError for an option that does not exist, with the one that may be meant.

    Args:
        options: What was given, by name.
        known: The names that exist.
        synonyms: What other libraries and people call them, where the letters do not say it.
        of: What the options are of.
    """
    names = list(known)
    for name, value in options.items():
        if name not in names:
            near = [synonyms[name]] if name in synonyms else nearest(str(name), names, 1)
            hint = f"did you mean {near[0]}? All are" if near else "all of them are"
            raise ValueError(f"{name}={value!r} is not an option of {of}; {hint} {', '.join(names)}")


def explains_options[C: type](synonyms: Mapping[str, str]) -> Callable[[C], C]:
    """A decorator for dataclasses: a keyword that is not a field raises the ValueError of `require_known`.

    Args:
        synonyms: As in `require_known`.
    """

    def decorate(cls: C) -> C:
        init: Any = cls.__init__
        fields = [field.name for field in dataclasses.fields(cls)]

        @functools.wraps(init)
        def explained(self: Any, *args: Any, **options: Any) -> None:
            require_known(options, fields, synonyms, cls.__name__)
            init(self, *args, **options)

        cls.__init__ = explained
        return cls

    return decorate
