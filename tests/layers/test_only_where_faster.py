"""FasterOn: which layers FP8 is predicted to pay for, what the prediction is, and what describe says of it."""

import dataclasses
import math
import re

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st

import haliax_fp8 as fp8
from haliax_fp8 import Fp8Config, describe, fp8_linear_layers
from haliax_fp8._product.spec import KernelResidual
from haliax_fp8.devices import Efficiency
from haliax_fp8.devices.catalog import peaks
from haliax_fp8.devices.device import devices
from haliax_fp8.devices.roofline import Roofline
from haliax_fp8.layers import FasterOn
from haliax_fp8.layers.predicted_time import LayerSize, LayerWork, predict
from haliax_fp8.recipes import E4M3, CurrentScaling, HadamardScaling, HighPrecision, Quantization


H100 = fp8.devices.Device.by_name("h100")
WITH_FP8 = ("h100", "h200", "b200", "l40s", "rtx4090", "tpu7x")


def linear(inputs, outputs):
    """An abstract layer: no weight is made."""
    In, Out = hax.Axis("in", inputs), hax.Axis("out", outputs)
    return eqx.filter_eval_shape(lambda: hnn.Linear.init(In, Out, key=jax.random.key(0), use_bias=False))


def predicted(tokens, inputs, outputs, device="h100", recipe="delayed", **options):
    rule, layer, stack = fp8.layers.HaliaxLinear(), linear(inputs, outputs), ()
    faster = FasterOn(device, tokens=tokens, **options)
    return faster.predict(rule, layer, stack, fp8.recipes.named[recipe], KernelResidual.REQUANTIZE_WHERE_CHEAP)


def gain(*args, **options):
    return predicted(*args, **options).gain


def converted(layers, **options):
    config = Fp8Config(targets=FasterOn(**options))
    return describe(fp8_linear_layers(layers, config), config=config)


# --- the prediction ---------------------------------------------------------------------------------------------------


def test_by_hand():
    """An up projection of Llama-8B at 8192 tokens on an H100: 962 GFLOP in each of three products."""
    flop = 2 * 8192 * 4096 * 14336
    bf16 = 3 * (flop / (0.75 * 989.4e12) + 2e-6)
    products = 3 * (flop / (0.72 * 1978.9e12) + 2e-6)
    # Read and written per element. Input and gradient: 2 + 1, and 1 + 1 to transpose. The kernel: 2 + 1 in the forward
    # pass and again in the backward pass.
    moved = 5 * 8192 * 4096 + 6 * 4096 * 14336 + 5 * 8192 * 14336
    # Three launches for each operand, and one for each product's scale.
    overhead = moved / (0.54 * 3.35e12) + 12 * 2e-6
    prediction = predicted(8192, 4096, 14336)
    assert prediction.bf16 == pytest.approx(bf16, rel=1e-12) == pytest.approx(3.896e-3, rel=1e-3)
    assert prediction.products == pytest.approx(products, rel=1e-12)
    assert prediction.overhead == pytest.approx(overhead, rel=1e-12) == pytest.approx(0.6361e-3, rel=1e-3)
    assert (prediction.overhead_bytes, prediction.overhead_launches) == (moved, 12)
    assert prediction.gain == pytest.approx(bf16 / (products + overhead), rel=1e-12) == pytest.approx(1.460, abs=1e-3)
    assert prediction.launching == pytest.approx(15 * 2e-6)
    # With the least and the most of what was measured: 0.78 in bf16, 0.68 in FP8 and 0.47 of the bandwidth; 0.75, 0.78,
    # 0.92, no launches.
    product = 3 * flop / 989.4e12
    least = (product / 0.78 + 6e-6) / (3 * flop / (0.68 * 1978.9e12) + moved / (0.47 * 3.35e12) + 30e-6)
    most = product / 0.75 / (3 * flop / (0.78 * 1978.9e12) + moved / (0.92 * 3.35e12))
    assert prediction.gain_range == pytest.approx((least, most), rel=1e-12)


