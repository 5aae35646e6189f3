"""Results show themselves as a table: printed, at a prompt, and in a notebook."""

import re

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest

from haliax_fp8 import describe, fp8_linear_layers, quantization_statistics
from haliax_fp8.preflight import inspect_step


In, Out = hax.make_axes(In=16, Out=32)
PLAIN = {"up[0]": hnn.Linear.init(In, Out, key=jax.random.key(0))}


def loss(model, x):
    return hax.sum(model["up[0]"](x)).scalar()


def measured(x):
    return quantization_statistics(fp8_linear_layers(PLAIN), loss, x)


X = hax.ones((hax.Axis("batch", 16), In))

RESULTS = {
    "describe": (lambda: describe(PLAIN), ["0 of 1 linear layers in FP8", "up[0]", "not converted"], 80),
    "statistics": (lambda: measured(X), ["Quantization of each operand", "up[0]", "output_grad", "SQNR"], 80),
    "preflight": (
        lambda: inspect_step(lambda a, b: a @ b, jnp.ones((8, 8)), jnp.ones((8, 8)), target="local"),
        ["of the FLOPs in FP8 on", "other launches"],
        80,
    ),
}


@pytest.fixture(scope="module", params=RESULTS)
def shown(request):
    make, words, width = RESULTS[request.param]
    return make(), words, width


def test_text(shown):
    result, words, width = shown
    text = str(result)
    assert repr(result) == text and all(word in text for word in words)
    assert "\x1b" not in text and all(len(line) <= width and line == line.rstrip() for line in text.splitlines())


def test_html(shown):
    result, words, _ = shown
    page = result._repr_html_()
    assert page.startswith("<pre") and page.endswith("</pre>") and "style=" in page
    text = re.sub(r"<[^>]*>", "", page)
    assert all(word in text for word in words)


def test_statistics_without_numbers():
    """A repr never raises: an error message may hold it."""
    abstract = eqx.filter_eval_shape(measured, X)
    assert "traced or abstract: no numbers" in " ".join(repr(abstract).split())

    @eqx.filter_jit
    def traced(x):
        seen.append(repr(measured(x)))
        return x

    seen: list[str] = []
    traced(X)
    assert "traced or abstract: no numbers" in " ".join(seen[0].split())
