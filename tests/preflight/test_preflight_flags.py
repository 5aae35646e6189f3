"""The preflight compiles with the user's flags: what the report says of them, and products that Triton makes."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import optax
import pytest
from compiled_models import struct
from test_preflight_products import module, read

import haliax_fp8 as fp8
from haliax_fp8.devices.device import devices
from haliax_fp8.devices.xla_flags import XlaFlags
from haliax_fp8.preflight import PreflightError, Verdict, compilable_devices, inspect_step
from haliax_fp8.preflight.compile import Traced, make_mesh
from haliax_fp8.preflight.devices import as_compilable
from haliax_fp8.recipes import E4M3 as FORMAT, HighPrecision, Quantization
from haliax_fp8.recipes.compiler_options import cost_of_flags, log_cost_of_flags, training_options


TRITON = "xla_gpu_enable_triton_gemm"
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def on_gpu(*names):
    """Devices that need XLA's GPU compiler."""
    missing = compilable_devices["h100"].missing()
    marks = [pytest.mark.skipif(missing is not None, reason=missing or ""), pytest.mark.slow]
    return [pytest.param(name, marks=marks) for name in names]


@pytest.fixture
def no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


# --- Flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, values, triton",
    [
        ("", {}, True),
        (f"--{TRITON}=false", {TRITON: "false"}, False),
        (f"--{TRITON}=False --xla_dump_to='/tmp/a b'", {TRITON: "False", "xla_dump_to": "/tmp/a b"}, False),
        (f"--{TRITON}=0 --{TRITON}=1", {TRITON: "1"}, True),
        (f"  --{TRITON} ", {TRITON: ""}, True),
    ],
)
def test_flags_are_read_as_xla_reads_them(text, values, triton):
    flags = XlaFlags.of_environment({"XLA_FLAGS": text})
    assert (flags.values, flags.triton_products) == (values, triton)


def test_a_tpu_has_flags_in_a_variable_of_its_own():
    """libtpu splits it at spaces and knows no quotes; a value may be a word of its own. It names no file."""
    environment = {"XLA_FLAGS": "--xla_a=1 --xla_b=2", "LIBTPU_INIT_ARGS": " --xla_b=3  --xla_tpu_c 'd --xla_e f"}
    flags = XlaFlags.of_environment(environment, platform="tpu")
    assert flags.values == {"xla_a": "1", "xla_b": "3", "xla_tpu_c": "'d", "xla_e": "f"}
    assert XlaFlags.of_environment(environment, platform="cuda").values == {"xla_a": "1", "xla_b": "2"}
    assert not XlaFlags.of_environment({"LIBTPU_INIT_ARGS": "nothing"}, platform="tpu").values
    assert not XlaFlags.of_environment({}, platform="tpu").values


def test_flags_in_a_file(tmp_path):
    (tmp_path / "flags").write_text(f"--xla_a=1\n--{TRITON}=false\n")
    assert XlaFlags.parse(str(tmp_path / "flags")).values == {"xla_a": "1", TRITON: "false"}
    with pytest.raises(ValueError, match=r"XLA_FLAGS='triton=false' names a file .*two dashes"):
        XlaFlags.parse("triton=false")


def test_a_value_that_is_neither_true_nor_false():
    with pytest.raises(ValueError, match=f"{TRITON}='no' must be true or false"):
        _ = XlaFlags({TRITON: "no"}).triton_products


def test_options_count_before_the_environment():
    flags = XlaFlags.parse(f"--{TRITON}=false --xla_a=1").with_options({TRITON: True})
    assert flags.triton_products and str(flags) == f"--{TRITON}=true --xla_a=1"
    assert str(XlaFlags()) == "XLA's defaults"


# --- What flags cost --------------------------------------------------------------------------------------------------

OFF = XlaFlags({TRITON: "false"})