def test_several_products_take_as_long_as_one_after_the_other():
    """Launches too."""
    roofline = Roofline(peaks["h100"])
    one = roofline.products("f8e4m3fn", 10**9, 10**6)
    assert roofline.products("f8e4m3fn", 6 * 10**9, 6 * 10**6, count=6) == pytest.approx(6 * one, rel=1e-12)


def test_products_of_few_tokens_take_as_long_as_their_bytes():
    """16 rows: the kernel's 32 MB in bf16, 16 MB in FP8, and hardly anything else."""
    prediction = predicted(16, 4096, 4096, efficiency=Efficiency(bandwidth=1.0, launch=0.0))
    sides = 2 * 16 * 4096
    assert prediction.bf16 == pytest.approx(3 * 2 * (4096**2 + sides) / 3.35e12)
    # fprop and dgrad read an FP8 kernel, wgrad writes one in bf16.
    fprop = dgrad = (4096**2 + 16 * 4096 + 2 * 16 * 4096) / 3.35e12
    wgrad = (2 * 16 * 4096 + 2 * 4096**2) / 3.35e12
    assert prediction.products == pytest.approx(fprop + dgrad + wgrad)
    assert prediction.gain < 1


SIZES = st.integers(4, 10).map(lambda power: 16 * 2**power)


@pytest.mark.more
@given(SIZES, SIZES, SIZES, st.sampled_from(("h100", "b200")), st.sampled_from(("delayed", "current", "rowwise")))
@settings(max_examples=60, deadline=None)
def test_larger_layers_and_more_tokens_gain_more(tokens, inputs, outputs, device, recipe):
    at = lambda *sizes: gain(*sizes, device=device, recipe=recipe)
    assert at(tokens, inputs, outputs) <= at(2 * tokens, inputs, outputs) * (1 + 1e-9)
    assert at(tokens, inputs, outputs) <= at(tokens, 2 * inputs, outputs) * (1 + 1e-9)
    assert at(tokens, inputs, outputs) <= at(tokens, inputs, 2 * outputs) * (1 + 1e-9)
    assert at(tokens, inputs, outputs) < peaks[device].fp8 / peaks[device].bf16


def test_cheaper_recipes_gain_more():
    gains = [gain(8192, 4096, 14336, recipe=recipe) for recipe in ("static", "delayed", "current", "rowwise")]
    assert gains == sorted(gains, reverse=True) and 1 < gains[-1] < gains[0] < 2


def test_blackwell_needs_no_second_layout():
    """Nothing is transposed, and the amax of the input is taken in the pass of its cast."""
    h100, b200 = (predicted(4096, 2048, 8192, device) for device in ("h100", "b200"))
    input_, kernel, grad = 4096 * 2048, 2048 * 8192, 4096 * 8192
    assert b200.overhead_bytes == 3 * input_ + 4 * kernel + 3 * grad
    assert b200.overhead_launches < h100.overhead_launches


def test_blocks_do_not_pay_as_xla_compiles_them():
    """A measured ratio of 0.65 to 0.79 end to end, marin-community/marin#7282, for widths of a few thousand."""
    assert gain(32768, 2560, 2560, device="b200", recipe="mxfp8") < 0.8
    faster = Efficiency(block_flops=0.72, block_bandwidth=0.75)
    assert gain(8192, 4096, 14336, device="b200", recipe="mxfp8", efficiency=faster) > 1.25


def test_products_of_blocks_by_hand():
    """They reach another share of the peak than products with one scale; those in bf16 do not."""
    shares = Efficiency(flops=0.8, fp8_flops=0.7, block_flops=0.5, fp4_flops=0.3, launch=0.0)
    flop, fp8, fp4 = 2 * 8192 * 4096 * 14336, peaks["b200"].fp8, peaks["b200"].fp4
    for recipe, rate in (("mxfp8", 0.5 * fp8), ("nvfp4", 0.3 * fp4), ("delayed", 0.7 * fp8)):
        prediction = predicted(8192, 4096, 14336, "b200", recipe, efficiency=shares)
        assert prediction.products == pytest.approx(3 * flop / rate, rel=1e-12)
        assert prediction.bf16 == pytest.approx(3 * flop / (0.8 * peaks["b200"].bf16), rel=1e-12)


