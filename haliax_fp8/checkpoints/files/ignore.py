"""Which layers a list of names and regular expressions means, in a time that a hostile list cannot choose."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable

from .broken import BrokenCheckpoint


REGEX = "re:"

_LONGEST_PATTERN = 2_000

# Repetitions of something that repeats itself, or of alternatives, may take exponential time; references may, too.
_NESTED = re.compile(r"\)[*+{]|\\[1-9]|\(\?P=")
_UNBOUNDED = re.compile(r"(?<!\\)[*+{]")

# Python's own matcher in a process of its own, because nothing else can stop it.
_MATCH = (
    "import json, re, sys; pattern, names = json.load(sys.stdin); "
    "json.dump([name for name in names if re.match(pattern, name)], sys.stdout)"
)


def matched(
    pattern: str, names: Iterable[str], *, file: str, key: str, parents: bool = False, seconds: float = 5
) -> set[str]:
    """The names that an entry means: the same name, or where it begins with `re:`, those that `re.match` accepts.

    Args:
        pattern: The entry.
        names: Names of layers.
        file: Where the entry is from, for errors.
        key: The list that it is in, for errors.
        parents: Whether a name also means every layer below it, as in Hugging Face's `modules_to_not_convert`.
        seconds: How long matching may take.

    Raises:
        BrokenCheckpoint: If it is not a regular expression, or takes longer than that.

    Example:
        >>> sorted(matched("re:.*mlp", ["a.mlp.up", "a.attention"], file="config.json", key="ignore"))
        ['a.mlp.up']
    """
    names = list(names)
    if not pattern.startswith(REGEX):
        return {n for n in names if n == pattern or (parents and _is_part(pattern, n))}
    expression = pattern.removeprefix(REGEX)
    if len(expression) > _LONGEST_PATTERN:
        raise BrokenCheckpoint(
            file, f"a pattern of {len(expression)} characters; at most {_LONGEST_PATTERN} are read", key
        )
    try:
        compiled = re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise BrokenCheckpoint(file, f"{pattern!r:.80} is not a regular expression: {error}", key) from None
    if not _NESTED.search(expression) and len(_UNBOUNDED.findall(expression)) <= 2:
        return {name for name in names if compiled.match(name)}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCH],
            input=json.dumps([expression, names]),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        problem = f"{pattern!r:.80} takes more than {seconds} s for {len(names)} names: engines would hang; simplify it"
        raise BrokenCheckpoint(file, problem, key) from None
    return set(json.loads(done.stdout))


def _is_part(entry: str, name: str) -> bool:
    return f".{entry}." in f".{name}."
