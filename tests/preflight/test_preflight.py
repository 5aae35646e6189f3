"""What a preflight says of a step: planted mistakes are found and named, requirements are held, all can be printed."""

import dataclasses
import functools
import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from compiled_models import abstract, struct
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from packaging.requirements import Requirement
from rich.console import Console

import haliax_fp8 as fp8
from haliax_fp8.preflight import (
    CompilableGpu,
    PreflightError,
    Verdict,
    check_fp8_call,
    compilable_devices,
    inspect_step,
)
from haliax_fp8.preflight.compilers import NVIDIA
from haliax_fp8.preflight.devices import CUDNN, as_compilable


def gpu(name):
    """A device that needs XLA's GPU compiler."""
    missing = compilable_devices[name].missing()
    skip = pytest.mark.skipif(missing is not None, reason=missing or "")
    return pytest.param(name, marks=[skip, pytest.mark.slow])


WIDTH, TOKENS = 256, 512


def mlp(width=WIDTH):
    return eqx.nn.MLP(WIDTH, WIDTH, width, 2, use_bias=False, use_final_bias=False, key=jax.random.key(0))


def converted(config=None, width=WIDTH, dtype=jnp.bfloat16):
    return abstract(lambda: fp8.fp8_linear_layers(mlp(width), config), dtype)


def step(model, x):
    return fp8.filter_grad(lambda model: (jax.vmap(model)(x).astype(jnp.float32) ** 2).mean())(model)


# What keeps products in cuBLASLt, and with it full accumulation; `test_preflight_flags.py` has XLA's defaults.
CUBLASLT = {"xla_gpu_enable_triton_gemm": False}


def report_of(device, model, x=None, **options):
    if isinstance(as_compilable(device), CompilableGpu):
        options = {"compiler_options": CUBLASLT, **options}
    return inspect_step(step, model, struct(TOKENS, WIDTH) if x is None else x, device=device, **options)


everywhere = pytest.mark.parametrize("device", ["local", gpu("h100")])


# --- Planted mistakes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["local", gpu("l40s")])
def test_a_converted_model_asks_for_fp8_in_all_its_products(device):
    report = report_of(device, converted())
    wanted = Verdict.EMULATED if device == "local" else Verdict.FP8
    assert len(report.products) == 8 and {p.verdict for p in report.products} == {wanted}
    assert report.step.flops == 2 * 8 * TOKENS * WIDTH**2
    report.require(asked_flops=1.0)
    if device != "local":
        report.require(fp8_flops=1.0)
        assert {p.implementation for p in report.products} == {"cublasLt f8"}


@everywhere
def test_a_layer_left_in_bf16(device):
    report = report_of(device, converted(fp8.Fp8Config(targets=["layers.0", "layers.2"])))
    wrong = [p for p in report.products if p.verdict is Verdict.HIGH_PRECISION]
    assert {p.layer for p in wrong} == {"model.layers.1"} and len(wrong) == 3
    assert {p.reason for p in wrong} == {"not among the targets"}
    with pytest.raises(
        PreflightError, match=r"(?s)asked_flops=0.95.*0\.6250.*model\.layers\.1 .*not among the targets"
    ) as error:
        report.require(asked_flops=0.95)
    assert "model.layers.0" not in str(error.value)


@everywhere
def test_the_rule_that_left_a_layer_alone_is_named(device):
    report = report_of(device, converted(fp8.Fp8Config(targets=["layers.0", "layers.1"], exclude="layers.1")))
    reasons = {(p.layer, p.reason) for p in report.products if p.verdict is Verdict.HIGH_PRECISION}
    assert reasons == {("model.layers.1", "excluded by 'layers.1'"), ("model.layers.2", "not among the targets")}


@pytest.mark.parametrize("argument", [hax.ones({"rows": 16}), fp8.Fp8DotGeneral.init(), None, [], jax.nn.relu])
def test_an_argument_without_layers(argument):
    """Reasons are looked for in every argument of a step."""
    model = fp8.fp8_linear_layers(eqx.nn.MLP(16, 16, 16, 1, key=jax.random.key(0)), exclude="layers.1")
    step = lambda run, argument, x: jax.vmap(run[0])(x)
    report = inspect_step(step, (model, ()), argument, struct(16, 16, dtype=jnp.float32), device="local")
    assert [p.reason for p in report.products][1:] == ["excluded by 'layers.1'"]