def test_sides_that_are_padded():
    """FP8 pads to 16 and bf16 to 8: both, one, or none of them."""
    aligned, both, one = (predicted(4096, 4096, outputs) for outputs in (50176, 50257, 50264))
    assert both.gain == pytest.approx(aligned.gain, rel=0.15)
    assert one.bf16 == pytest.approx(aligned.bf16, rel=0.01)
    assert one.gain < aligned.gain and one.overhead_launches > aligned.overhead_launches
    # Kernel and gradient in both their products, 2 bytes; the results with that side, 4 bytes.
    kernel, grad = 4096 * 50264, 4096 * 50264
    base = 5 * 4096 * 4096 + 6 * kernel + 5 * grad
    assert one.overhead_bytes == base + 2 * 2 * (kernel + grad) + 4 * (kernel + grad)


def test_products_left_in_high_precision_gain_nothing():
    recipe = fp8.recipes.named["rowwise_wgrad_bf16"]
    work = LayerWork(LayerSize(4096, 2048), 8192, recipe, KernelResidual.REQUANTIZE, H100)
    input_, kernel, grad = 8192 * 4096, 4096 * 2048, 8192 * 2048
    # fprop and dgrad have scales of rows: their results are read in float32 and written in bf16. wgrad adds nothing.
    assert work.added.bytes == 5 * input_ + 10 * kernel + 5 * grad + 6 * (grad + input_)
    prediction = predicted(32768, 16384, 16384, recipe="rowwise_wgrad_bf16")
    assert 1 < prediction.gain < 1.5
    high = Quantization(E4M3, HighPrecision())
    none = predict(dataclasses.replace(work, recipe=fp8.Recipe(high, high, high)), peaks["h100"], Efficiency())
    assert none.gain == 1 and none.overhead == 0 and none.gain_range == (1, 1)


def test_rotation_is_one_more_pass():
    rotated = Quantization(E4M3, HadamardScaling(CurrentScaling()))
    plain = fp8.Recipe.of(CurrentScaling())
    recipe = dataclasses.replace(plain, input_for_wgrad=rotated, output_grad_for_wgrad=rotated)
    work = LayerWork(LayerSize(1024, 1024), 1024, plain, KernelResidual.KEEP, H100)
    assert dataclasses.replace(work, recipe=recipe).added.bytes > work.added.bytes


def test_ensembles_stacks_and_experts():
    In, Out, Block, Experts = hax.make_axes(In=1024, Out=2048, block=6, experts=8)
    keys = jax.random.split(jax.random.key(0), 6)

    def make():
        return {
            "one": hnn.Linear.init(In, Out, key=keys[0], use_bias=False),
            "stacked": hnn.Stacked.init(Block, hnn.Linear)(In, Out, key=keys, use_bias=False),
            "ensemble": eqx.filter_vmap(lambda key: hnn.Linear.init(In, Out, key=key, use_bias=False))(keys),
            "equinox": eqx.nn.Linear(1024, 2048, use_bias=False, key=keys[0]),
            "equinox ensemble": eqx.filter_vmap(lambda key: eqx.nn.Linear(1024, 2048, key=key))(keys),
            "experts": hnn.MoELinear.init(Experts, In, Out, key=keys[0], use_bias=False),
            "scalar": eqx.nn.Linear("scalar", "scalar", key=keys[0]),
        }

    layers = eqx.filter_eval_shape(make)
    table = describe(layers, predict=FasterOn("h100", tokens=4096))
    one, stacked, ensemble = (table[path].prediction for path in ("one", "stacked.stacked", "ensemble"))
    assert table["equinox"].prediction == one
    assert table["equinox ensemble"].prediction == ensemble
    assert stacked.bf16 == pytest.approx(6 * one.bf16)
    # A kernel in a scan is not quantized again: its FP8 copy is transposed, 5 bytes for 6.
    assert stacked.overhead_bytes == 6 * (one.overhead_bytes - 1024 * 2048)
    # One launch for all members. Each has scales of its own, which another launch applies to results in bfloat16.
    results = 4096 * 1024 + 1024 * 2048 + 4096 * 2048
    assert ensemble.overhead_bytes == 6 * (one.overhead_bytes + 4 * results)
    # Four small ones join what the members measured.
    assert ensemble.overhead_launches == one.overhead_launches + 4
    current = describe(layers, config=fp8.Fp8Config(recipe="current"), predict=FasterOn("h100", tokens=4096))
    assert current["ensemble"].prediction.overhead_bytes == 6 * current["one"].prediction.overhead_bytes
    experts = table["experts"].prediction
    assert experts.gain < one.gain, "as many rows, eight kernels to quantize"
    twice = describe(layers, predict=FasterOn("h100", tokens=4096, experts_per_token=2))
    assert twice["experts"].prediction.gain > experts.gain and twice["one"].prediction == one
    assert table["scalar"].prediction.gain < 1