@pytest.mark.parametrize(
    "flags, device, recipe, cost",
    [
        (XlaFlags(), "h100", "delayed", "accumulation"),
        (XlaFlags(), "h200", "rowwise", "accumulation"),
        (XlaFlags({TRITON: "true"}), "h100", "current", "accumulation"),
        (OFF, "h100", "delayed", None),
        (XlaFlags(), "b200", "delayed", None),
        (XlaFlags(), "b200", "mxfp8", None),
        (OFF, "b200", "mxfp8", None),
        (OFF, "b200", "delayed", None),
        (XlaFlags(), "l40s", "delayed", None),
        (XlaFlags(), "tpu7x", "delayed", None),
        (OFF, "cpu", "mxfp8", None),
        (OFF, "mi355x", "mxfp8", None),
    ],
)
def test_what_flags_cost(flags, device, recipe, cost):
    sentence = cost_of_flags(flags, devices[device], [fp8.recipes.named[recipe]])
    if cost is None:
        assert sentence is None
    else:
        assert "accumulate in full float32" in sentence and "XLA_FLAGS" in sentence and "\n" not in sentence


def test_gradients_in_high_precision_cost_nothing():
    high = Quantization(FORMAT, HighPrecision())
    assert cost_of_flags(XlaFlags(), devices["h100"], [fp8.Recipe(high, high, high)]) is None
    assert cost_of_flags(XlaFlags(), devices["h100"], []) is None


@pytest.mark.parametrize("recipe", fp8.recipes.named)
def test_the_options_of_a_training_step_leave_no_cost(recipe):
    for device in devices:
        recipes = [fp8.recipes.named[recipe]]
        options = training_options(recipes, devices[device])
        assert options == {} or options == {TRITON: False}
        if fp8.recipes.supported(recipe, device).is_native:
            assert cost_of_flags(XlaFlags().with_options(options), devices[device], recipes) is None


def test_a_cost_is_one_line_in_the_log(caplog):
    recipe = fp8.recipes.named["delayed"]
    with caplog.at_level("INFO", "haliax_fp8"):
        log_cost_of_flags(XlaFlags(), devices["h100"], [recipe])
        log_cost_of_flags(XlaFlags(), devices["cpu"], [recipe])
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_conversion_says_it(caplog, monkeypatch):
    layer = eqx.nn.Linear(16, 16, key=jax.random.key(0))
    said = lambda: sum("accumulate in full float32" in record.getMessage() for record in caplog.records)
    with devices["h100"].as_default(), caplog.at_level("INFO", "haliax_fp8"):
        monkeypatch.setenv("XLA_FLAGS", f"--{TRITON}=false")
        fp8.fp8_linear_layers(layer)
        assert said() == 0
        monkeypatch.delenv("XLA_FLAGS")
        model = fp8.fp8_linear_layers(layer)
        assert said() == 1
        # A step has options of its own, with which nothing is lost.
        fp8.TrainStep(lambda model, x: model(x).sum(), optax.sgd(0.1)).init(model)
    assert said() == 1


# --- Programs written here --------------------------------------------------------------------------------------------


def multiplies_fp8(a, b, scale):
    """FP8 arrays are multiplied, and the product is scaled."""
    return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16) * scale


def with_a_barrier(a, b, scale):
    """The same; the barrier keeps XLA from merging products that share an operand."""
    return multiplies_fp8(jax.lax.optimization_barrier(a), b, scale)


def dequantizes(a, b, scale):
    """What other launches have widened is multiplied: the barrier stands for what XLA does where it does not fuse."""
    wide = jax.lax.optimization_barrier((a.astype(jnp.bfloat16) * scale, b.astype(jnp.bfloat16)))
    return jnp.dot(*wide)


def widens_inside(a, b, scale):
    """The operands are widened, and nothing keeps XLA from doing it inside the product's launch."""
    return jnp.dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)) * scale


