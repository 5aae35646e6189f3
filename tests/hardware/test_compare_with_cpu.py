"""The script that compares an accelerator with a CPU, with a CPU in the accelerator's place."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from compare_with_cpu import FOURTEEN_BITS, TWO_ROUNDINGS, cases, compare, difference

from haliax_fp8 import recipes


@pytest.mark.parametrize(
    "words",
    [("casts to float8_e4m3fn",), ("quantize-dequantize",), ("products", "matrices, float32", "delayed")]
    + [
        pytest.param(words, marks=pytest.mark.more)
        for words in (
            ("products", "4 x 4"),
            ("products", "one row"),
            ("experts",),
            ("attention",),
            ("served",),
            ("training", "rowwise"),
        )
    ],
    ids=str,
)
def test_a_cpu_computes_what_it_computes(words, capsys):
    chosen = [case for case in cases() if all(word in case[0] for word in words)]
    assert chosen and compare(iter(chosen), jax.devices("cpu")[0]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.startswith("right") for line in printed] == [True] * len(chosen)


def test_every_recipe_is_compared():
    names = {case[0].split(", ")[1] for case in cases() if case[0].startswith("products")}
    assert names == set(recipes.named)


def test_what_differs_is_wrong(capsys):
    calls = itertools.count()
    found = compare(iter([("numbers", lambda _: jax.numpy.float32(next(calls) + 1.0), 0.4)]), jax.devices("cpu")[0])
    assert found == 1 and "WRONG" in capsys.readouterr().out


def test_what_fails_is_wrong_and_the_others_are_compared(capsys):
    fails, works = lambda _: 1 // 0, lambda _: jax.numpy.float32(1.0)
    assert compare(iter([("fails", fails, 1.0), ("works", works, 0.0)]), jax.devices("cpu")[0]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_difference():
    ones = np.ones(4, np.float32)
    assert difference(ones, ones) == 0.0
    assert difference(ones * 1.5, ones) == 0.5
    assert difference(ones, ones.astype(np.float64)) == np.inf
    assert difference(np.array([np.inf]), np.array([1.0])) == np.inf
    assert difference(np.array([np.nan, 1.0]), np.array([np.nan, 1.0])) == 0.0


def test_what_rounding_explains_is_allowed():
    """Rounding to bfloat16 twice, and sums whose addends keep 14 bits, in float64."""
    rng = np.random.default_rng(0)
    exact = rng.standard_normal(10_000)
    bf16 = lambda x: x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    # The scale has 8 bits, as those of two operands have together.
    twice = bf16(bf16(exact) * 1.5625)
    assert 0 < difference(twice, exact * 1.5625) < TWO_ROUNDINGS
    products = rng.standard_normal((100, 256)) * rng.standard_normal((100, 256))
    largest = np.abs(products).max(axis=1, keepdims=True)
    unit = 2.0 ** (np.floor(np.log2(largest)) - 13)
    truncated = np.trunc(products / unit) * unit
    assert 0 < difference(truncated.sum(axis=1), products.sum(axis=1)) < FOURTEEN_BITS
