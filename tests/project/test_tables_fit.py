"""Every table at 80 and at 120 columns: no line is longer, and no number is cut or broken in two."""

import collections
import dataclasses
import io
import pathlib
import re

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from examples import serve_lm
from examples.train_lm import report as lm_report
from examples.train_vit import report as vit_report
from haliax_fp8 import describe, fp8_linear_layers, quantization_statistics
from haliax_fp8._cli.tables import device_rows, device_table, format_rows, format_table
from haliax_fp8._printing import columns, new_table
from haliax_fp8.checkpoints import (
    CheckReport,
    Conversion,
    Converted,
    Explanation,
    ExportReport,
    Fault,
    LoadReport,
)
from haliax_fp8.checkpoints.explain import Held, engines
from haliax_fp8.checkpoints.layout import layout_of, named as layouts
from haliax_fp8.preflight import PreflightReport, compilable_devices, inspect_step
from haliax_fp8.preflight.verdict.product import Product, Verdict
from haliax_fp8.recipes import supported
from haliax_fp8.serving import parity
from haliax_fp8.statistics import Distance, LayerComparison, ModelComparison


def wide_names():
    """Layers whose paths are long and have a beginning in common."""
    In, Out = hax.make_axes(embedding=16, intermediate=32)
    linear = lambda seed: hnn.Linear.init(In, Out, key=jax.random.key(seed))
    names = ("query_projection", "key_projection", "value_projection", "a_projection_with_a_very_long_name_of_its_own")
    return {"decoder": {"blocks": {"self_attention": {name: linear(i) for i, name in enumerate(names)}}}}


@pytest.fixture(scope="module")
def statistics():
    model, x = (
        fp8_linear_layers(wide_names(), recipe="current"),
        hax.ones((hax.Axis("batch", 16), hax.Axis("embedding", 16))),
    )
    layers = lambda model: model["decoder"]["blocks"]["self_attention"].values()
    return eqx.filter_jit(quantization_statistics)(
        model, lambda model: sum(hax.sum(layer(x)).scalar() for layer in layers(model))
    )


@pytest.fixture(scope="module")
def report():
    """A step with products as large models have them, of all verdicts."""
    small = inspect_step(lambda a, b: a @ b, jnp.ones((8, 8)), jnp.ones((8, 8)), device="local")
    one = Product(
        layer="",
        name="fprop",
        scope="jit(step)/jvp(Attention)/contract head_dim -> batch, position, kv_heads, group/dot_general",
        batch=1,
        m=8192,
        n=128256,
        k=14336,
        lhs="f8e4m3fn",
        rhs="f8e4m3fn",
        widened="",
        out="bf16",
        compute="bf16",
        written="bf16",
        block_scaled=False,
        indivisible="",
        implementation="cublasLt f8",
        groups=1,
        surplus=1.0,
        executions=131,
        bytes=1,
        verdict=Verdict.FP8,
        reason="",
    )
    layer = "model.blocks.stacked.attention.a_projection_with_a_very_long_name"
    emulated = {"verdict": Verdict.EMULATED, "lhs": "f8e5m2", "reason": "no launch reads operands of this shape in FP8"}
    products = [dataclasses.replace(one, layer=layer, name=name) for name in ("fprop", "dgrad", "wgrad")]
    products += [
        dataclasses.replace(one, layer="model.blocks.stacked.mlp.up", name=name, **emulated)
        for name in ("fprop", "dgrad")
    ]
    bf16 = {"verdict": Verdict.HIGH_PRECISION, "lhs": "bf16", "rhs": "bf16", "reason": "not converted"}
    products += [dataclasses.replace(one, batch=64, name=name, **bf16) for name in ("forward", "backward")]
    step = dataclasses.replace(small.step, products=tuple(products))
    return PreflightReport(compilable_devices["h100"], {"data": 1}, step, baseline=step)


def curves():
    statistics = {"saturation": 0.12345, "underflow": 0.00123}
    curve = lambda loss, **given: lm_report.Curve([3.0, loss], [(2, loss)], 123456.0, 12345.0, given)
    names = ("fp8 delayed", "fp8 rowwise_with_gw_hp", "fp8 deepseek")
    return {"bf16": curve(1.2345), **{name: curve(1.2567, **statistics) for name in names}}


def runs():
    return {name: [vit_report.Run([0.1], [98.765]), vit_report.Run([0.1], [97.654])] for name in ("bf16", "FP8")}


def served():
    one = serve_lm.Served("weight_only", None, 12_345_678, 12_345_678, 1.2345, 1.2e-5, 0.987, 0.0123)
    return [one, dataclasses.replace(one, scheme="mxfp8")]


