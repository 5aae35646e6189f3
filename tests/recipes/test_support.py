"""supported: what becomes of each recipe on each device; and what conversion and describe say of it."""

import dataclasses
import logging
import re
from typing import ClassVar

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import optax
import pytest

import haliax_fp8 as fp8
from haliax_fp8._cli.tables import device_rows
from haliax_fp8.devices import Device
from haliax_fp8.devices.device import devices
from haliax_fp8.devices.units import FP8_UNITS, MX_UNITS, MatrixUnits
from haliax_fp8.recipes import (
    E4M3,
    E4M3FNUZ,
    E5M2FNUZ,
    AbstractScaling,
    BlockScaling,
    CurrentScaling,
    HadamardScaling,
    HighPrecision,
    MXFP8Scaling,
    NVFP4Scaling,
    Outcome,
    Quantization,
    RowwiseScaling,
)
from haliax_fp8.recipes.support import supported_in_groups


FNUZ = fp8.Recipe.of(fp8.DelayedScaling(), forward=E4M3FNUZ, backward=E5M2FNUZ)
A100, H100, B200 = (Device.by_name(name) for name in ("a100", "h100", "b200"))

# By hand, from the recipes' descriptions. Scales of a tensor or of a row stay outside the sum; scales of blocks do not.
OUTSIDE_THE_SUM = ("delayed", "current", "static", "rowwise", "rowwise_wgrad_bf16")
WITH_OCP_FORMATS = ("l4", "l40s", "rtx4090", "h100", "h200", "b200", "gb200", "mi350x", "mi355x", "tpu7x")
WITH_BLOCKS_OF_32 = ("b200", "gb200", "mi350x", "mi355x")
NATIVE = {(recipe, device) for recipe in OUTSIDE_THE_SUM for device in WITH_OCP_FORMATS}
# DeepSeek's scales are powers of two, and its blocks are whole blocks of 32.
IN_BLOCKS_OF_32 = ("mxfp8", "mxfp8_square", "deepseek", "mxfp4_mxfp8")
NATIVE |= {(recipe, device) for recipe in IN_BLOCKS_OF_32 for device in WITH_BLOCKS_OF_32}
# NVFP4's blocks of 16 are NVIDIA's alone.
IN_BLOCKS_OF_16 = ("nvfp4", "nvfp4_delayed")
NATIVE |= {(recipe, device) for recipe in IN_BLOCKS_OF_16 for device in ("b200", "gb200")}


@pytest.fixture
def linear():
    return eqx.nn.Linear(8, 8, key=jax.random.key(0))


def test_every_recipe_is_described_here():
    assert sorted((*OUTSIDE_THE_SUM, *IN_BLOCKS_OF_32, *IN_BLOCKS_OF_16)) == sorted(fp8.recipes.named)


@pytest.mark.smoke
@pytest.mark.parametrize("recipe", fp8.recipes.named)
def test_outcomes(recipe):
    for device in devices:
        support = fp8.recipes.supported(recipe, device)
        expected = (
            Outcome.EMULATED if device == "cpu" else Outcome.NATIVE if (recipe, device) in NATIVE else Outcome.REFUSED
        )
        assert support.outcome is expected
        assert support.is_native == (expected is Outcome.NATIVE)
        assert support.reason and support.device == Device.by_name(device)


def test_a_recipe_may_be_given_as_its_name_a_scaling_or_itself():
    ways = ("current", CurrentScaling(), fp8.Recipe.of(CurrentScaling()))
    assert len({fp8.recipes.supported(way, H100) for way in ways}) == 1


def test_without_a_device_the_one_that_is_here_is_meant():
    assert (
        fp8.recipes.supported("delayed")
        == fp8.recipes.supported("delayed", "local")
        == fp8.recipes.supported("delayed", "cpu")
    )


@pytest.mark.parametrize(
    ("recipe", "device", "reason"),
    [
        ("delayed", "a100", "compute capability 8.9.*has 8.0"),
        ("delayed", "v100", "compute capability 8.9.*has 7.0"),
        ("rowwise", "tpu6e", "need a TPU7x"),
        ("mxfp8", "h100", "compute capability 10.0.*has 9.0"),
        ("mxfp8", "tpu7x", "no tpu device"),
        ("deepseek", "h100", "compute capability 10.0.*has 9.0"),
        ("nvfp4", "h100", "NVFP4 products.*compute capability 10.0.*has 9.0"),
        ("nvfp4", "mi355x", "no rocm device has units for NVFP4"),
        (BlockScaling(power_of_two=False), "b200", "blocks with such scales: operands are dequantized"),
        (fp8.Recipe.of(NVFP4Scaling(), forward=E4M3, backward=E4M3), "b200", "NVFP4Scaling.*in E4M3 is not E2M1"),
        ("delayed", "mi300x", "fnuz formats.*E4M3FNUZ"),
    ],
)
def test_reasons(recipe, device, reason):
    assert re.search(reason, fp8.recipes.supported(recipe, device).reason)


