"""The project's own preflight: every product of every kind of model and of every recipe, on every device.

What the project claims of itself; `test_preflight_products.py` holds that the reader of programs counts right.
"""

from collections import Counter

import pytest
from compiled_models import (
    FLOPS,
    KINDS,
    ONE_BLOCK,
    SwiGLU,
    converted,
    gradient_of,
    inputs,
    on,
    plain,
    unknown_calls,
    with_one_architecture,
)

import haliax_fp8 as fp8
from haliax_fp8.preflight import Verdict, inspect_step


E4M3, E5M2, E2M1 = "f8e4m3fn", "f8e5m2", "f4e2m1fn"
XLA_NAMES = {"E4M3": E4M3, "E5M2": E5M2, "E2M1": E2M1}
IN_BLOCKS_OF_32 = ("deepseek", "mxfp8", "mxfp8_square", "mxfp4_mxfp8")
IN_BLOCKS_OF_16 = ("nvfp4", "nvfp4_delayed")


def total(products, figure):
    """The sum of a figure over the products of each name."""
    sums = Counter()
    for product in products:
        sums[product.name] += figure(product)
    return dict(sums)


def layers(products):
    """The name and the layer of each product; XLA may merge products with an operand in common."""
    return {(p.name, path.rsplit(".", 1)[-1]) for p in products for path in p.layer.split(" + ")}


# --- Every kind of model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "device"), with_one_architecture(on(KINDS)))
def test_every_product_of_a_model_runs_in_fp8(name, device):
    kind = KINDS[name]
    options = {} if device == "tpu7x" else {"compiler_options": {"xla_gpu_enable_triton_gemm": False}}
    report = inspect_step(gradient_of(kind.call), converted(kind), inputs(), device=device, **options)
    report.require(fp8_flops=1.0)
    formats = {(p.name, *sorted((p.lhs, p.rhs)), p.verdict) for p in report.products}
    assert formats == {
        ("fprop", E4M3, E4M3, Verdict.FP8),
        ("dgrad", E4M3, E5M2, Verdict.FP8),
        ("wgrad", E4M3, E5M2, Verdict.FP8),
    }
    runs = kind.runs(len(SwiGLU.names))
    assert total(report.products, lambda p: p.executions) == runs
    assert total(report.products, lambda p: p.useful_flops) == {product: n * FLOPS for product, n in runs.items()}
    assert layers(report.products) == {(product, name) for product in runs for name in SwiGLU.names}
    if name == "experts":
        assert {p.implementation for p in report.products} == {"grouped f8"}
    elif device != "tpu7x":
        assert {p.implementation for p in report.products} == {"cublasLt f8"}
    assert report.step.unknown_loops == 0 and not report.step.opaque and unknown_calls(report.step) == set()


@pytest.mark.parametrize("name", ["vmapped Equinox", "twice vmapped Equinox"])
def test_on_the_cpu_too_each_gradient_is_one_product(name):
    kind = KINDS[name]
    report = inspect_step(gradient_of(kind.call), converted(kind), inputs(), device="local")
    assert total(report.products, lambda p: 1) == kind.runs(len(SwiGLU.names))
    report.require(asked_flops=1.0)


@pytest.mark.parametrize(("name", "device"), on(["scan"], ["h100", "tpu7x"]))
def test_a_plain_model_runs_none(name, device):
    """The same reading, on what it must not find."""
    report = inspect_step(gradient_of(KINDS[name].call), plain(KINDS[name]), inputs(), device=device)
    assert report.fp8_share == 0.0
    assert {(p.lhs, p.rhs, p.verdict) for p in report.products} == {("bf16", "bf16", Verdict.HIGH_PRECISION)}


@pytest.mark.parametrize(("name", "device"), on(["scan"], ["tpu6e"]))
def test_a_device_without_fp8_is_told(name, device):
    """All products are there, and none is in FP8."""
    kind = KINDS[name]
    report = inspect_step(gradient_of(kind.call), converted(kind), inputs(), device=device)
    runs = kind.runs(len(SwiGLU.names))
    assert total(report.products, lambda p: p.flops) == {product: n * FLOPS for product, n in runs.items()}
    assert {(p.verdict, "TPU7x" in p.reason) for p in report.products} == {(Verdict.EMULATED, True)}


# --- Every recipe -----------------------------------------------------------------------------------------------------

