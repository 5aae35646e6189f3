"""Which layers an entry of a configuration's lists means: by its name, a pattern of ModelOpt's, or an expression."""

import fnmatch
import math
import re
from collections.abc import Callable
from typing import Any

from .folder import CONFIG
from .strict_json import BrokenCheckpoint


# How entries begin that are regular expressions; longer ones are not read.
REGEX, _LONGEST = "re:", 2_000

# What a repeat counts as, and how much a pattern may have: five repeats, or 17 optional parts, take under 0.1 s a name.
_WAYS, _MOST_WAYS = 8, 2**17

# An expression in parts: escapes, sets of characters, starts of groups, repeats, and other characters.
_PARTS = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:P?<\w+>|[:=!>#]|<[=!]|[a-zA-Z-]+:?)|\{[\d,]+\}|.", re.DOTALL
)


def matcher(key: str, entry: str, method: str) -> Callable[[str], Any]:
    """Tells whether an entry of a list means a layer.

    Args:
        key: The list.
        entry: The entry.
        method: The layout's method.

    Raises:
        BrokenCheckpoint: If it is not a regular expression, a very long one, or one that takes forever.
    """
    if method in ("modelopt", "mxfp4") and "*" in entry and not entry.startswith(REGEX):
        # gpt-oss names modules so, and means all layers in them.
        within = f"{entry}.*" if method == "mxfp4" else entry
        return lambda layer: fnmatch.fnmatchcase(layer, entry) or fnmatch.fnmatchcase(layer, within)
    if not entry.startswith(REGEX):
        # The lists of other methods name modules, and mean all layers in them.
        return lambda layer: layer == entry or (method != "compressed-tensors" and f".{entry}." in f".{layer}.")
    if len(entry) > _LONGEST:
        problem = f"a pattern of {len(entry)} characters; at most {_LONGEST} are read: write several"
        raise BrokenCheckpoint(CONFIG, problem, key)
    try:
        expression = re.compile(entry.removeprefix(REGEX))
    except (re.error, RecursionError, OverflowError) as error:
        problem = f"{entry!r:.80} is not a regular expression: {error}; correct or remove it"
        raise BrokenCheckpoint(CONFIG, problem, key) from None
    if (why := _why_slow(expression.pattern)) is not None:
        problem = f"{entry!r:.80} {why}, and may take years to match a name"
        raise BrokenCheckpoint(CONFIG, f"{problem}; write it with '.*', or as several patterns", key)
    return expression.match


def _why_slow(pattern: str) -> str | None:
    """What makes a pattern slow, which Python tries to match in each possible way; None if it is fast.

    Where each round of a repeat can match in several ways, their number doubles with each character of a name.
    """
    # Of each open group: the ways of its finished alternatives, and of the one that is read, but for its last part.
    finished, ways, last, previous = [0], [1], 1, ""
    for part in _PARTS.findall(pattern):
        is_repeat = part in ("*", "+") or (len(part) > 1 and part[0] == "{")
        if previous == "repeat" and part in ("?", "+"):  # lazy or possessive
            previous = ""
            continue
        if part == "(?#" or (part[:2] == "(?" and part[2:3].isalpha() and "x" in part and "<" not in part):
            return "has comments"
        if is_repeat and last > 1:
            return "repeats what is itself repeated, or has alternatives"
        if part == "?" and previous != "(":
            last += 1
        elif is_repeat:
            last = 1 if part[1:-1].isdecimal() else _WAYS
        else:
            ways[-1] *= last
            last = 1
            if part[0] == "(":
                finished.append(0)
                ways.append(1)
            elif part == ")" and len(ways) > 1:
                last = finished.pop() + ways.pop()
            elif part == "|":
                finished[-1] += ways[-1]
                ways[-1] = 1
        previous = "repeat" if is_repeat or part == "?" else part
    total = math.prod((*map(sum, zip(finished, ways, strict=True)), last))
    return "has many repeats or alternatives in a row" if total > _MOST_WAYS else None
