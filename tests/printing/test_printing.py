"""Results show themselves as a table: printed, at a prompt, and in a notebook."""

import html
import re

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest

import haliax_fp8 as fp8
from haliax_fp8 import describe, fp8_linear_layers, quantization_statistics
from haliax_fp8._printing import in_one_name, without_numbers
from haliax_fp8.layers import FasterOn
from haliax_fp8.preflight import inspect_step
from haliax_fp8.serving import log_probability_mismatch
from haliax_fp8.statistics import (
    Diagnosis,
    Distance,
    Finding,
    LayerComparison,
    Problem,
    Remedy,
)
from haliax_fp8.statistics.finding import Words


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
        lambda: inspect_step(lambda a, b: a @ b, jnp.ones((8, 8)), jnp.ones((8, 8)), device="local"),
        ["of the FLOPs in FP8 and", "other launches"],
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


OTHER_LEAVES = [
    jnp.shape,
    lambda x: jax.sharding.PartitionSpec("data"),
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    lambda x: "frozen",
    lambda x: None,
    lambda x: 1.0,
    lambda x: [x, {}],
    lambda x: object(),
]


@pytest.mark.parametrize("leaf", OTHER_LEAVES)
@pytest.mark.parametrize(
    "kind", ["delayed", "nvfp4", "stack", "quantized kernels", "served", "attention", "statistics"]
)
def test_trees_of_anything_can_be_printed(kind, leaf):
    """A tree of shapes, of shardings, of labels: JAX puts them where the arrays were."""
    linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    stack = eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 4, key=key))(jax.random.split(jax.random.key(0), 2))
    tree = {
        "delayed": lambda: fp8.fp8_linear_layers(linear),
        "nvfp4": lambda: fp8.fp8_linear_layers(linear, recipe="nvfp4"),
        "stack": lambda: fp8.fp8_linear_layers(stack),
        "quantized kernels": lambda: fp8.quantize_kernels(fp8.fp8_linear_layers(linear)),
        "served": lambda: fp8.serving.quantize_for_inference(linear, layout="FP8_DYNAMIC"),
        "attention": lambda: fp8.experimental.attention.Fp8Attention.init(),
        "statistics": lambda: measured(X),
    }[kind]()
    of_others = jax.tree.map(leaf, eqx.filter(tree, eqx.is_array))
    assert repr(of_others) and str(of_others) and eqx.tree_pformat(of_others)


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


# --- results that are part of others, or that one looks at for a single number -------------------------------------


def described():
    return describe(fp8_linear_layers(PLAIN), predict=FasterOn("h100", tokens=16))["up[0]"]


def distance(*shape):
    return Distance(*(jnp.full(shape, x, jnp.float32) for x in (0.1, 0.5, 0.25)))


def layer_comparison():
    return LayerComparison(*(distance(2) for _ in range(6)))


def finding():
    seen = {"underflow": 0.2103, "amax": 5.7e-05}
    words = Words(
        {"amax": "amax {amax:.2g}, ", "underflow": "{underflow:.2%} flushed to zero"},
        {"underflow": "{underflow:.0%} flushed to zero"},
        "calibrate the model",
    )
    what = "layers", (3,), "output_grad", Problem.UNDERFLOW
    return Finding(*what, remedy=Remedy.NONE, seen=seen, limits={"underflow": 0.05}, words=words)


def step():
    return RESULTS["preflight"][0]().step


