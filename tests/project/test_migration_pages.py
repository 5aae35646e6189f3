"""The migration pages have a row for every public name of the libraries that are installed."""

import pathlib
import re
import types
import typing

import flax.linen as nn
import flax.nnx as nnx
import haliax.quantization as haxq
import pytest
from flax.linen import fp8_ops


MIGRATION = pathlib.Path(__file__).parents[2] / "docs" / "migration"
LIBRARIES = pytest.mark.parametrize("module, page", [(fp8_ops, "flax"), (haxq, "haliax")], ids=["flax", "haliax"])


def public_names(module: types.ModuleType) -> set[str]:
    """What a module defines itself, or takes from a private module of its package, without type variables."""
    package = module.__name__.partition(".")[0]

    def is_its_own(value: object) -> bool:
        origin = getattr(value, "__module__", module.__name__)  # constants have none
        return origin == module.__name__ or origin.startswith(f"{package}._")

    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType | typing.TypeVar) and is_its_own(value)
    }


def without_derivatives(names: set[str]) -> set[str]:
    """Drops `in_q_fwd`, `in_q_bwd` and the like beside `in_q`: the page has one row for all of them."""
    return {name for name in names if re.sub("_(fwd|bwd|jvp)$", "", name) not in names - {name}}


def names_in_rows(page: str) -> set[str]:
    """The words in the code of the first column of the page's tables."""
    columns = re.findall(r"^\| (.*?) \|", (MIGRATION / f"{page}.md").read_text(), re.MULTILINE)
    return {word for column in columns for code in re.findall("`(.*?)`", column) for word in re.findall(r"\w+", code)}


@LIBRARIES
def test_every_public_name_has_a_row(module, page):
    names = without_derivatives(public_names(module))
    assert len(names) > 10
    assert sorted(names - names_in_rows(page)) == []


def test_every_fp8_class_of_flax_has_a_row():
    """Linen's classes. NNX has none; those of a later version would need rows of their own."""
    names = {name for name in dir(nn) if "Fp8" in name}
    assert names and sorted(names - names_in_rows("flax")) == []
    assert [name for name in dir(nnx) if "fp8" in name.lower()] == []