@everywhere
def test_a_dimension_that_is_no_multiple_of_16(device):
    report = report_of(device, converted(width=4095))
    named = {p.indivisible for p in report.products}
    assert all("4095" in sizes for sizes in named)
    # As written: what XLA pads is not the model's work.
    assert report.step.flops == 2 * TOKENS * (3 * (2 * WIDTH * 4095 + 4095**2) - WIDTH * 4095)
    if device != "local":
        assert any("4095" in finding and "padded" in finding for finding in report.findings)


@everywhere
def test_a_model_in_float32(device):
    x = struct(TOKENS, WIDTH, dtype=jnp.float32)
    report = report_of(device, converted(dtype=jnp.float32), x)
    assert {p.compute for p in report.products if p.name in ("fprop", "dgrad")} == {"f32"}
    assert any("float32" in finding and "bfloat16" in finding for finding in report.findings)
    plain = report_of(device, abstract(mlp, jnp.float32), x)
    assert {p.reason for p in plain.products} == {"not converted, in float32"}
    good = report_of(device, converted())
    assert not any("float32" in finding for finding in good.findings)


@pytest.mark.slow
@pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason="needs the package jax-cuda13-pjrt")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_layers_without_anything_between_compile(dtype):
    """XLA lets cuBLASLt quantize a product's result for the next product, and fails on amaxes that it takes for its."""
    make = lambda: eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 2, activation=lambda x: x, use_bias=False, key=jax.random.key(0))
    model = abstract(lambda: fp8.fp8_linear_layers(make()), dtype)
    for gradient_of in (fp8.filter_grad, eqx.filter_grad):
        gradient = gradient_of(lambda model, x: (jax.vmap(model)(x).astype(jnp.float32) ** 2).mean())
        report = inspect_step(
            gradient, model, struct(2048, WIDTH, dtype=dtype), device="h100", compiler_options=CUBLASLT
        )
        assert report.fp8_share == 1.0


def quantize_dequantize(w, x):
    """What many write: rounded to FP8 and back by a scale for each row, and multiplied in bfloat16."""

    def round_trip(x):
        scale = jnp.max(jnp.abs(x), axis=-1, keepdims=True).astype(jnp.float32) / 448
        data = jnp.clip(x.astype(jnp.float32) / scale, -448, 448).astype(jnp.float8_e4m3fn)
        return (data.astype(jnp.float32) * scale).astype(jnp.bfloat16)

    return jnp.dot(round_trip(x), round_trip(w).T)


@everywhere
def test_a_quantize_dequantize_pattern(device):
    report = inspect_step(quantize_dequantize, struct(WIDTH, WIDTH), struct(TOKENS, WIDTH), device=device)
    (product,) = report.products
    assert product.verdict is Verdict.EMULATED and product.reason.startswith("quantize-dequantize")
    with pytest.raises(PreflightError, match=r"fp8_flops.*\n.*quantize-dequantize"):
        report.require(fp8_flops=0.5)


@pytest.mark.parametrize("device", [gpu("a100")])
def test_a_device_without_fp8(device):
    """XLA drops the rounding there: nothing in the compiled program tells that FP8 was asked for."""
    report = report_of(device, converted())
    assert {p.verdict for p in report.products} == {Verdict.EMULATED}
    assert all("compute capability 8.9" in p.reason for p in report.products)
    assert report.fp8_share == 0
    with pytest.raises(PreflightError, match="A100"):
        report.require(fp8_flops=0.01)


# --- What a recipe asks for -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["deepseek", "mxfp8"])
def test_block_scaling_that_is_emulated(recipe):
    report = report_of("local", converted(fp8.Fp8Config(recipe=recipe)))
    assert {p.verdict for p in report.products} == {Verdict.EMULATED}
    assert all(p.reason.startswith("block scaling is emulated: the operands are dequantized") for p in report.products)
    assert {(p.layer, p.name) for p in report.products} >= {("model.layers.2", r) for r in ("fprop", "dgrad", "wgrad")}