# --- the choice -------------------------------------------------------------------------------------------------------


def test_a_transformer():
    """Of a model of 8B parameters the projections pay; narrow layers do not."""
    layers = {"up": linear(4096, 14336), "query": linear(4096, 4096), "narrow": linear(4096, 8), "tiny": linear(64, 64)}
    table = converted(layers, device="h100", tokens=8192)
    assert [row.path for row in table if row.is_fp8] == ["query", "up"]
    assert 1.3 < table["query"].prediction.gain < table["up"].prediction.gain < 2
    assert table["tiny"].reason.startswith("FP8 would take ")
    assert re.fullmatch(r"FP8 would take \d+\.\d\d times bf16's time on h100 at 8192 tokens", table["narrow"].reason)
    assert table["tiny"].reason.endswith(": launching takes longer than all the work")
    assert table["tiny"].prediction.is_launch_bound and not table["query"].prediction.is_launch_bound
    assert all(row.reason == "" for row in table if row.is_fp8)


def test_conversion_raises_where_no_layer_is_faster():
    """A model that trains in bf16 all the same would be a silent fallback."""
    layers = {name: linear(4096, 14336) for name in ("a", "b", "c", "d")}
    reason = f"FP8 would be {gain(2048, 4096, 14336):.2f} times as fast as bf16 on h100 at 2048 tokens, below 1.2"
    faster = FasterOn("h100", tokens=2048, at_least=1.2)
    with pytest.raises(ValueError) as raised:
        fp8_linear_layers(layers, targets=faster)
    message = str(raised.value)
    assert message.startswith(f"targets=FasterOn(...) selects no layer: a: {reason}; b: {reason}; c: {reason}; and 1 ")
    assert "describe(model, predict=FasterOn(...))" in message
    with pytest.raises(ValueError, match="selects no layer: a: "):
        fp8_linear_layers(layers, targets=["b", faster])
    # One that is faster is enough.
    table = describe(fp8_linear_layers(layers | {"e": linear(16384, 65536)}, targets=faster), predict=faster)
    assert [row.path for row in table if row.is_fp8] == ["e"]


def test_what_was_left_out_by_name_is_not_called_slower():
    layers = {"a": linear(64, 64), "b": linear(4096, 14336)}
    config = Fp8Config(exclude="b", targets=FasterOn("h100", tokens=8192))
    with pytest.raises(ValueError, match=r"no layer: a: FP8 would [^;]*\. Train"):
        fp8_linear_layers(layers, config)
    nothing = Fp8Config(targets=FasterOn("h100", tokens=8192))
    with pytest.raises(ValueError, match="contains no layer that can be converted"):
        fp8_linear_layers({"norm": eqx.nn.LayerNorm(4)}, nothing)


def test_the_margin():
    prediction = predicted(4096, 4096, 4096)
    assert 1.2 < prediction.gain < 1.4
    layers = {"x": linear(4096, 4096)}
    assert converted(layers, device="h100", tokens=4096, at_least=1.2).fp8_count == 1
    layers["wide"] = linear(16384, 16384)
    row = describe(layers, config=Fp8Config(targets=FasterOn("h100", tokens=4096, at_least=1.4)))["x"]
    assert row.reason == f"FP8 would be {prediction.gain:.2f} times as fast as bf16 on h100 at 4096 tokens, below 1.4"
    exactly = converted(layers, device="h100", tokens=4096, at_least=prediction.gain)
    assert exactly.fp8_count == 2