# What a user gets at a prompt by indexing a result, or from a function that returns numbers.
PARTS = {
    "a layer": (described, ["up[0]", "In 16 -> Out 32", "DelayedScaling E4M3", "none recorded yet", "ms in bf16"]),
    "a plain layer": (lambda: describe(PLAIN)["up[0]"], ["up[0]", "high precision: not converted"]),
    "a prediction": (lambda: described().prediction, ["times as fast in FP8", "ms in bf16", "launching"]),
    "a layer's errors": (layer_comparison, ["plain one (the worst of a stack)", "SQNR", "fprop", "kernel_grad"]),
    "errors": (distance, ["relative error 10.00%, SQNR 20.0 dB, largest 25.00%, 1 - cos 5.0e-01"]),
    "a finding": (finding, ["layers[3], output_grad: underflow", "seen amax 5.7e-05", "zero (heuristic)", "remedy"]),
    "mismatch": (
        lambda: log_probability_mismatch(jnp.zeros(3), jnp.ones(3)),
        ["3 tokens: mean 1, largest 1, k1 1, k3 0.368, ratio 2.72"],
    ),
    "a program": (step, ["1 products, 0.0% of the FLOPs in FP8 and 100.0% in f32", "bytes at the peak"]),
    "a product": (lambda: step().products[0], ["8×8·8×8, f32 to f32", "1 run, high precision"]),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_no_dump(name):
    make, words = PARTS[name]
    result = make()
    text = " ".join(repr(result).split())
    assert type(result).__name__ not in text and all(word in text for word in words), text
    assert all(len(line) <= 80 for line in repr(result).splitlines())
    page = " ".join(html.unescape(re.sub(r"<[^>]*>", "", result._repr_html_())).split())
    assert all(word in page for word in words)


def test_parts_without_numbers():
    """As abstract arrays: a repr never raises."""
    for name in ("a layer's errors", "errors", "mismatch"):
        abstract = eqx.filter_eval_shape(PARTS[name][0])
        assert repr(abstract) == "traced or abstract: no numbers"


def test_errors_of_a_stack_and_of_what_is_not_reached():
    stack = jax.tree.map(lambda x: jnp.stack([x, jnp.float32(jnp.nan)]), distance())
    assert " ".join(repr(stack).split()) == (
        "relative error 10.00%, SQNR 20.0 dB, largest 25.00%, 1 - cos 5.0e-01, the worst of a stack"
    )
    assert repr(jax.tree.map(lambda x: x[1], stack)) == "not reached"
    assert "SQNR inf dB" in repr(jax.tree.map(lambda x: jnp.zeros(()), stack))


def underflow(layer, index=(), operand="input", seen=0.09, advice="finer scales"):
    words = Words({"underflow": "{underflow:.0%} flushed to zero"}, {"underflow": "{underflow:.0%}"}, advice)
    numbers = {"seen": {"underflow": seen}, "limits": {"underflow": 0.05}}
    return Finding(layer, index, operand, Problem.UNDERFLOW, remedy=Remedy.NONE, **numbers, words=words)


# The same problem in twelve blocks: its title, and what was seen.
DIAGNOSES = {
    "blocks of a list": (
        [underflow(f"blocks.{i}.up") for i in range(12)],
        ["blocks.0-11.up, input: underflow (12 findings)"],
        ["9% flushed to zero"],
    ),
    "members of a stack, with numbers of their own": (
        [underflow("blocks.stacked.up", (i,), seen=(9 - i) / 100) for i in range(3)],
        ["blocks.stacked.up[0-2], input: underflow (3 findings)"],
        ["9% flushed to zero (in blocks.stacked.up[0])"],
    ),
    "layers of other names": (
        [underflow(f"blocks.{i}.{name}") for i in range(2) for name in ("up", "down")],
        ["underflow (4 findings)"],
        ["blocks.0-1.up, input blocks.0-1.down, input", "9% flushed to zero"],
    ),
    "other operands, with numbers of their own": (
        [underflow("up"), underflow("up", operand="kernel", seen=0.08)],
        ["underflow (2 findings)"],
        ["up, input: 9% flushed to zero up, kernel: 8% flushed to zero"],
    ),
    "another remedy": (
        [underflow("up"), underflow("down", advice="bf16")],
        ["up, input: underflow", "down, input: underflow"],
        ["9% flushed to zero"] * 2,
    ),
}


@pytest.mark.parametrize("name", DIAGNOSES)
def test_a_diagnosis_says_what_findings_have_in_common_once(name):
    findings, titles, seen = DIAGNOSES[name]
    diagnosis = Diagnosis(tuple(findings))
    text = str(diagnosis)
    assert diagnosis.findings == tuple(findings)
    assert [line for line in text.splitlines() if line[:1].strip()] == titles
    words = " ".join(text.split())
    assert re.findall(r"(?:where|seen) (.*?)(?= seen| threshold)", words) == seen
    assert text.count("remedy") == len(titles)


# --- names of layers that differ in their numbers ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "name"),
    [
        ([f"blocks.{i}.up" for i in (0, 10, 1, 2, 11)], "blocks.0-2,10-11.up"),
        (["blocks.07.up"], "blocks.07.up"),
        ([f"{i}.heads.{j}" for i in range(3) for j in (0, 2)], "0-2.heads.0,2"),
        # Not every combination, or too many gaps.
        (["0.heads.0", "0.heads.1", "1.heads.0"], "0.heads.0 and 2 more"),
        ([f"blocks.{i}.up" for i in range(0, 12, 2)], "blocks.0.up and 5 more"),
        ([f"blocks.stacked.fc1[{i}]" for i in range(4)], "blocks.stacked.fc1[0-3]"),
        # What a layer of a list has several products of.
        (["up.0", "up.1", "up.0"], "up.0-1"),
    ],
)
def test_one_name_for_layers_that_differ_in_their_numbers(paths, name):
    assert len({without_numbers(path) for path in paths}) == 1
    assert in_one_name(paths) == name