def test_a_product_that_the_recipe_keeps():
    report = report_of("local", converted(fp8.Fp8Config(recipe="rowwise_wgrad_bf16")))
    high_precision = [p for p in report.products if p.verdict is Verdict.HIGH_PRECISION]
    assert {p.name for p in high_precision} == {"wgrad"} and len(high_precision) == 3
    assert {p.reason for p in high_precision} == {"the recipe keeps this product in high precision"}


@pytest.mark.more
def test_rotations_are_told_from_the_products_that_they_are_for():
    keyed = lambda model, x: step(fp8.with_rounding_keys(model, jax.random.key(0)), x)
    report = inspect_step(keyed, converted(fp8.Fp8Config(recipe="nvfp4")), struct(TOKENS, WIDTH), device="local")
    rotations = [p for p in report.products if p.reason == "rotates an operand"]
    products = [p for p in report.products if p not in rotations]
    assert {(p.name, p.verdict) for p in rotations} == {(r, Verdict.HIGH_PRECISION) for r in ("forward", "backward")}
    assert {(p.name, p.verdict) for p in products} == {(r, Verdict.EMULATED) for r in ("fprop", "dgrad", "wgrad")}
    assert sum(p.flops for p in products) == 2 * 8 * TOKENS * WIDTH**2
    assert {p.is_fp4 for p in products} == {True}
    assert str(report).startswith("100.0% of the FLOPs in FP4 on ")
    shown = json.loads(report.to_json())["step"]
    in_fp4 = {"products": len(products), "share": 1.0}
    assert shown["by_format"] == {"FP4": in_fp4, "FP8": {"products": 0, "share": 0.0}}
    assert shown["rotations"] == len(rotations) and f"rotations, not in these {len(rotations)}, " in " ".join(
        str(report).split()
    )
    report.require(asked_flops=1.0)


@pytest.mark.more
def test_products_with_kernels_in_fp4_are_not_called_fp8():
    rows = fp8.recipes.named["rowwise"]
    four = dataclasses.replace(rows, kernel=dataclasses.replace(rows.kernel, format=fp8.recipes.E2M1))
    config = fp8.Fp8Config(recipe=rows, overrides={"layers.1": four})
    report = inspect_step(step, converted(config), struct(TOKENS, WIDTH), device="local")
    assert [p.name for p in report.products if p.is_fp4] == ["fprop", "dgrad"]
    assert str(report).startswith("25.0% of the FLOPs in FP4 and 75.0% in FP8 on ")


@pytest.mark.more
@everywhere
def test_a_step_that_makes_ops_is_compiled_for_devices_that_are_not_here(device):
    """A state's first values are not computed on the step's devices."""
    measure = lambda model, x: fp8.quantization_statistics(model, lambda m: (jax.vmap(m)(x) ** 2).mean()).flat()
    report = inspect_step(measure, converted(width=64), struct(TOKENS, WIDTH), device=device)
    # Statistics need the outputs and their gradients, not those of the kernels.
    assert [p.name for p in report.products].count("dgrad") == 2 and len(report.products) == 5
    assert {p.verdict for p in report.products} == {Verdict.EMULATED if device == "local" else Verdict.FP8}


# --- The report -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared():
    peaks = dataclasses.replace(compilable_devices["h100"].peaks, fp8=2e12, bf16=1e12, f32=0.5e12, bandwidth=1e12)
    device = dataclasses.replace(compilable_devices["local"], peaks=peaks)
    return report_of(device, converted(), compare=(step, (abstract(mlp), struct(TOKENS, WIDTH))))


def test_a_baseline_is_counted_too(compared):
    assert compared.baseline.flops == compared.step.flops
    assert {p.verdict for p in compared.baseline.products} == {Verdict.HIGH_PRECISION}
    ratio = compared.step.memory.peak / compared.baseline.memory.peak
    assert compared.peak_memory_ratio == ratio
    compared.require(peak_memory_ratio=ratio)
    with pytest.raises(PreflightError, match="peak_memory_ratio"):
        compared.require(peak_memory_ratio=ratio * 0.99)