PROJECTION = "model.layers.17.self_attn.a_projection_with_a_very_long_name_of_its_own"
FOLDER = pathlib.Path("/runs/a-model-with-a-long-name-of-its-own/exported")


def loaded():
    changed = {f"{PROJECTION}.dot_general.state.table": "history of 16 amaxes in the checkpoint, 1024 here: padded"}
    return LoadReport(("a",) * 128, changed, {f"{PROJECTION}.weight": "shape (64, 64) in the checkpoint"}, ("old",))


def mismatch():
    one = parity.Difference(mean=1.23e-05, largest=0.0123, kl=1.23e-05, k3=1.24e-05, agreement=0.98765, equal=0.01234)
    return parity.Mismatch(one, one, 123_456)


def exported():
    sizes = 12_345, 123_456_789_012, 1_234, 12_345_678_901
    ignore = tuple(f"{PROJECTION}.{i}" for i in range(7))
    return ExportReport(FOLDER, "FP8_DYNAMIC", *sizes, {"state of training": 12_000, "recipe of training": 345}, ignore)


def explained():
    found = layout_of(layouts["FP8_BLOCK"].config_files([])[0])
    engine = engines[0]._replace(verdict="aKernelWithAVeryLongNameOfItsOwnThatIsFolded")
    kinds = ("weights in FP8", "scales", "in high precision", "of unknown types")
    held = dict.fromkeys(kinds, Held(24_690, 234_567_890_123))
    return Explanation(FOLDER, found, held, (engine,))


def converted():
    weights = (Converted("a", True, 0.0), Converted(f"{PROJECTION}.weight", False, 0.01234))
    return Conversion(FOLDER, "FP8_DYNAMIC", "MXFP8", weights, 1_234, (f"{PROJECTION}.k_scale",) * 4)


TABLES = {
    "load_into": lambda _: loaded(),
    "a complete load_into": lambda _: LoadReport(("a",) * 128, {}, {}, ()),
    "serving_mismatch": lambda _: mismatch(),
    "export_model": lambda _: exported(),
    "explain_folder": lambda _: explained(),
    "convert_folder": lambda _: converted(),
    "check_folder": lambda _: CheckReport(FOLDER, "FP8", 12, 345, (Fault("model.safetensors", PROJECTION, "a" * 90),)),
    "supported": lambda _: supported("mxfp8", "h100"),
    "formats": lambda _: format_table(format_rows()),
    "devices": lambda _: device_table(device_rows()),
    "describe": lambda _: describe(fp8_linear_layers(wide_names(), recipe="current"), device="h100"),
    "statistics": lambda request: request.getfixturevalue("statistics"),
    "statistics of a layer": lambda request: next(iter(request.getfixturevalue("statistics").ops.values())),
    "preflight": lambda request: request.getfixturevalue("report"),
    "every product": lambda request: request.getfixturevalue("report").in_full,
    "train_lm": lambda _: lm_report.results_table(curves(), "bf16"),
    "train_vit": lambda _: vit_report.results_table(runs(), [0, 1]),
    "serve_lm": lambda _: serve_lm.table(served(), "fp8 delayed", 0.0123),
}


def printed(table, width):
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(table)
    return console.file.getvalue()


def numbers(text):
    return collections.Counter(re.findall(r"[+-]?\d[\d.,×·^-]*", text))


@pytest.mark.parametrize("name", TABLES)
def test_a_table_fits(name, request):
    table = TABLES[name](request)
    whole = printed(table, 400)
    for width in (80, 120):
        text = printed(table, width)
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        assert numbers(text) == numbers(whole)


COMPARED = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.a_projection_with_a_very_long_name")


def distances(shape):
    """Numbers that are as wide as they get."""
    return Distance(*(jnp.full(shape, x, jnp.float32) for x in (1.2345, 0.00012345, 2.3456)))


def compared(count=12):
    of_layer = lambda shape: LayerComparison(*(distances(shape) for _ in range(6)))
    paths = (*(f"model.layers.stacked.{name}" for name in COMPARED), "lm_head", "pooler")
    layers = (*(of_layer((count,)) for _ in COMPARED), of_layer(()), of_layer(()))
    # One that the loss does not reach.
    layers = (*layers[:-1], jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), layers[-1]))
    return ModelComparison(paths, layers, distances(()), True)


