"""The benchmarks run, at tiny sizes: what they compare is what they say, and a failure is a row and not the end."""

import ast
import dataclasses
import functools
import gc
import json
import pathlib
import sys

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haliax_fp8 as fp8


BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import faster_on_hopper  # noqa: E402
import fewer_bytes_than_one_pass  # noqa: E402
import fewer_launches_per_layer_than_peers  # noqa: E402
import fewer_launches_than_peers  # noqa: E402
import ten_thousand_layers_in_seconds  # noqa: E402
import tracing_costs_at_most_1_7x  # noqa: E402
from lib import output, programs  # noqa: E402
from lib.libraries import LIBRARIES, in_bf16  # noqa: E402
from lib.models import STACKS, TINY, loss  # noqa: E402


ONE_LAYER = dataclasses.replace(TINY, mlp_blocks=1)


pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """Benchmarks collect garbage before they measure, which takes long where so much is imported.

    Python's module is patched, because no benchmark should have an argument for this.
    """
    monkeypatch.setattr(gc, "collect", lambda: 0)


SCRIPTS = [path for path in sorted(BENCHMARKS.glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_named_by_its_claim_and_has_results(path):
    claim = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
    assert claim.startswith("Claim: ")
    assert f"benchmarks/{path.name} " in path.read_text()
    assert f"benchmarks/{path.name} " in (BENCHMARKS / "RESULTS.md").read_text()


def run(tmp_path, *arguments):
    """The rows that a small run on this CPU writes."""
    path = tmp_path / "rows.json"
    faster_on_hopper.main(["--smoke", "--json", str(path), *arguments])
    return json.loads(path.read_text())["rows"]


def fine():
    """What builds a run that works."""
    return lambda: jnp.ones(2), {"compile_s": 0.5}


def failing():
    raise RuntimeError("RESOURCE_EXHAUSTED: planted")


def point(size, **builders):
    """One point of a plan, measured as a linear layer is."""
    measure = functools.partial(faster_on_hopper.measured_in_turn, builders, faster_on_hopper.SMOKE, None)
    return faster_on_hopper.Point("linear", size, measure)


def broken():
    yield from ()
    raise RuntimeError("broken")


def test_a_failure_is_a_row_and_the_rest_is_measured(capsys):
    points = [
        point("first", bf16=fine, flax=failing, haliax_fp8=fine),
        faster_on_hopper.Point("linear", "second", broken),
        point("third", bf16=fine),
    ]
    rows = faster_on_hopper.rows_of(points, np.inf, 0.0, lambda rows: None)
    assert [(row["size"], row["library"]) for row in rows if row.get("ms", 0) > 0] == [
        ("first", "bf16"),
        ("first", "haliax_fp8"),
        ("third", "bf16"),
    ]
    assert {(row["size"], row["library"]): row["error"] for row in rows if "error" in row} == {
        ("first", "flax"): "RuntimeError: RESOURCE_EXHAUSTED: planted",
        ("second", ""): "RuntimeError: broken",
    }
    environment = {**output.environment(), "backend": "cpu", "smoke": True}
    faster_on_hopper.show(rows, environment, faster_on_hopper.SMOKE, markdown=True)
    assert "planted" in capsys.readouterr().out


@pytest.mark.more
def test_every_library_is_measured_at_every_size(tmp_path, capsys):
    rows = run(tmp_path, "--minutes", "1e6", "--part", "linear", "--part", "product", "--markdown")
    assert {(row["part"], row["size"], row["library"]) for row in rows if row["ms"] > 0} == {
        *(("linear", size, library) for size in ("16 x 32 x 48", "16 x 16 x 16") for library in LIBRARIES),
        *(("product", "16 x 32 x 16", operands) for operands in faster_on_hopper.OPERANDS),
    }
    assert "shows that the benchmark runs, and no speed" in capsys.readouterr().out


def test_a_run_that_fails_does_not_stop_those_in_turn_with_it():
    def fails_at_the_second_call():
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("planted")

    calls = []
    runs = {"fine": lambda: jnp.ones(2), "failing": fails_at_the_second_call}
    found = faster_on_hopper.measure_in_turn(runs, repeats=3, least_seconds=0.0)
    assert len(found["fine"]) == 3
    assert str(found["failing"]) == "planted"


def test_what_there_is_no_time_for_is_a_row_that_says_so(tmp_path):
    rows = run(tmp_path, "--minutes", "0")
    assert {row["part"] for row in rows} == {
        "linear",
        "Llama-8B, unrolled",
        "Llama-8B, scan",
        "microbatches",
        "experts",
        "attention",
        "training",
        "product",
    }
    assert {row["error"] for row in rows} == {"dropped: no time was left"}


def test_an_interrupted_run_has_written_what_it_measured():
    def interrupted():
        raise KeyboardInterrupt

    written = []
    points = [point("first", bf16=fine, haliax_fp8=fine), point("second", bf16=interrupted), point("third", bf16=fine)]
    rows = faster_on_hopper.rows_of(points, np.inf, 0.0, lambda rows: written.append(list(rows)))
    assert [(row["size"], row["library"]) for row in rows] == [("first", "bf16"), ("first", "haliax_fp8")]
    assert written == [rows[:1], rows]


def test_training_tries_fewer_sequences_where_memory_is_short():
    def steps(library, sizes, sequences, *_):
        tried.append((library, sequences))
        if sequences == 8:
            return None  # by what the program says of itself
        if sequences == 4:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return {"ms": 1.0, "tokens_per_second": {"bf16": 100.0, "haliax_fp8": 150.0}[library]}

    tried = []
    rows = list(faster_on_hopper.trained(faster_on_hopper.Plan(sequences=8), steps))
    assert tried == [("bf16", 8), ("bf16", 4), ("bf16", 2), *(("haliax_fp8", n) for n in (4, 2))]
    assert [row["times_bf16"] for row in rows] == [1.0, 1.5]


@pytest.mark.more
def test_the_model_trains(tmp_path):
    rows = run(tmp_path, "--minutes", "1e6", "--part", "training")
    assert [row["library"] for row in rows] == ["bf16", "haliax_fp8"]
    assert all(row["tokens_per_second"] > 0 for row in rows)


def test_verdicts_are_those_of_the_rows():
    plan = faster_on_hopper.Plan(first=(8, 8, 8), grid=((16, 16, 16), (32, 32, 32)))
    # A clock that halves after half of the rounds changes all of them, and no ratio.
    clock = (1.0,) * 4 + (2.0,) * 4
    ms = {"bf16": 4.0, "haliax_fp8": 2.0, "haliax.quantization": 3.0, "flax": 3.0}
    row = lambda size, name, ms: {"part": "linear", "size": size, "library": name, "ms": ms[0], "in_ms": ms}
    first = [row("8 x 8 x 8", name, [each * t for t in clock]) for name, each in ms.items()]
    first = [{**each, "times_bf16": faster_on_hopper.faster(each, first[0])[0]} for each in first]
    second = [row("16 x 16 x 16", name, [3.0 if name == "haliax_fp8" else 2.0] * 8) for name in ms]
    noisy = [row("32 x 32 x 32", name, [2.0, 3.0] * 4 if name == "flax" else [2.5] * 8) for name in ms]
    block = {"part": "Llama-8B, unrolled", "size": "4 blocks", "library": "haliax_fp8", "times_bf16": 1.2}
    assert faster_on_hopper.verdicts([*first, *second, *noisy, block], plan) == [
        "linear 8 x 8 x 8: 2.00 x bf16, 1.6 asked for: met",
        "Llama-8B, unrolled 4 blocks: 1.20 x bf16, 1.4 asked for: NOT met",
        "Llama-8B, scan 4 blocks: not measured",
        "ahead of marin-haliax and Flax at 1 of 3 measured grid points of 3; behind at 16 x 16 x 16; within the noise "
        "at 1",
    ]


def test_the_interval_of_a_median_holds_it_in_95_percent_of_cases():
    rng = np.random.default_rng(0)
    for n, most in ((9, 0.98), (25, 0.965), (100, 0.965)):
        drawn = [programs.median_of(list(rng.standard_exponential(n))) for _ in range(4000)]
        held = np.mean([least <= np.log(2.0) <= most for _, least, most in drawn])
        assert 0.94 < held < most
    assert programs.median_of([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert programs.median_of([1.0]) == (1.0, 1.0, 1.0)


@pytest.mark.more
def test_flax_op_in_a_haliax_layer_gives_flax_numbers():
    In, Out, Batch = hax.make_axes(input=32, output=16, batch=8)
    layer = in_bf16(hnn.Linear.init(In, Out, key=jax.random.key(0), use_bias=False))
    x = hax.random.normal(jax.random.key(1), (Batch, In), dtype=jnp.bfloat16)
    results = {}
    for name in ("haliax.quantization", "flax"):
        model = LIBRARIES[name].convert(layer)
        gradient = eqx.filter_grad(lambda model: (model(x) ** 2).sum().scalar().astype(jnp.float32))(model)
        results[name] = model(x).array, gradient.weight.array, gradient.dot_general
    *_, ops = zip(*results.values(), strict=True)
    for theirs, flax in zip(results["haliax.quantization"][:2], results["flax"][:2], strict=True):
        np.testing.assert_array_equal(theirs, flax)
    for name, state in ops[1].variables.items():
        np.testing.assert_array_equal(getattr(ops[0], name), state)
    assert ops[1].variables["input_amax_history"][0] == jnp.abs(x.array).max()


@pytest.mark.more
def test_the_state_of_a_gradient_is_the_next_one_and_weights_stay():
    model, x = LIBRARIES["haliax_fp8"].convert(STACKS["MLP"].model(ONE_LAYER)), STACKS["MLP"].batch(ONE_LAYER)
    gradient = eqx.filter_jit(fp8.filter_grad(loss))(model, x)
    new = faster_on_hopper.with_state_of(gradient, model)
    overwrites, rest = fp8.partition_for_grad_overwrite(gradient)
    expected = eqx.filter_jit(fp8.apply_updates)(model, jax.tree.map(jnp.zeros_like, rest), overwrites)
    assert jax.tree.structure(new) == jax.tree.structure(model)
    jax.tree.map(np.testing.assert_array_equal, new, expected)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_compiled_program_is_a_row(library):
    row = fewer_launches_than_peers.row("MLP", library, "local", ONE_LAYER)
    # Three products for each of its two linear layers; the first needs no gradient of its input.
    assert row["products"] == 5
    assert row["estimate_ms"] is None  # nobody knows this device's peaks


def test_a_compiled_layer_is_a_row():
    row = fewer_launches_per_layer_than_peers.row("haliax_fp8", (16, 32, 48), "local")
    assert row["size"] == "16 x 32 x 48"
    assert row["other_launches"] > 0


@pytest.mark.more
def test_the_tree_makes_rows():
    rows = ten_thousand_layers_in_seconds.measure(20, 1)
    assert {(row["library"], row["operation"]) for row in rows} == {
        (library, operation)
        for library in ten_thousand_layers_in_seconds.MODELS
        for operation in ten_thousand_layers_in_seconds.OPERATIONS
    }


@pytest.mark.more
def test_tracing_and_compiling_make_rows_of_a_page(capsys):
    case = STACKS["MLP"].model(ONE_LAYER), loss, STACKS["MLP"].batch(ONE_LAYER)
    rows = tracing_costs_at_most_1_7x.measure(1, compiles=True, cases={"MLP": lambda: case})
    assert [row["step"] for row in rows] == ["trace and lower", "compile for the CPU"]
    assert all(row["plain_s"] > 0 and row["fp8_s"] > 0 for row in rows)
    output.show("Title", tracing_costs_at_most_1_7x.COLUMNS, rows, output.environment(), markdown=True)
    assert "| MLP | trace and lower |" in capsys.readouterr().out


def test_one_pass_gives_what_several_give():
    """The Pallas kernel that is compared with XLA's, interpreted."""
    x = jax.random.normal(jax.random.key(0), (256, 384), jnp.bfloat16) * 8
    scale = jnp.float32(1e-3)  # Clips some.
    data, transposed, amax = fewer_bytes_than_one_pass.with_pallas(x, scale, interpret=True)
    expected, expected_transposed, of_rows = fewer_bytes_than_one_pass.with_xla(x, scale)
    np.testing.assert_array_equal(data.astype(np.float32), expected.astype(np.float32))
    np.testing.assert_array_equal(transposed.astype(np.float32), expected_transposed.astype(np.float32))
    np.testing.assert_array_equal(amax, np.abs(np.asarray(x, np.float32)).reshape(2, 128, 3, 128).max((1, 3)))
    assert amax.max() == of_rows.max()
