"""One word for one thing: words that say nothing in particular are in no name of the package."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import haliax_fp8


ROOT = Path(haliax_fp8.__file__).parent

# What to say instead.
VAGUE = {
    "place": "what it is: an index, an axis, a path, a label, a device; or put, fill",
    "role": "the name of the product, or of the operand",
}


def names(tree: ast.Module) -> Iterator[str]:
    """What a file calls things: modules, classes, functions, parameters, variables, fields."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.arg() | ast.keyword() if node.arg:
                yield node.arg
            case ast.Name():
                yield node.id
            case ast.Attribute():
                yield node.attr
            case ast.alias():
                yield node.asname or node.name


def words(name: str) -> set[str]:
    """The words of a name in the singular, in snake case or camel case."""
    found = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return {word.lower().removesuffix("s") for word in found}


@pytest.mark.parametrize("word", VAGUE)
def test_no_name_has_a_vague_word(word):
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if word in words(path.stem)}
    for path in ROOT.rglob("*.py"):
        in_file = {name for name in names(ast.parse(path.read_text())) if word in words(name)}
        found |= {f"{path.relative_to(ROOT).as_posix()}: {name}" for name in in_file}
    assert not found, f"instead of {word!r}, say {VAGUE[word]}"


def test_this_file_sees_words():
    code = "from a import b as of_place\nclass Place: pass\ndef f(places, *, x=1): return g(x.a_place, the_place=y)\n"
    seen = [name for name in names(ast.parse(code)) if "place" in words(name)]
    assert sorted(seen) == ["Place", "a_place", "of_place", "places", "the_place"]
    assert "place" not in words("replaces") | words("PLACEHOLDER") | words("_replaced")