@pytest.mark.parametrize("width", (60, 80, 120))
def test_a_comparison_says_once_what_its_paths_begin_with(width):
    """However narrow: every index and every number is whole, and stands on one line with the end of its name."""
    text = printed(compared(), width)
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width and "…" not in text
    count = sum(line.lstrip().startswith("layer ") for line in lines)
    assert count == {60: 4, 80: 2, 120: 2}[width], "columns that do not fit are in a table below"
    first = lines.index(next(line for line in lines if line.lstrip().startswith("layer ")))
    assert "alone" in lines[first] and "SQNR" in lines[first]
    for words in ("model.layers", ".stacked", "lm_head", "pooler", "mlp.gate_proj[7]", "self_attn.q_proj[11]"):
        assert text.count(words) == count, words
    for i in range(12):
        assert text.count(f"[{i}]") == len(COMPARED) * count
    assert text.count("reached") == 2, "the layer that the loss does not reach: forward, and in the gradients"
    # Of 49 layers with numbers, two relative errors forward and four in the gradients; and what the result differs by.
    for number, total in (("123.45%", 49 * 6 + 1), ("234.56%", 49), ("-1.8 dB", 49), ("1.2e-04", 49 * 2)):
        assert len(re.findall(rf"(?<=\s){re.escape(number)}(?=\s)", text)) == total


def test_a_comparison_of_the_worst_layers_fits():
    text = printed(compared().worst(3), 60)
    assert max(map(len, text.splitlines())) <= 60 and text.count("[2]") == 4


def test_a_word_that_fits_no_line_keeps_its_index():
    word = "projectionwithoutanydotsorunderscoresthatislongerthananyline"
    layer = compared(11).of_layers[0]
    text = printed(ModelComparison((f"model.{word}",), (layer,), distances(()), False), 60)
    tables = sum(line.lstrip().startswith("layer ") for line in text.splitlines())
    assert tables and text.count("[10]") == tables
    assert "…" not in text and max(map(len, text.splitlines())) <= 60


def test_titles_are_one_line_where_they_fit():
    """Rich breaks a title at the width of its table."""
    for table, title in (
        (LoadReport(("a",), {}, {}, ()), "Loaded: 1 kept, 0 changed, 0 fresh, 0 unused"),
        (LoadReport(("a",), {}, {}, ("b",)), "Loaded: 1 kept, 0 changed, 0 fresh, 1 unused"),
        (titled("A title that is much longer than its table"), "A title that is much longer than its table"),
        (titled("[bold]: a name in brackets"), "[bold]: a name in brackets"),
    ):
        assert printed(table, 80).splitlines()[0].rstrip() == title


def titled(title):
    table = new_table(title)
    table.add_column("one")
    return table


def test_what_is_supported_prints_in_a_notebook_too():
    found = supported("delayed", "h100")
    assert repr(found) == str(found) == "native on NVIDIA H100 80GB HBM3: its matrix units multiply E4M3 and E5M2"
    assert "native on NVIDIA H100" in found._repr_html_()


def test_the_verdict_comes_first_and_attention_is_one_row(report):
    lines = printed(report, 80).splitlines()
    assert re.match(r"1\.00× as fast as the baseline \(estimate, .*of the FLOPs in FP8|1\.00×", lines[0])
    rows = [line for line in lines if "FP8   " in line or "emulated" in line or "bf16  " in line]
    assert sum("attention (no weights)" in line for line in lines) == 1
    assert any("mlp.up" in row and row.count("emulated") == 2 for row in rows)
    assert sum(line.strip() == "model.blocks.stacked" for line in lines) == 1


def test_the_width_is_that_of_columns(monkeypatch, statistics):
    """`COLUMNS` decides; and no escape sequence is in a text, with `NO_COLOR` or without."""
    monkeypatch.setenv("COLUMNS", "100")
    assert columns() == 100
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, str(statistics).splitlines())) <= 80
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in str(statistics)
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    console.print(statistics)
    assert not re.search(r"\x1b\[[\d;]*3\d", console.file.getvalue())


def test_what_a_result_means():
    found = curves()
    line = lm_report.verdict(
        {name: found[name] for name in ("bf16", "fp8 delayed")}, "bf16", emulated=True, is_documented=True
    )
    assert line.startswith(
        "fp8 delayed ends 1.80 % above bf16. From seed to seed, the gap of a single run scatters by 0.4 to 0.7 %"
    )
    slower = found | {"fp8 delayed": dataclasses.replace(found["fp8 delayed"], tokens_per_second=1.0)}
    assert lm_report.verdict(slower, "bf16", emulated=True, is_documented=False).endswith("because a CPU emulates it.")
    assert "emulates" not in lm_report.verdict(slower, "bf16", emulated=False, is_documented=False)
    assert lm_report.verdict(found, None, emulated=True, is_documented=True) == ""
    assert vit_report.verdict(runs()) == (
        "FP8 ends level with bf16, the mean of 2 seeds; bf16 itself differs by 1.11 points."
    )