def test_fnuz_recipes_are_for_mi300_alone():
    recipe = fp8.Recipe.of(fp8.DelayedScaling(), forward=E4M3FNUZ, backward=E5M2FNUZ)
    native = {name for name in devices if fp8.recipes.supported(recipe, name).is_native}
    assert native == {"mi300x", "mi325x"}


def test_a_product_of_two_kinds_of_scales_is_no_units():
    mixed = dataclasses.replace(
        fp8.Recipe.of(MXFP8Scaling()),
        kernel=Quantization(E4M3, CurrentScaling()),
    )
    support = fp8.recipes.supported(mixed, B200)
    assert support.outcome is Outcome.REFUSED
    # wgrad does not use the kernel, and is a product of two MXFP8 operands.
    assert support.reason.startswith("fprop, dgrad: ")


def test_products_in_high_precision_need_nothing():
    high = Quantization(E4M3, HighPrecision())
    recipe = fp8.Recipe(high, high, high)
    assert fp8.recipes.supported(recipe, A100).is_native
    # Left in high precision are the products that the device would lack units for.
    mx = fp8.Recipe.of(MXFP8Scaling())
    current = Quantization(E4M3, CurrentScaling())
    forward_only = dataclasses.replace(
        mx, input=current, kernel=current, output_grad=high, kernel_for_dgrad=high, input_for_wgrad=high
    )
    assert fp8.recipes.supported(forward_only, H100).is_native


@pytest.mark.parametrize(
    ("recipe", "device", "message"),
    [("delaid", "h100", "'delayed'"), ("delayed", "h-1000", "'h100'")],
)
def test_unknown_names_are_refused_with_the_nearest(recipe, device, message):
    with pytest.raises(ValueError, match=message):
        fp8.recipes.supported(recipe, device)


def test_only_powers_of_two_for_whole_blocks_of_32_are_mxfp8():
    scalings = (
        BlockScaling(64),
        BlockScaling(128),
        BlockScaling(48),
        BlockScaling(power_of_two=False),
    )
    assert [fp8.recipes.supported(scaling, "b200").is_native for scaling in scalings] == [True, True, False, False]


@dataclasses.dataclass(frozen=True)
class Claims(AbstractScaling):
    """A scaling that quantizes as another one does, and names units of its own choice."""

    scaling: AbstractScaling
    claimed: MatrixUnits = FP8_UNITS

    per_axis: ClassVar[bool] = True

    @property
    def units(self):
        return self.claimed

    def quantize(self, x, use):
        return self.scaling.quantize(x, use)


@pytest.mark.parametrize(
    ("scaling", "units", "device", "reason"),
    [
        (RowwiseScaling(), FP8_UNITS, "h100", None),
        (CurrentScaling(), FP8_UNITS, "h100", None),
        (BlockScaling(48), FP8_UNITS, "h100", "change along the sum"),
        (BlockScaling(128), FP8_UNITS, "h100", "change along the sum"),
        (BlockScaling(64), MX_UNITS, "b200", None),
        (BlockScaling(48), MX_UNITS, "b200", "not powers of two for whole blocks of 32"),
        (BlockScaling(64, power_of_two=False), MX_UNITS, "b200", "not powers of two for whole blocks of 32"),
        (RowwiseScaling(), MX_UNITS, "b200", "not powers of two for whole blocks of 32"),
    ],
)
def test_units_that_do_not_take_the_scales_are_not_believed(scaling, units, device, reason):
    """Products look at the scales: what they dequantize is not native, whatever the scaling says of itself."""
    support = fp8.recipes.supported(Claims(scaling, units), device)
    assert support.is_native == (reason is None)
    assert reason is None or re.search(f"{reason}.*: operands are dequantized first", support.reason)