def test_a_tied_head_is_judged_by_its_product():
    Vocab, Embed = hax.Axis("vocab", 128256), hax.Axis("embed", 4096)
    model = {"embed": eqx.filter_eval_shape(lambda: hnn.Embedding.init(Vocab, Embed, key=jax.random.key(0)))}
    faster = FasterOn("h100", tokens=8192)
    row = describe(model, config=Fp8Config(targets=faster))["embed"]
    assert row.prediction is None and row.reason == "a tied head is converted only if a target names it"
    named = Fp8Config(targets=["embed", faster])
    row = describe(fp8_linear_layers(model, named), config=named)["embed"]
    assert row.is_fp8 and 1.4 < row.prediction.gain < 2


def test_layers_with_a_name_are_not_judged():
    names = ("slow", "wide", "target", "override", "none", "excluded")
    layers = {name: linear(64, 64) for name in names} | {"wide": linear(4096, 14336)}
    config = Fp8Config(
        targets=[FasterOn("h100", tokens=8192), "target"],
        overrides={"override": "current", "none": None},
        exclude="excluded",
    )
    table = describe(fp8_linear_layers(layers, config), config=config)
    assert {row.path for row in table if row.is_fp8} == {"wide", "target", "override"}
    assert "times bf16's time" in table["slow"].reason and table["none"].reason == "left alone by the override 'none'"
    assert table["target"].prediction.gain < 1 and table["target"].prediction == table["excluded"].prediction


def test_layers_that_are_faster_on_one_of_two_devices():
    """Here a B200's FP8 pays for fewer tokens than an L40S's."""
    layers = {"x": linear(4096, 14336)}
    slower, faster = (FasterOn(device, tokens=2048, at_least=1.2) for device in ("l40s", "b200"))
    with pytest.raises(ValueError, match="on l40s at 2048 tokens"):
        fp8_linear_layers(layers, targets=slower)
    assert describe(fp8_linear_layers(layers, targets=[slower, faster])).fp8_count == 1


@pytest.mark.parametrize(
    "device, recipe, reason",
    [
        ("a100", "delayed", "FP8 would be emulated on a100: FP8 products need compute capability 8.9"),
        ("h100", "mxfp8", "FP8 would be emulated on h100: MXFP8 products"),
        ("h100", "nvfp4", "FP8 would be emulated on h100: NVFP4 products"),
        ("tpu6e", "delayed", "FP8 would be emulated on tpu6e: FP8 products need a TPU7x"),
    ],
)
def test_what_a_device_would_emulate_is_left_alone(device, recipe, reason):
    layer, faster = {"x": linear(16384, 16384)}, FasterOn(device, tokens=65536)
    with pytest.raises(ValueError, match=f"selects no layer: x: {re.escape(reason)}"):
        fp8_linear_layers(layer, recipe=recipe, targets=faster)
    assert describe(layer, config=Fp8Config(recipe=recipe), predict=faster)["x"].prediction is None


def test_experts_take_what_their_implementation_takes():
    Experts, In, Out = hax.make_axes(experts=8, In=4096, Out=14336)
    moe = {"x": eqx.filter_eval_shape(lambda: hnn.MoELinear.init(Experts, In, Out, key=jax.random.key(0)))}
    faster = FasterOn("h100", tokens=65536, experts_per_token=2)
    for recipe in ("delayed", "rowwise"):
        config = Fp8Config(recipe=recipe, targets=faster)
        assert describe(fp8_linear_layers(moe, config), config=config).fp8_count == 1
    with pytest.raises(ValueError, match="x: FP8 would be emulated on h100"):
        fp8_linear_layers(moe, recipe="mxfp8", targets=faster)