def test_the_estimate_is_the_roofline(compared):
    """By hand: a product takes as long as its FLOPs or bytes, others as their bytes; each its start; a step idles."""

    def by_hand(program, share, casts, launch):
        peak = {"f32": share * 0.5e12, "bf16": share * 1e12}
        runs = sum(p.executions for p in program.products)
        products = sum(max(p.flops / peak[p.lhs], p.executions * p.bytes / 0.75e12) for p in program.products)
        others = program.others
        # On a CPU nothing is transposed, and nothing else is quantized in blocks.
        assert others.bytes == others.traffic.plain + others.traffic.casts
        return (
            products + launch * runs,
            others.traffic.plain / 0.75e12 + others.traffic.casts / casts + launch * others.count,
            launch * (runs + others.count),
        )

    estimate = compared.baseline_estimate
    times = estimate.products, estimate.others, estimate.launching
    assert times == pytest.approx(by_hand(compared.baseline, 0.71, 0.54e12, 2e-6))
    # Less than 38 ms, beyond which 2.3 ms are less than 6 %.
    assert estimate.idle == pytest.approx(0.06 * (estimate.products + estimate.others)) and estimate.idle < 2.3e-3
    assert estimate.total == estimate.products + estimate.others + estimate.idle
    assert compared.speedup == estimate.total / compared.estimate.total
    # On a CPU nothing is in FP8, whose share has a range as well.
    ends = []
    for shares in ((0.78, 0.47e12, 2e-6), (0.71, 0.54e12, 2e-6), (0.75, 0.92e12, 0.0)):
        baseline, step = (sum(by_hand(p, *shares)[:2]) for p in (compared.baseline, compared.step))
        ends.append(baseline / step)
    assert compared.speedup_range == pytest.approx((min(ends), max(ends)))


def test_the_ratio_is_what_a_reader_sees_first(compared):
    text = " ".join(str(compared).split())
    low, high = compared.speedup_range
    assert text.startswith(f"{compared.speedup:.2f}× as fast as the baseline (estimate, {low:.2f} to {high:.2f})")
    assert " XLA flags: " in text
    assert compared.to_markdown().splitlines()[0].startswith("XLA flags: ")
    assert "as fast as" not in str(report_of("local", converted()))


def test_a_launch_bound_step_is_named(compared):
    """On a device that works faster than it launches; on the slow one of this comparison, nothing is said."""
    peaks = dataclasses.replace(compared.device.peaks, bf16=1e17, f32=1e17, bandwidth=1e15)
    bound = dataclasses.replace(compared, device=dataclasses.replace(compared.device, peaks=peaks))
    assert any(finding.startswith("the step is launch-bound: the overhead of its ") for finding in bound.findings)
    assert any(finding.startswith("the baseline is launch-bound") for finding in bound.findings)
    assert not any("launch-bound" in finding for finding in compared.findings)
    assert 0 < compared.step.others.small <= compared.step.others.count


def test_a_baseline_in_float32_is_named(compared):
    x = struct(TOKENS, WIDTH, dtype=jnp.float32)
    report = report_of("local", converted(), compare=(step, (abstract(mlp, jnp.float32), x)))
    assert any(finding.startswith("the baseline computes in float32") for finding in report.findings)
    # On a CPU bf16 is multiplied in float32 too, which is not what was asked for.
    assert not any("baseline computes" in finding for finding in compared.findings)


def test_no_speed_up_of_several_devices_without_what_they_send():
    peaks = compilable_devices["h100"].peaks
    device = dataclasses.replace(compilable_devices["local"], peaks=peaks)
    shared = lambda w, x: jax.grad(lambda w: ((x @ w) ** 2).mean())(w)
    args = struct(64, 32, dtype=jnp.float32), struct(64, 64, dtype=jnp.float32)
    options = {"device": device, "mesh": {"data": 4}, "shardings": (None, P("data"))}
    report = inspect_step(shared, *args, compare=shared, **options)
    assert report.step.collectives and report.estimate is not None
    assert report.speedup is None and report.speedup_range is None
    assert "as fast as" not in str(report) and any("no speedup is estimated" in f for f in report.findings)
    with pytest.raises(ValueError, match="speedup=1.0 cannot be required of 4 devices"):
        report.require(speedup=1.0)
    alone = inspect_step(shared, *args, device=device, compare=shared)
    assert alone.speedup == 1.0
    alone.require(speedup=1.0)