def test_grouped_products_do_not_believe_it_either():
    claims = fp8.Recipe.of(Claims(BlockScaling(48)))
    assert not supported_in_groups(claims, B200).is_native
    assert supported_in_groups(fp8.Recipe.of(Claims(RowwiseScaling())), B200).is_native


def test_a_scaling_within_another_decides():
    rotated = Quantization(E4M3, HadamardScaling(MXFP8Scaling()))
    recipe = dataclasses.replace(
        fp8.Recipe.of(CurrentScaling()), input_for_wgrad=rotated, output_grad_for_wgrad=rotated
    )
    assert fp8.recipes.supported(recipe, "b200").is_native
    assert fp8.recipes.supported(recipe, "h100").reason.startswith("wgrad: MXFP8 products")


def test_grouped_products_take_what_their_implementation_takes():
    Experts, In, Out = hax.make_axes(experts=2, embed=32, mlp=32)
    layers = {
        "dense": hnn.Linear.init(In, Out, key=jax.random.key(0)),
        "grouped": hnn.MoELinear.init(Experts, In, Out, key=jax.random.key(0)),
    }
    native = {}
    for recipe in ("delayed", "current", "static", "rowwise", "mxfp8"):
        model = fp8.fp8_linear_layers(layers, fp8.Fp8Config(recipe=recipe))
        rows = fp8.describe(model, device="b200")
        assert rows["dense"].support.is_native
        native[recipe] = rows["grouped"].support.is_native
    assert native == {"delayed": True, "current": True, "static": True, "rowwise": True, "mxfp8": False}
    with (
        B200.as_default(),
        pytest.raises(ValueError, match="kernel for Blackwell takes scales of whole"),
    ):
        fp8.fp8_linear_layers(layers, fp8.Fp8Config(recipe="mxfp8"))


# --- Conversion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "recipe"), [("a100", "delayed"), ("v100", "rowwise"), ("tpu5e", "delayed"), ("h100", "mxfp8")]
)
def test_conversion_refuses_to_emulate_on_an_accelerator(linear, device, recipe):
    with Device.by_name(device).as_default(), pytest.raises(ValueError, match=Device.by_name(device).kind) as error:
        fp8.fp8_linear_layers(linear, fp8.Fp8Config(recipe=recipe))
    assert fp8.recipes.supported(recipe, device).reason in str(error.value)
    assert "emulate=True" in str(error.value)


def test_emulation_can_be_asked_for_and_is_said(linear):
    with A100.as_default():
        model = fp8.fp8_linear_layers(linear, fp8.Fp8Config(emulate=True))
        description = fp8.describe(model)
    assert description.fp8_count == 1
    assert "emulated on NVIDIA A100-SXM4-80GB" in description.note and "8.9" in description.note
    assert description.summary.endswith("emulated on NVIDIA A100-SXM4-80GB")


def test_native_devices_convert_without_being_asked(linear):
    with H100.as_default():
        description = fp8.describe(fp8.fp8_linear_layers(linear))
    assert description.note == ""
    assert description.summary.endswith("native on NVIDIA H100 80GB HBM3")


def test_every_recipe_of_a_model_counts():
    model = eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))
    with H100.as_default(), pytest.raises(ValueError, match="MXFP8Scaling"):
        fp8.fp8_linear_layers(model, fp8.Fp8Config(overrides={"layers.1": "mxfp8"}))


def test_layers_left_alone_need_nothing():
    model = eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))
    with A100.as_default(), pytest.warns(UserWarning, match=r"override '\*'"):
        left = fp8.fp8_linear_layers(model, fp8.Fp8Config(overrides={"*": None}))
    assert eqx.tree_equal(left, model)


# --- Description ------------------------------------------------------------------------------------------------------


def test_describe_speaks_of_the_device_that_is_named():
    model = eqx.nn.MLP(8, 8, 8, 2, key=jax.random.key(0))
    model = fp8.fp8_linear_layers(model, fp8.Fp8Config(overrides={"layers.1": "mxfp8", "layers.2": None}))
    on_h100, on_b200 = fp8.describe(model, device="h100"), fp8.describe(model, device=B200)
    assert [layer.support and layer.support.is_native for layer in on_h100] == [True, False, None]
    assert [layer.support and layer.support.is_native for layer in on_b200] == [True, True, None]
    rows = {line.split()[0]: line for line in str(on_h100).splitlines() if line.strip()}
    assert "on NVIDIA H100 80GB" in str(on_h100)
    assert rows["layers.0"].endswith("native")
    assert rows["layers.1"].endswith("refused")
    assert "native" not in rows["layers.2"] and "emulated" not in rows["layers.2"]