DEQUANTIZED = "block scaling is emulated: the operands are dequantized and multiplied in"
# Recipe and device: the element type that is multiplied, and what the report has to say.
EMULATED = {
    **{(recipe, "h100"): (E4M3, "block-scaled products need compute capability 10.0") for recipe in IN_BLOCKS_OF_32},
    **{(recipe, "tpu7x"): ("bf16", f"{DEQUANTIZED} bf16") for recipe in IN_BLOCKS_OF_32},
    **{(recipe, device): ("bf16", f"{DEQUANTIZED} bf16") for recipe in IN_BLOCKS_OF_16 for device in ("h100", "tpu7x")},
}


def expected(recipe, device, product):
    """What such products have to be: element types, verdict, and how the reason begins."""
    first, second = fp8.recipes.named[recipe].products[product]
    if not first.scaling.quantizes:
        return ("bf16", "bf16"), Verdict.HIGH_PRECISION, "the recipe keeps this product in high precision"
    if (recipe, device) in EMULATED:
        dtype, reason = EMULATED[recipe, device]
        return (dtype, dtype), Verdict.EMULATED, reason
    names = {XLA_NAMES[operand.format.name] for operand in (first, second)}
    # Every number of E2M1 is one of E4M3, in which it is multiplied with another.
    dtypes = (E4M3, E4M3) if names == {E2M1, E4M3} else tuple(sorted(names)) * (3 - len(names))
    return dtypes, Verdict.FP8, ""


@pytest.mark.parametrize(("recipe", "device"), on(["deepseek", "mxfp8"], ["h100"]))
def test_without_tritons_products_blocks_are_emulated_and_the_report_says_so(recipe, device):
    """XLA multiplies in bf16 then; on a B200 cuDNN multiplies blocks with either setting."""
    report = inspect_step(
        gradient_of(ONE_BLOCK.call),
        converted(ONE_BLOCK, recipe=recipe),
        inputs(),
        device=device,
        compiler_options={"xla_gpu_enable_triton_gemm": False},
    )
    assert {(p.name, p.verdict, p.lhs, p.rhs) for p in report.products} == {
        (name, Verdict.EMULATED, "bf16", "bf16") for name in ("fprop", "dgrad", "wgrad")
    }
    assert {p.reason for p in report.products} == {f"{DEQUANTIZED} bf16"}
    runs = ONE_BLOCK.runs(len(SwiGLU.names))
    assert total(report.products, lambda p: p.flops) == {product: n * FLOPS for product, n in runs.items()}


# Most are compiled for one block, which is quicker; of each way to multiply one in a scan. Delayed scaling is above.
SCANNED = {("current", "h100"), ("rowwise", "h100"), ("static", "h100"), ("mxfp8", "b200"), ("mxfp8", "tpu7x")}


@pytest.mark.parametrize(("recipe", "device"), on(recipe for recipe in fp8.recipes.named if recipe != "delayed"))
def test_every_product_is_what_the_recipe_says(recipe, device):
    """Where `supported` calls a recipe native, products are in its formats; where not, the report says why."""
    assert fp8.recipes.supported(recipe, device).is_native == ((recipe, device) not in EMULATED)
    kind = KINDS["scan"] if (recipe, device) in SCANNED else ONE_BLOCK
    report = inspect_step(gradient_of(kind.call), converted(kind, recipe=recipe), inputs(), device=device)
    assert unknown_calls(report.step) == set()
    runs = kind.runs(len(SwiGLU.names))
    products = [p for p in report.products if p.name in runs]
    for product in products:
        dtypes, verdict, reason = expected(recipe, device, product.name)
        operands = tuple(sorted((product.lhs, product.rhs)))
        if recipe in IN_BLOCKS_OF_16 and (device, operands) == ("tpu7x", ("bf16", "f32")):
            # Of one product in float32, a TPU reads an operand in bfloat16, in which it multiplies by default.
            assert product.name == "fprop"
            operands = dtypes
        assert (operands, product.verdict) == (dtypes, verdict), product
        assert product.reason.startswith(reason) and bool(product.reason) == bool(reason), product
    assert total(products, lambda p: p.flops) == {product: count * FLOPS for product, count in runs.items()}
    if recipe in (*IN_BLOCKS_OF_32, *IN_BLOCKS_OF_16) and device == "b200":
        assert {product.implementation for product in products} == {"cuDNN block scaled"}
    # Rotations are products too. The way from a product back to the weight does not lead through blocks of 16.
    rotations = {(p.verdict, p.reason) for p in report.products if p.name not in runs}
    if recipe in IN_BLOCKS_OF_16:
        assert rotations == {(Verdict.HIGH_PRECISION, "rotates an operand")}
    else:
        assert rotations == set()
    # Nor through both casts of a kernel in E2M1.
    if recipe not in (*IN_BLOCKS_OF_16, "mxfp4_mxfp8"):
        assert layers(products) == {(product, name) for product in runs for name in SwiGLU.names}