def test_a_baseline_may_be_another_function_of_the_same_arguments():
    double = inspect_step(
        lambda w, x: x @ w @ w, struct(16, 16), struct(8, 16), device="local", compare=lambda w, x: x @ w
    )
    assert double.step.flops == 2 * double.baseline.flops == 2 * 2 * 8 * 16 * 16


def test_what_needs_a_baseline_says_so():
    report = report_of("local", converted())
    assert report.peak_memory_ratio is None and report.speedup is None
    with pytest.raises(ValueError, match="compare="):
        report.require(peak_memory_ratio=1.0)
    with pytest.raises(ValueError, match="speedup=1.0 needs a baseline; pass compare="):
        report.require(speedup=1.0)
    compared = dataclasses.replace(report, baseline=report.step)
    with pytest.raises(ValueError, match="speedup=1.0 needs peak rates, which are not"):
        compared.require(speedup=1.0)


def test_a_requirement_is_a_number():
    """NaN is neither more nor less than anything, so every step would meet it."""
    with pytest.raises(ValueError, match="fp8_flops=nan of require must be a finite number"):
        report_of("local", converted()).require(fp8_flops=float("nan"))


def test_an_error_is_an_assertion():
    with pytest.raises(AssertionError):
        report_of("local", abstract(mlp)).require(asked_flops=1.0)


def test_json_has_every_product(compared):
    document = json.loads(compared.to_json())
    assert document["step"]["flops"] == compared.step.flops
    assert sum(product["flops"] for product in document["step"]["products"]) == compared.step.flops
    first = document["step"]["products"][0]
    assert (first["layer"], first["verdict"]) == (compared.products[0].layer, compared.products[0].verdict.value)
    others, in_json = compared.step.others, document["step"]["others"]
    assert (in_json["count"], in_json["bytes"], in_json["small"]) == (others.count, others.bytes, others.small)
    assert in_json["traffic"]["casts"] == others.traffic.casts > 0
    assert document["device"]["peaks"]["bandwidth"] == 1e12 and document["mesh"] == {"devices": 1}
    assert document["findings"] and document["caveats"] == list(compared.caveats)


@pytest.mark.parametrize("in_full", [False, True])
def test_text_and_markdown_say_the_same(compared, in_full):
    wide = Console(width=500, file=io.StringIO())  # No line breaks.
    wide.print(compared.in_full if in_full else compared.__rich__())
    text, markdown = wide.file.getvalue(), compared.to_markdown(in_full=in_full)
    for words in ("100.0% of the FLOPs in FP8 on the local devices, emulated", "model.layers.0-2", "fprop"):
        assert words in text and words in markdown
    assert all(finding in text and finding in markdown for finding in (*compared.findings, *compared.caveats))
    tables = re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE)
    assert len(tables) == 2
    for table in tables:
        head, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
        assert {len(line) for line in lines} == {len(head)}
        assert all(cell.removeprefix("&emsp;") in text for line in (head, *lines) for cell in line)
    # Each product, and what the estimate assumes, are for those who ask.
    for shown in (text, markdown):
        assert ("TB/s" in shown) == in_full
        assert all(product.shape in shown for product in compared.products) == in_full


def test_alike_layers_share_a_line(compared):
    text = str(compared)
    assert text.count("wgrad") == 1 and "model.layers.0-2" in text


def test_layers_that_run_otherwise_have_rows_of_their_own():
    text = str(report_of("local", converted(fp8.Fp8Config(exclude="layers.1"))))
    (rows,) = re.findall(r"model\.layers\n((?:   .*\n)+)", re.sub(r" +\n", "\n", text))
    assert [line.split()[0] for line in rows.splitlines()] == ["0,2", "1"]
    assert ["emulated" in line for line in rows.splitlines()] == [True, False]