def test_a_rule_without_sizes():
    @dataclasses.dataclass(frozen=True)
    class MyRule(fp8.layers.LayerRule):
        layer_type = hnn.Linear
        refusal = lambda self, layer: None
        kernel = lambda self, layer: fp8.layers.Kernel(layer.weight)
        op = lambda self, layer: None
        with_op = lambda self, layer, op: layer

    config = Fp8Config(rules=(MyRule(),), targets=FasterOn("h100", tokens=8192))
    layer = {"x": linear(4096, 4096)}
    with pytest.raises(ValueError, match="x: its time in FP8 is unknown: the Kernel that MyRule returns has no In and"):
        fp8_linear_layers(layer, config)
    assert describe(layer, config=Fp8Config(rules=(MyRule(),)))["x"].shape == "4096 × 4096"


WIDTHS = st.integers(1, 20000)


@pytest.mark.more
@given(
    st.lists(st.tuples(WIDTHS, WIDTHS), min_size=1, max_size=4),
    st.integers(1, 200_000),
    st.sampled_from(WITH_FP8),
    st.sampled_from(tuple(fp8.recipes.named)),
)
@settings(max_examples=60, deadline=None)
def test_never_slower_than_bf16(sizes, tokens, device, recipe):
    config = Fp8Config(recipe=recipe, targets=FasterOn(device, tokens=tokens))
    layers = {str(i): linear(*size) for i, size in enumerate(sizes)}
    try:
        table = describe(fp8_linear_layers(layers, config), config=config)
    except ValueError as error:
        assert "targets=FasterOn(...) selects no layer" in str(error)
        table = describe(layers, config=Fp8Config(recipe=recipe), predict=config.faster_on[0])
        assert all(row.prediction is None or row.prediction.gain < 1.1 for row in table)
        return
    bf16 = math.fsum(row.prediction.bf16 for row in table if row.prediction)
    now = math.fsum(row.prediction.fp8 if row.is_fp8 else row.prediction.bf16 for row in table if row.prediction)
    assert now <= bf16
    assert all(row.prediction.gain >= 1.1 if row.is_fp8 else row.reason for row in table)


@pytest.mark.more
def test_the_model_that_it_makes_runs():
    """Converted layers beside plain ones, on a CPU."""
    In, Mid = hax.make_axes(In=16, Mid=32)
    keys = jax.random.split(jax.random.key(0))
    model = {"up": hnn.Linear.init(In, Mid, key=keys[0]), "down": hnn.Linear.init(Mid, In, key=keys[1])}
    peaks = fp8.preflight.Peaks(fp8=2.0, bf16=1.0, f32=1.0, bandwidth=1e9, source="made up: products are all there is")
    faster = FasterOn(H100, tokens=16, peaks=peaks, efficiency=Efficiency(launch=0.0))
    fast = fp8_linear_layers(model, Fp8Config(targets=faster, exclude="down"))
    assert [row.is_fp8 for row in describe(fast)] == [False, True]
    x = hax.ones((hax.Axis("batch", 16), In), jnp.float32)
    grads = fp8.filter_grad(lambda m: hax.sum(m["down"](m["up"](x))).scalar())(fast)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_without_it_everything_is_converted():
    assert describe(fp8_linear_layers({"x": linear(8, 8)})).fp8_count == 1


# --- describe ---------------------------------------------------------------------------------------------------------


def test_the_table():
    layers = {"up": linear(4096, 14336), "tiny": linear(64, 64)}
    config = Fp8Config(targets=FasterOn("h100", tokens=8192))
    table = describe(fp8_linear_layers(layers, config), config=config)
    text = str(table)
    assert "gain" in text and "1.46× (1.30 to 1.74)" in text and f"{table['tiny'].prediction.gain:.2f}×" in text
    assert "at 8192 tokens" in " ".join(text.split())
    up, tiny = table["up"].prediction, table["tiny"].prediction
    now, bf16 = up.fp8 + tiny.bf16, up.bf16 + tiny.bf16
    low, high = (bf16 / (up.bf16 / end + tiny.bf16) for end in up.gain_range)
    assert low < bf16 / now < high
    assert table.estimate == (
        f"{bf16 / now:.2f} times as fast as with all of them in bf16 ({low:.2f} to {high:.2f}; estimate for these "
        f"layers' products on h100 at 8192 tokens: {1e3 * now:.3g} ms a step instead of {1e3 * bf16:.3g} ms)"
    )