def scales_blocks_inside(a, b, scales):
    """As many do it: a scale for each row of the sum's blocks, multiplied before the product."""
    wide = a.astype(jnp.bfloat16).reshape(512, 2, 128) * scales[:, :, None]
    return jnp.dot(wide.reshape(512, 256), b.astype(jnp.bfloat16))


OPERANDS = struct(512, 256, dtype=E4M3), struct(256, 384, dtype=E4M3)
SCALE = struct()


def compiled_for(function, device, triton, *, scale=SCALE):
    return inspect_step(function, *OPERANDS, scale, device=device, compiler_options={TRITON: triton})


@pytest.mark.parametrize("triton, implementation", [(True, "Triton dot"), (False, "cublasLt f8")])
@pytest.mark.parametrize("device", on_gpu("h100", "b200"))
@pytest.mark.parametrize("function", [multiplies_fp8, with_a_barrier])
def test_fp8_arrays_that_are_multiplied_are_in_fp8_with_both_settings(function, device, triton, implementation):
    report = compiled_for(function, device, triton)
    (product,) = report.products
    assert (product.verdict, product.implementation) == (Verdict.FP8, implementation)
    assert (product.lhs, product.rhs) == ("f8e4m3fn", "f8e4m3fn")
    assert product.widened == "" and product.flops == 2 * 512 * 256 * 384
    report.require(fp8_flops=1.0)


@pytest.mark.parametrize("device", on_gpu("h100", "b200"))
def test_operands_that_other_launches_widen_are_not_in_fp8(device):
    report = compiled_for(dequantizes, device, True)
    (product,) = report.products
    assert (product.verdict, product.lhs, product.rhs) == (Verdict.EMULATED, "bf16", "bf16")
    assert report.fp8_share == 0.0
    with pytest.raises(PreflightError, match="fp8_flops=0.5"):
        report.require(fp8_flops=0.5)


def test_barriers_do_not_hide_that_fp8_was_asked_for():
    """On a CPU too: what an operand was before is looked for in the program before optimization."""
    (product,) = inspect_step(dequantizes, *OPERANDS, SCALE, device="local").products
    assert product.verdict is Verdict.EMULATED and product.reason.startswith("quantize-dequantize")


@pytest.mark.parametrize("device", on_gpu("h100"))
def test_operands_that_the_launch_widens_are_read_in_fp8(device):
    report = compiled_for(widens_inside, device, True)
    (product,) = report.products
    assert (product.verdict, product.lhs, product.widened) == (Verdict.FP8, "f8e4m3fn", "bf16")
    assert any("widen it inside their Triton kernel: 1;" in finding for finding in report.findings)
    # Estimated at the rate of what is multiplied.
    fast = compiled_for(multiplies_fp8, device, True)
    assert report.step.others.count == 0 and report.estimate.products >= fast.estimate.products
    # A100s read it as well, and have nothing that multiplies it.
    (emulated,) = compiled_for(widens_inside, "a100", True).products
    assert emulated.verdict is Verdict.EMULATED and "compute capability 8.9" in emulated.reason


@pytest.mark.parametrize("device", on_gpu("h100"))
def test_scales_of_blocks_inside_the_launch_are_emulation(device):
    report = compiled_for(scales_blocks_inside, device, True, scale=struct(512, 2))
    assert {product.verdict for product in report.products} == {Verdict.EMULATED}


def wide(x):
    return x.astype(jnp.bfloat16)


COMPUTES_INSIDE = {
    "one scale": (lambda a, b, scale: (wide(a) * scale) @ wide(b), True),
    "two scales": (lambda a, b, scale: (wide(a) * scale * (scale + 1)) @ wide(b), False),
    "relu": (lambda a, b, scale: jax.nn.relu(wide(a)) @ wide(b), False),
    "a bound after a scale": (lambda a, b, scale: wide(a) @ jnp.minimum(wide(b) * scale, 1), False),
    "two operands in E5M2": (lambda a, b, scale: wide(a.astype(E5M2)) @ wide(b.astype(E5M2)), False),
}