def test_progress_is_told():
    said = []
    inspect_step(lambda x: x, struct(4), device="local", compare=lambda x: x, progress=said.append)
    assert len(said) == 2 and "step" in said[0] and "baseline" in said[1]


# --- Devices and meshes -----------------------------------------------------------------------------------------------


def test_unknown_devices_are_named():
    with pytest.raises(ValueError, match=r"the 1 arguments in args: missing.*inspect_step\(step"):
        inspect_step(lambda model, x: x, jnp.ones(2), device="local")
    with pytest.raises(ValueError, match=r"device='h1000' is unknown.*h100, h200"):
        inspect_step(lambda x: x, struct(4), device="h1000")


@pytest.mark.parametrize(
    "name, package, remedy",
    [("h100", "xla_cuda13", "install-compiler nvidia"), ("tpu7x", "libtpu", "install-compiler tpu")],
)
def test_a_missing_package_is_one_line_with_the_remedy(name, package, remedy, monkeypatch, tmp_path):
    import importlib.util

    monkeypatch.setattr(sys, "prefix", str(tmp_path))  # beneath which `install-compiler` puts the one for GPUs
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if package in name else find(name))
    with pytest.raises(RuntimeError, match=remedy) as error:
        inspect_step(lambda x: x, struct(4), device=name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"devices": 3, "mesh": {"data": 2}}, "devices=3, but mesh has 2"),
        ({"devices": 0}, "devices=0"),
        ({"devices": 1000}, "this machine has 4"),
        ({"shardings": (P("data"), P("data"))}, "not a prefix"),
    ],
)
def test_what_does_not_fit_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        inspect_step(lambda x: x, struct(4), device="local", **options)


def test_shardings_of_arguments_are_kept():
    mesh = AbstractMesh((4,), ("data",))
    x = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    report = inspect_step(lambda x, w: x @ w, x, struct(8, 8, dtype=jnp.float32), device="local", mesh=mesh)
    assert report.step.flops == 2 * 16 * 8 * 8 // 4
    explicit = inspect_step(
        lambda x, w: x @ w, struct(16, 8), struct(8, 8), device="local", mesh=mesh, shardings=(P("data"), None)
    )
    assert explicit.step.flops == report.step.flops


@pytest.mark.parametrize(
    "alias, name", [("H100", "h100"), ("RTX 4090", "rtx4090"), ("v6e", "tpu6e"), ("TPU v5e", "tpu5e")]
)
def test_a_device_has_one_entry_and_other_names_lead_to_it(alias, name):
    assert as_compilable(alias) is compilable_devices[name]
    assert fp8.devices.Device.by_name(alias) == fp8.devices.Device.by_name(name) == compilable_devices[name].hardware


def test_peaks_by_format():
    h100, a100 = compilable_devices["h100"].peaks, compilable_devices["a100"].peaks
    assert h100.flops("f8e5m2") / h100.flops("bf16") == pytest.approx(2, rel=1e-3)
    assert h100.flops("f16") == h100.flops("bf16") and h100.flops("f64") == h100.flops("f32") < h100.flops("bf16")
    assert a100.fp8 == a100.bf16
    for device in compilable_devices.values():
        assert device.peaks is None or device.peaks.fp8 >= device.peaks.bf16 >= device.peaks.f32 > 0


@pytest.mark.parametrize(
    "name, lacks", [("h100", False), ("l40s", False), ("a100", True), ("tpu6e", True), ("tpu7x", False)]
)
def test_which_devices_have_fp8(name, lacks):
    assert (compilable_devices[name].lacks("f8e4m3fn") is not None) == lacks
    assert compilable_devices[name].lacks("bf16") is None


@pytest.mark.parametrize("name", ["h100", "tpu7x", "tpu6e"])
@pytest.mark.parametrize("dtype", ["f8e4m3b11fnuz", "f8e4m3", "f8e3m4", "f4e2m1fn"])
def test_narrow_types_that_no_unit_multiplies(name, dtype):
    """Only cuDNN has products of FP4, in blocks."""
    device = compilable_devices[name]
    expected = None if (name, dtype) == ("h100", "f4e2m1fn") else f"{device.kind} has no products of {dtype}"
    assert device.lacks(dtype) == expected
    assert device.lacks("f8e8m0fnu") is None and device.lacks("s8") is None  # scales, and other products