def test_only_where_asked_for():
    layers = {"up": linear(64, 64)}
    table = describe(fp8_linear_layers(layers))
    assert table.estimate == "" and table["up"].prediction is None and "gain" not in str(table)


def test_before_and_after_conversion_and_for_another_device():
    layers = {"up": linear(4096, 14336), "tiny": linear(64, 64)}
    faster = FasterOn("h100", tokens=8192)
    config = Fp8Config(recipe="current", targets=faster)
    before, after = describe(layers, config=config), describe(fp8_linear_layers(layers, config), config=config)
    assert [row.prediction for row in before] == [row.prediction for row in after]
    # A converted model is described with the recipe that it has, whatever the configuration.
    assert describe(fp8_linear_layers(layers, config), predict=faster)["up"].prediction == after["up"].prediction
    b200 = describe(layers, config=config, predict=FasterOn("b200", tokens=8192))
    assert b200["up"].prediction.bf16 < before["up"].prediction.bf16
    # What decides is the configuration's.
    assert [row.reason for row in b200] == [row.reason for row in before]


def test_layers_that_cannot_be_converted_are_not_predicted():
    model = {"conv": eqx.nn.Conv1d(4, 4, 1, key=jax.random.key(0)), "up": linear(4096, 4096)}
    rows = {row.path: row.prediction for row in describe(model, predict=FasterOn("h100", tokens=4096))}
    assert rows.pop("up") is not None
    assert set(rows.values()) <= {None}


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"device": "h10000"}, r"device='h10000' is unknown; the nearest are \['h100'"),
        ({"device": "cpu"}, r"device='cpu' has no peaks.*Peaks\("),
        ({"device": "mi300x"}, "device='mi300x' has no peaks"),
        ({"tokens": 0}, "tokens=0 of FasterOn must be a positive integer"),
        ({"tokens": True}, "tokens=True of FasterOn must be a positive integer"),
        ({"experts_per_token": -1}, "experts_per_token=-1 of FasterOn must be a"),
        ({"at_least": 0.9}, "at_least=0.9 of FasterOn must be 1 or more"),
        ({"at_least": math.nan}, "at_least=nan of FasterOn must be 1 or more"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        FasterOn(**{"device": "h100", "tokens": 8192, **arguments})


SHARES = [field.name for field in dataclasses.fields(Efficiency) if field.name not in ("launch", "idle")]


@pytest.mark.parametrize("value", [0.0, 1.5, -1.0, math.nan])
def test_shares_of_the_peaks(value):
    for name in SHARES:
        with pytest.raises(ValueError, match=f"{name}={value!r} of Efficiency must be a"):
            Efficiency(**{name: value})


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_times(value):
    for name in ("launch", "idle"):
        with pytest.raises(ValueError, match=f"{name}={value!r} of Efficiency must be seconds"):
            Efficiency(**{name: value})


def test_devices_are_found_by_their_kind():
    """A device that is here has the name that JAX gives it."""
    here = FasterOn(fp8.devices.Device("cuda", "NVIDIA H100 80GB HBM3", "9.0"), tokens=8192)
    assert str(here) == "NVIDIA H100 80GB HBM3 at 8192 tokens"
    row = {"x": linear(4096, 4096)}
    assert (
        describe(row, predict=here)["x"].prediction
        == describe(row, predict=FasterOn("H100", tokens=8192))["x"].prediction
    )
    assert str(FasterOn("H100", tokens=8192)) == "h100 at 8192 tokens"


def test_peaks_of_ones_own():
    mine = dataclasses.replace(peaks["h100"], fp8=peaks["h100"].bf16)
    assert gain(8192, 8192, 8192, peaks=mine) < 1
    assert predicted(8192, 8192, 8192, device="l4", peaks=peaks["l40s"]).gain > 1


def test_every_name_with_peaks_is_a_device():
    assert set(peaks) <= set(devices)
    for name in peaks:
        assert FasterOn(name, tokens=1).name == name