@pytest.mark.parametrize("name", on_gpu(*COMPUTES_INSIDE))
def test_a_kernel_that_widens_is_fp8_only_if_cublaslt_has_a_product_for_it(name):
    function, is_fp8 = COMPUTES_INSIDE[name]
    dtype = E5M2 if "E5M2" in name else E4M3
    operands = [jax.ShapeDtypeStruct(x.shape, dtype) for x in OPERANDS]
    scale = jax.ShapeDtypeStruct((), jnp.bfloat16)
    for triton in (True, False):
        report = inspect_step(function, *operands, scale, device="h100", compiler_options={TRITON: triton})
        (product,) = report.products
        assert product.verdict is (Verdict.FP8 if is_fp8 else Verdict.EMULATED), (triton, product.reason)
        assert is_fp8 or product.reason


def triton_fusion(convert, scale=""):
    """A product of FP8 arrays in a Triton fusion, as XLA writes it, that widens its operands or not."""
    lines = ["%a = f8e4m3fn[32,64]{1,0} parameter(0)", "%b = f8e4m3fn[64,48]{1,0} parameter(1)"]
    lhs, rhs = "%a", "%b"
    if convert:
        lines += ["%ca = bf16[32,64]{1,0} convert(%a)", "%cb = bf16[64,48]{1,0} convert(%b)"]
        lhs, rhs = "%ca", "%cb"
    if scale == "bound":
        lines += ["%z = bf16[] constant(0)", "%r = bf16[32,64]{1,0} broadcast(%z), dimensions={}"]
        lines.append("%m = bf16[32,64]{1,0} maximum(%ca, %r)")
        lhs = "%m"
    elif scale:
        shape, dims = {"one": ("bf16[]", ""), "two": ("bf16[]", ""), "blocks": ("bf16[32]{0}", "0")}[scale]
        lines.append(f"%s = {shape} parameter(2)")
        lines.append(f"%r = bf16[32,64]{{1,0}} broadcast(%s), dimensions={{{dims}}}")
        lines.append("%m = bf16[32,64]{1,0} multiply(%ca, %r)")
        lines += ["%m2 = bf16[32,64]{1,0} multiply(%m, %r)"] if scale == "two" else []
        lhs = "%m2" if scale == "two" else "%m"
    lines.append(
        f"ROOT %d = bf16[32,48]{{1,0}} dot({lhs}, {rhs}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, "
        'metadata={op_name="jit(f)/fp8_dot_general/fp8_backward/wgrad/dot_general"}'
    )
    shapes = {"one": "bf16[]", "two": "bf16[]", "blocks": "bf16[32]{0}"}
    third = [f"%s = {shapes[scale]} parameter(2)"] if scale in shapes else []
    entry = [
        "%a = f8e4m3fn[32,64]{1,0} parameter(0)",
        "%b = f8e4m3fn[64,48]{1,0} parameter(1)",
        *third,
        f"ROOT %f = bf16[32,48]{{1,0}} fusion(%a, %b{', %s' if third else ''}), kind=kCustom, calls=%gemm, "
        'backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}',
    ]
    return module(entry, ("%gemm (a: f8e4m3fn[32,64], b: f8e4m3fn[64,48]) -> bf16[32,48]", lines))


@pytest.mark.parametrize(
    "convert, scale, verdict, widened, lhs",
    [
        (False, "", Verdict.FP8, "", "f8e4m3fn"),
        (True, "", Verdict.FP8, "bf16", "f8e4m3fn"),
        (True, "one", Verdict.FP8, "bf16", "f8e4m3fn"),
        (True, "blocks", Verdict.EMULATED, "bf16", "f8e4m3fn"),
        (True, "two", Verdict.EMULATED, "", "bf16"),
        (True, "bound", Verdict.EMULATED, "", "bf16"),
    ],
)
def test_what_a_fusion_of_tritons_reads(convert, scale, verdict, widened, lhs):
    (product,) = read(triton_fusion(convert, scale)).products
    assert (product.verdict, product.widened, product.lhs) == (verdict, widened, lhs)