def test_why_a_device_emulates_is_said_once_and_whole(monkeypatch):
    """In a cell of its own it was broken into eight lines for each layer."""
    monkeypatch.setenv("COLUMNS", "80")
    model = eqx.nn.MLP(8, 8, 8, 2, key=jax.random.key(0))
    config = fp8.Fp8Config(overrides={"layers.1": "mxfp8", "layers.2": None})
    of_one, of_two = (fp8.describe(fp8.fp8_linear_layers(model, c), device="a100") for c in (None, config))
    reason = "FP8 products need compute capability 8.9 (Ada, Hopper, Blackwell), but this device has 8.0"
    for found in (of_one, of_two):
        text = str(found)
        assert " ".join(text.split()).count(reason) == 1 and "on device" not in text
        assert "refused on NVIDIA A100-SXM4-80GB" in " ".join(text.split("runs in")[0].split())
        assert max(map(len, text.splitlines())) <= 80
    delayed, mxfp8 = (layer.recipe for layer in of_two.layers[:2])
    assert f"- {delayed}: {reason}\n- {mxfp8}: MXFP8 products" in of_two.note
    assert fp8.describe(fp8.fp8_linear_layers(model, config), device="h100").note.startswith(
        "Conversion of 1 layer is refused on NVIDIA H100"
    )


@pytest.mark.parametrize("device", ["a100", "h100", "mi300x", "b200", "cpu"])
@pytest.mark.parametrize("recipe", ["delayed", "deepseek", "mxfp8", "nvfp4", FNUZ], ids=str)
def test_everything_that_speaks_of_a_device_agrees(device, recipe, linear):
    """`supported`, `describe` and the command's table, in the same word."""
    answer = fp8.recipes.supported(recipe, device)
    word = answer.outcome.value
    assert (word == "emulated") == (device == "cpu")
    described = fp8.describe(fp8.fp8_linear_layers(linear, recipe=recipe), device=device)
    assert described.summary.split(", ")[-1].startswith(f"{word} on")
    assert f", {word} on" in " ".join(str(described).split("layer ")[0].split())
    assert ("is refused on" in described.note) == (word == "refused")
    if isinstance(recipe, str) and device != "cpu":
        (row,) = [row for row in device_rows() if row.name == device]
        assert (recipe in row.native) == (word == "native")
        assert word == "native" or row.otherwise.startswith(f"{word}: ")


def test_on_a_cpu_describe_says_that_products_are_emulated(linear):
    assert "emulated on this CPU" in str(fp8.describe(fp8.fp8_linear_layers(linear)))
    assert "emulated" not in str(fp8.describe(linear))


def test_summary():
    model = eqx.nn.MLP(8, 8, 8, 2, key=jax.random.key(0))
    assert fp8.describe(model).summary == "FP8: none of 3 linear layers"
    some = fp8.fp8_linear_layers(model, fp8.Fp8Config(exclude="layers.2"))
    assert fp8.describe(some).summary == ("FP8: 2 of 3 linear layers, DelayedScaling E4M3/E4M3/E5M2, emulated on cpu")
    mixed = fp8.fp8_linear_layers(model, fp8.Fp8Config(overrides={"layers.1": "mxfp8"}))
    assert fp8.describe(mixed, device="h100").summary == (
        "FP8: 3 of 3 linear layers, 2 DelayedScaling E4M3/E4M3/E5M2 + 1 MXFP8Scaling E4M3/E4M3/E4M3, "
        "2 native and 1 refused on NVIDIA H100 80GB HBM3"
    )


def test_the_training_step_logs_the_summary_and_prints_nothing(linear, caplog, capsys):
    model = fp8.fp8_linear_layers(linear)
    step = fp8.TrainStep(lambda model, x: model(x).sum(), optax.sgd(0.1))
    step.init(model)
    assert not caplog.records
    with caplog.at_level(logging.INFO, "haliax_fp8"):
        step.init(model)
    assert [record.getMessage() for record in caplog.records] == [fp8.describe(model).summary]
    assert capsys.readouterr() == ("", "")


def test_units_are_values():
    """A recipe is compared and hashed by its scalings; the units that these name are the same objects."""
    assert fp8.DelayedScaling.units is CurrentScaling.units is RowwiseScaling.units is FP8_UNITS