def plugin():
    """JAX's package for NVIDIA GPUs, in the environment or where `install-compiler` put it; None without it."""
    places = [*sys.path, str(NVIDIA.directory)]
    return next(iter(importlib.metadata.distributions(name="jax-cuda13-plugin", path=places)), None)


@pytest.mark.skipif(plugin() is None, reason="needs the package jax-cuda13-plugin")
def test_jax_installs_the_cudnn_that_xla_is_told():
    required = map(Requirement, plugin().requires)
    (cudnn,) = (requirement.specifier for requirement in required if requirement.name == "nvidia-cudnn-cu13")
    assert cudnn.contains(CUDNN)
    assert {gpu.cudnn for gpu in compilable_devices.values() if isinstance(gpu, CompilableGpu)} == {CUDNN}


@pytest.mark.parametrize("cudnn", ["9.14", "9.28.1.4", "v9.28.1", ""])
def test_a_cudnn_that_is_no_version(cudnn):
    with pytest.raises(ValueError, match=r"cudnn='.*' of b200 is not a version such as '9\.28\.1'"):
        dataclasses.replace(compilable_devices["b200"], cudnn=cudnn)


@pytest.mark.slow
@pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason="needs the package jax-cuda13-pjrt")
def test_what_saves_time_changes_no_launch(compiled):
    """Programs are compiled without the fusion autotuner and with unoptimized machine code; nothing else differs."""
    x = struct(TOKENS, WIDTH)
    quick, _ = compiled(step, converted(), x, device="h100")
    products = {"xla_gpu_enable_triton_gemm": False}
    defaults = {"xla_gpu_experimental_enable_fusion_autotuner": True, "xla_backend_optimization_level": 3}
    slow, _ = compiled(step, converted(), x, device="h100", compiler_options=products | defaults)
    # Without what XLA writes behind an instruction, among it that the autotuner was there.
    instructions = lambda text: [line for line in text.splitlines() if line.startswith("  ") and " = " in line]
    launched = lambda text: [line.split(", metadata=")[0].split(", backend_config=")[0] for line in instructions(text)]
    assert launched(quick) == launched(slow)
    assert any("fusion(" in line for line in launched(quick))


@pytest.mark.slow
@pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason="needs the package jax-cuda13-pjrt")
def test_eight_gpus_gather_weights_in_fp8():
    """FSDP: kernels are sharded, quantized where they are, and travel as one byte for each weight."""
    model = converted(fp8.Fp8Config(recipe="current"))
    report = report_of("h100", model, mesh={"data": 8}, shardings=(P("data"), P("data")))
    assert report.fp8_share == 1.0
    gathered = sum(c.bytes * c.executions for c in report.step.collectives if c.kind == "all-gather")
    assert {c.dtype for c in report.step.collectives if c.kind == "all-gather"} == {"f8e4m3fn"}
    # Each once: what the forward pass gathered is kept for dgrad, as quantizing again would measure the kernel again.
    assert gathered == 3 * WIDTH**2
    assert report.step.flops == 2 * 8 * TOKENS * WIDTH**2 // 8


# --- The check of Flax's guide ----------------------------------------------------------------------------------------


def fp8_dot(a, b):
    return jnp.dot(a.astype(jnp.float8_e4m3fn), b.astype(jnp.float8_e4m3fn), preferred_element_type=jnp.float32)


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
@pytest.mark.parametrize("function, is_fp8", [(fp8_dot, True), (jnp.dot, False)])
def test_check_of_the_guide(jit, function, is_fp8, capsys):
    lowered = jit(function).lower(jnp.ones((16, 32)), jnp.ones((32, 64)))
    check_fp8_call(lowered)
    assert capsys.readouterr().out == ("Fp8 call detected!\n" if is_fp8 else "No Fp8 call!\n")
    # On a CPU nothing multiplies in FP8.
    assert not inspect_step(function, jnp.ones((16, 32)), jnp.ones((32, 64)), device="local").has_fp8_product