def test_the_same_outside_triton_is_emulation():
    """Any other fusion is XLA's own loop: nothing in it is a matrix unit's work."""
    text = triton_fusion(True).replace("__triton_gemm", "__other")
    (product,) = read(text).products
    assert (product.verdict, product.lhs) == (Verdict.EMULATED, "bf16")


# --- The report -------------------------------------------------------------------------------------------------------


def fp8_product(x, w):
    return jnp.matmul(x, w, preferred_element_type=jnp.bfloat16)


def training_step(model, x):
    """Of a layer that multiplies FP8 arrays, with the scopes that the package gives its products."""

    def scoped(name, lhs, rhs, contract):
        with jax.named_scope("fp8_dot_general"), jax.named_scope(name):
            numbers = ((contract, contract), ((), ()))
            highest = jax.lax.Precision.HIGHEST
            return jax.lax.dot_general(lhs, rhs, numbers, precision=highest, preferred_element_type=jnp.bfloat16)

    return scoped("fprop", x, model, ((1,))), scoped("wgrad", x, x.astype(E5M2), ((0,)))


@pytest.mark.parametrize("device", on_gpu("h100", "b200"))
def test_the_first_line_says_which_flags_and_what_the_other_setting_changes(no_flags, device):
    args = struct(256, 256, dtype=E4M3), struct(512, 256, dtype=E4M3)
    report = inspect_step(training_step, *args, device=device, other_setting=True)
    line = report.to_markdown().splitlines()[0]
    assert line.startswith(
        f"XLA flags: XLA's defaults ({TRITON}=true); with {TRITON}=false: 100.0% of the FLOPs in FP8"
    )
    assert "other launches instead of" in line and " ms instead of " in line
    assert {p.implementation for p in report.products} == {"Triton dot"}
    assert {p.implementation for p in report.other.products} == {"cublasLt f8"}
    # On Hopper alone, and of gradients alone.
    says = [finding for finding in report.findings if "does not accumulate FP8 in full float32" in finding]
    assert len(says) == (device == "h100")
    assert ("dgrad and wgrad accumulate in full float32" in line) == (device == "h100")
    if device == "h100":
        assert "in full float32 on Hopper: 1;" in says[0]


@pytest.mark.parametrize("device", on_gpu("h100"))
def test_the_other_setting_is_compiled_only_if_asked(no_flags, device, monkeypatch):
    """And showing a report compiles nothing, whether or not it was."""
    args = struct(64, 64, dtype=E4M3), struct(64, 64, dtype=E4M3)
    for options, count in (({}, 1), ({"other_setting": True}, 2)):
        stages = []
        report = inspect_step(fp8_product, *args, device=device, progress=stages.append, **options)
        with monkeypatch.context() as patch:
            patch.setattr(jax.stages.Lowered, "compile", None)
            shown = str(report), report.to_markdown(), report.to_json()
        assert len(stages) == count and (report.other is None) == (count == 1)
        assert all((f"not compiled with {TRITON}=false" in text) == (count == 1) for text in shown[1:])


@pytest.mark.parametrize("device", on_gpu("h100"))
def test_triton_reads_operands_of_any_size(no_flags, device):
    """XLA pads them for cuBLASLt alone."""
    args = struct(512, 4095, dtype=E4M3), struct(4095, 4095, dtype=E4M3)
    says_padded = {
        triton: any("padded" in finding for finding in report.findings)
        for triton in (True, False)
        if (report := inspect_step(fp8_product, *args, device=device, compiler_options={TRITON: triton})).fp8_share
    }
    assert says_padded == {True: False, False: True}


@pytest.mark.parametrize("device", on_gpu("h100"))
def test_the_environment_decides_and_options_come_before_it(monkeypatch, device):
    monkeypatch.setenv("XLA_FLAGS", f"--{TRITON}=false")
    implementations = lambda **options: [
        p.implementation for p in inspect_step(multiplies_fp8, *OPERANDS, SCALE, device=device, **options).products
    ]
    assert implementations() == ["cublasLt f8"]
    assert implementations(compiler_options={TRITON: True}) == ["Triton dot"]

    class Step:
        """A step whose own `jit` has options."""

        __call__ = staticmethod(multiplies_fp8)
        compiler_options = staticmethod(lambda *args, device: {TRITON: len(args) == 3 and device.platform == "cuda"})

    assert [p.implementation for p in inspect_step(Step(), *OPERANDS, SCALE, device=device).products] == ["Triton dot"]


# --- Where a TrainStep is called --------------------------------------------------------------------------------------


def loss(model, x):
    return (jax.vmap(model)(x).astype(jnp.float32) ** 2).mean()


TRAIN = fp8.TrainStep(loss, optax.sgd(0.1))


def calls_it(model, opt_state, x):
    return TRAIN(model, opt_state, x)


def repeats_it(model, opt_state, x):
    arrays, rest = eqx.partition((model, opt_state), eqx.is_array)
    step = lambda arrays, x: (eqx.filter(TRAIN(*eqx.combine(arrays, rest), x)[:2], eqx.is_array), None)
    return jax.lax.scan(step, arrays, x[None])[0]


@jax.jit
def train_step(x):
    """Another one of that name."""
    return x + 1


def arguments_of_train_step():
    model = eqx.nn.Linear(256, 256, use_bias=False, dtype=jnp.bfloat16, key=jax.random.key(0))
    model = eqx.filter_eval_shape(lambda: fp8.fp8_linear_layers(model))
    return model, eqx.filter_eval_shape(TRAIN.init, model), struct(256, 256)


def test_a_train_step_inside_a_function_is_seen():
    local = make_mesh(as_compilable("local"), None, None)
    where = lambda function, *args: Traced.of(function, args, mesh=local, shardings=None).train_steps
    args = arguments_of_train_step()
    assert where(TRAIN, *args) == where(calls_it, *args) == {False}
    assert where(eqx.filter_jit(calls_it), *args) == where(repeats_it, *args) == {True}
    assert where(train_step, struct(4)) == set()


@pytest.mark.parametrize("device", on_gpu("h100"))
def test_the_options_of_a_train_step_count_unless_another_jit_loses_them(no_flags, device):
    args = arguments_of_train_step()
    report = lambda function, **options: inspect_step(function, *args, device=device, **options)
    for function in (TRAIN, calls_it):
        assert str(report(function).flags) == f"--{TRITON}=false" and not report(function).dropped
    lost = report(eqx.filter_jit(calls_it))
    assert str(lost.flags) == "XLA's defaults" and lost.dropped == {TRITON: False}
    assert f"TrainStep inside another jit loses its option --{TRITON}=false" in lost.findings[0]
    assert not report(eqx.filter_jit(calls_it), compiler_options={TRITON: False}).dropped


def test_elsewhere_the_last_line_is_the_flags_alone(no_flags):
    report = inspect_step(lambda x: x @ x, struct(16, 16), device="local")
    assert str(report).splitlines()[-1] == "XLA flags: XLA's defaults" and report.other is None


@pytest.mark.parametrize("device", on_gpu("b200"))
def test_block_scaled_products_are_in_fp8_with_triton_and_without(device):
    make = lambda: fp8.fp8_linear_layers(
        eqx.nn.Linear(256, 256, use_bias=False, dtype=jnp.bfloat16, key=jax.random.key(0)),
        fp8.Fp8Config(recipe="mxfp8", emulate=True),
    )
    step = lambda model, x: jax.vmap(model)(x)
    args = eqx.filter_eval_shape(make), struct(512, 256)
    shares = [
        inspect_step(step, *args, device=device, compiler_options={TRITON: triton}).fp8_share
        for triton in (True, False)
    ]
    assert shares == [1.0, 1.0]