class Rewritten:
    """A lowered function whose operands XLA's compiler for GPUs narrows."""

    def as_text(self):
        return "module @jit_f {}"

    def compile(self):
        return SimpleNamespace(as_text=lambda: self.PROGRAM)

    PROGRAM = """HloModule jit_f, is_scheduled=true

ENTRY %main (a: f8e4m3fn[16,32], b: f8e5m2[32,64]) -> f32[16,64] {
  %a = f8e4m3fn[16,32]{1,0} parameter(0)
  %b = f8e5m2[32,64]{1,0} parameter(1)
  ROOT %d = f32[16,64]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_the_check_sees_what_xla_multiplies_in_fp8_unasked(capsys):
    check_fp8_call(Rewritten())
    assert capsys.readouterr().out == "Fp8 call detected!\n"


@pytest.mark.parametrize("program", [fp8_dot, 3, None])
def test_what_is_no_program_is_refused(program):
    with pytest.raises(ValueError, match=r"is of type \w+; pass jax.jit\(f\).lower\(\*args\)"):
        check_fp8_call(program)


def run_alone(code):
    """Runs code in a process of its own, where JAX has not started yet."""
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason="needs the package jax-cuda13-pjrt")
def test_mosaic_may_have_been_imported_before():
    """Where it is imported, JAX notes where its compiler is, and does not find one that is no package."""
    code = (
        "import os, equinox as eqx, jax, jax.numpy as jnp\n"
        "from jax.experimental.pallas import mosaic_gpu\n"
        "before = dict(os.environ)\n"
        "import haliax_fp8 as fp8\n"
        "from haliax_fp8.preflight import inspect_step\n"
        "op = eqx.filter_eval_shape(lambda: fp8.Fp8DotGeneral.init('delayed'))\n"
        "shapes = ((1024, 256), 'bfloat16'), ((4, 256, 512), 'bfloat16'), ((4,), 'int32')\n"
        "args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]\n"
        "call = lambda op, x, w, sizes: op.ragged_dot(x, w, sizes)\n"
        "(product,) = inspect_step(call, op, *args, device='h100').products\n"
        "assert product.implementation == 'grouped f8', product\n"
        "assert os.environ == before\n"
    )
    run = run_alone(code)
    assert run.returncode == 0, run.stderr


@pytest.mark.more
def test_the_process_keeps_its_backend():
    code = (
        "import jax, jax.numpy as jnp\n"
        "from haliax_fp8.preflight import inspect_step\n"
        "inspect_step(lambda x: x @ x, jax.ShapeDtypeStruct((16, 16), jnp.float32), device='local')\n"
        "assert jax.default_backend() == 'cpu' and jnp.ones(2).sum() == 2\n"
    )
    run = run_alone(code)
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr


@pytest.mark.slow
@pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason="needs the package jax-cuda13-pjrt")
def test_arguments_on_the_host_are_not_on_the_device():
    """JAX drops their memory kind, as no memory of a described GPU has that name; the report does not."""
    mesh = jax.make_mesh((1,), ("data",))
    on_host = jax.sharding.NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    weight = jax.ShapeDtypeStruct((256, 64), jnp.float32, sharding=on_host)
    x = struct(16, 256, dtype=jnp.float32)
    multiply = lambda w, x: x @ jax.device_put(w, jax.memory.Space.Device)
    on_four = functools.partial(inspect_step, multiply, device="h100", mesh={"data": 4})
    of_array = on_four(weight, x)
    plain = struct(256, 64, dtype=jnp.float32)
    shardings = (on_host, None)
    of_spec = inspect_step(multiply, plain, x, device="h100", mesh={"data": 4}, shardings=shardings)
    for report in (of_array, of_spec):
        memory = report.step.memory
        assert (memory.host, memory.arguments) == (4 * 256 * 64 // 4, 4 * 16 * 256)
        assert memory.peak == memory.arguments + memory.outputs + memory.temporaries
        assert any(note.startswith("16.4 kB of the arguments are in the host's memory") for note in report.caveats)
        assert "arguments on the host" in str(report)