# --- Devices without units for blocks ---------------------------------------------------------------------------------

SCALED_DOT = [
    "%a = f8e4m3fn[32,64]{1,0} parameter(0)",
    "%b = f8e4m3fn[48,64]{1,0} parameter(1)",
    "%sa = f8e8m0fnu[32,2]{1,0} parameter(2)",
    "%sb = f8e8m0fnu[48,2]{1,0} parameter(3)",
    "ROOT %d = bf16[32,48]{1,0} scaled-dot(%a, %b, %sa, %sb), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
]


@pytest.mark.parametrize("name", [name for name in compilable_devices if name != "local"])
def test_block_scaled_products_are_in_fp8_where_supported_says_so(name):
    (product,) = read(module(SCALED_DOT), name).products
    assert (product.verdict is Verdict.FP8) == fp8.recipes.supported("mxfp8", name).is_native
    assert bool(product.reason) == (product.verdict is not Verdict.FP8)


# --- Mixtures of experts ----------------------------------------------------------------------------------------------


# Compiles grouped GPU kernels; CI runs it now and then.
_FP8_EXPERTS = pytest.param(True, id="fp8", marks=pytest.mark.more)


@pytest.mark.parametrize("converted", [pytest.param(False, id="bf16"), _FP8_EXPERTS])
@pytest.mark.parametrize("device", on_gpu("h100"))
def test_useful_flops_of_experts(device, converted):
    """XLA multiplies every row by the kernels of all four experts: a quarter is what was asked for. Ours does not."""
    Experts, In, Out, Row = hax.make_axes(experts=4, d=128, f=256, row=640)

    def make():
        layer = hnn.MoELinear.init(Experts, In, Out, key=jax.random.key(0), use_bias=False)
        layer = jax.tree.map(lambda x: x.astype(jnp.bfloat16), layer)
        return fp8.fp8_linear_layers(layer) if converted else layer

    def step(layer, x, sizes):
        loss = lambda layer: hax.sum(layer(x, sizes).astype(jnp.float32) ** 2).scalar()
        return fp8.filter_grad(loss)(layer)

    x, sizes = hax.NamedArray(struct(640, 128), (Row, In)), hax.NamedArray(struct(4, dtype=jnp.int32), (Experts,))
    report = inspect_step(step, eqx.filter_eval_shape(make), x, sizes, device=device)
    asked = 2 * 640 * 128 * 256
    assert [product.useful_flops for product in report.products] == [asked, asked]
    assert report.step.useful_flops == 2 * asked and "useful FLOPs" in str(report)
    if converted:
        # Tiles of 64 rows, half of each group's last one empty; and a piece of 64 rows more in the sum of each group.
        assert report.step.flops == asked * (1 + 4 * 32 / 640) + asked * (1 + 4 * 64 / 640)
        assert not any("are useful" in finding for finding in report.findings)
    else:
        assert report.step.flops == 4 * 2 * asked
        assert any("of which 83.9 MFLOP are useful" in finding for finding in report.findings)


def test_a_grouped_product_that_stays_one_is_all_useful():
    text = module(
        [
            "%a = bf16[32,64]{1,0} parameter(0)",
            "%b = bf16[4,64,48]{2,1,0} parameter(1)",
            "%g = s32[4]{0} parameter(2)",
            "ROOT %d = f32[32,48]{1,0} ragged-dot(%a, %b, %g), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
            "lhs_ragged_dims={0}, rhs_group_dims={0}",
        ]
    )
    program = read(text, written=text)
    assert program.useful_flops == program.flops == 2 * 32 * 64 * 48
