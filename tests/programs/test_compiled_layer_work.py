"""What FP8 adds, as `FasterOn` counts it, against what XLA compiles: bytes and launches beside the products."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest

import haliax_fp8 as fp8
from haliax_fp8.preflight import compilable_devices, inspect_step


# Each compiles two programs, and all check one formula: CI runs some of them.
pytestmark = [pytest.mark.slow, pytest.mark.more]

PER_TENSOR_OR_ROW = ("delayed", "current", "static", "rowwise", "rowwise_wgrad_bf16")
BLOCKS = ("deepseek", "mxfp8")


def case(device, recipe, *sizes):
    missing = compilable_devices[device].missing()
    skip = pytest.mark.skipif(missing is not None, reason=missing or "")
    return pytest.param(device, recipe, sizes, marks=skip, id=f"{device}-{recipe}-{'x'.join(map(str, sizes))}")


def in_bf16(make):
    cast = lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x
    return lambda: jax.tree.map(cast, make())


def program(model, grad, inputs, grads, device, call):
    """The gradients of a model and of its input, with its output: three products for each layer."""

    def loss(arguments, g):
        model, x = arguments
        out = call(model, x)
        return (out * g).sum().scalar().astype(jnp.float32), out

    step = lambda model, x, g: grad(loss, has_aux=True)((model, x), g)
    # The figures are those of products in cuBLASLt; block-scaled ones are cuDNN's with either setting.
    options = {"xla_gpu_enable_triton_gemm": False}
    return inspect_step(step, model, inputs, grads, device=device, compiler_options=options).step


def added(make, recipe, inputs, grads, device, call=lambda model, x: model(x), tokens=None):
    """What FP8 adds to a program in bf16: bytes and launches beside the products; and what is predicted."""
    plain = eqx.filter_eval_shape(in_bf16(make))
    config = fp8.Fp8Config(recipe=recipe, emulate=True)
    model = eqx.filter_eval_shape(lambda: fp8.fp8_linear_layers(in_bf16(make)(), config))
    x, g = (eqx.filter_eval_shape(lambda axes=axes: hax.zeros(axes, jnp.bfloat16)) for axes in (inputs, grads))
    bf16 = program(plain, eqx.filter_grad, x, g, device, call).others
    quantized = program(model, fp8.filter_grad, x, g, device, call).others
    (row,) = fp8.describe(model, predict=fp8.layers.FasterOn(device, tokens=tokens or inputs[0].size))
    return quantized.bytes - bf16.bytes, quantized.count - bf16.count, row.prediction


@pytest.mark.parametrize(
    "device, recipe, sizes",
    [
        *(case("h100", recipe, 4096, 2048, 8192) for recipe in PER_TENSOR_OR_ROW),
        *(case("b200", recipe, 4096, 2048, 8192) for recipe in PER_TENSOR_OR_ROW + BLOCKS),
        case("h100", "delayed", 1024, 4096, 1024),
        case("h100", "current", 16384, 1024, 1024),
        case("h100", "rowwise", 1024, 1024, 4096),
        # Sides that are multiples of 8 and not of 16.
        case("h100", "delayed", 4096, 2056, 8200),
    ],
)
def test_one_layer(device, recipe, sizes):
    tokens, inputs, outputs = sizes
    T, In, Out = hax.make_axes(token=tokens, In=inputs, Out=outputs)
    make = lambda: hnn.Linear.init(In, Out, key=jax.random.key(0), use_bias=False)
    moved, count, prediction = added(make, recipe, (T, In), (T, Out), device)
    assert prediction.overhead_bytes == pytest.approx(moved, rel=0.15)
    assert prediction.overhead_launches == pytest.approx(count, abs=1, rel=0.35)


@pytest.mark.parametrize("device, recipe, sizes", [case("h100", "delayed", 4096, 2050, 8190)])
def test_what_bf16_pads_too(device, recipe, sizes):
    """Of sides that both pad, both are predicted to pad."""
    tokens, inputs, outputs = sizes
    T, In, Out = hax.make_axes(token=tokens, In=inputs, Out=outputs)
    make = lambda: hnn.Linear.init(In, Out, key=jax.random.key(0), use_bias=False)
    moved, _, prediction = added(make, recipe, (T, In), (T, Out), device)
    padding = 4 * 2 * (tokens * inputs + inputs * outputs + tokens * outputs)
    assert prediction.overhead_bytes - padding == pytest.approx(moved, rel=0.15)


@pytest.mark.parametrize(
    "device, recipe, sizes", [case("h100", recipe, 4096, 2048, 1024) for recipe in ("delayed", "current", "rowwise")]
)
def test_ensembles(device, recipe, sizes):
    tokens, inputs, outputs = sizes
    Member, T, In, Out = hax.make_axes(member=4, token=tokens, In=inputs, Out=outputs)
    keys = jax.random.split(jax.random.key(0), Member.size)
    make = lambda: eqx.filter_vmap(lambda key: hnn.Linear.init(In, Out, key=key, use_bias=False))(keys)
    # Members see arrays without the member axis.
    call = lambda model, x: hax.named(
        eqx.filter_vmap(lambda m, x: m(hax.named(x, (T, In))).array)(model, x.array), (Member, T, Out)
    )
    moved, count, prediction = added(make, recipe, (Member, T, In), (Member, T, Out), device, call, tokens)
    assert prediction.overhead_bytes == pytest.approx(moved, rel=0.15)
    # As for one layer: members' scales take small launches that the prediction does not tell apart.
    assert prediction.overhead_launches == pytest.approx(count, abs=3, rel=0.35)


class Layer(eqx.Module):
    """A layer whose output is the next one's input."""

    linear: hnn.Linear

    @staticmethod
    def init(In, *, key):
        return Layer(hnn.Linear.init(In, In.alias("Out"), key=key, use_bias=False))

    def __call__(self, x):
        return hax.tanh(self.linear(x).rename({"Out": "In"}))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("kind", [hnn.Stacked, hnn.BlockSeq])
@pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason=compilable_devices["h100"].missing() or "")
def test_layers_in_a_model(kind, recipe):
    """Casts merge with what is around them, or keep it from merging; a scan stores residuals of one byte, not two."""
    T, In, Block = hax.make_axes(token=4096, In=2048, block=4)
    make = lambda: kind.init(Block, Layer)(In, key=jax.random.split(jax.random.key(0), 4))
    fold = lambda model, x: model.fold(x)
    config = fp8.Fp8Config(recipe=recipe)
    plain = eqx.filter_eval_shape(in_bf16(make))
    model = eqx.filter_eval_shape(lambda: fp8.fp8_linear_layers(in_bf16(make)(), config))
    x = eqx.filter_eval_shape(lambda: hax.zeros((T, In), jnp.bfloat16))
    bf16 = program(plain, eqx.filter_grad, x, x, "h100", fold).others
    quantized = program(model, fp8.filter_grad, x, x, "h100", fold).others
    rows = fp8.describe(model, predict=fp8.layers.FasterOn("h100", tokens=4096))
    assert quantized.bytes - bf16.bytes <= 1.25 * sum(row.prediction.overhead_bytes for row in rows)


@pytest.mark.parametrize("device, recipe, sizes", [case("h100", "delayed", 4096, 2048, 4096)])
def test_experts_add_no_more(device, recipe, sizes):
    tokens, inputs, outputs = sizes
    T, In, Out, Experts = hax.make_axes(token=tokens, In=inputs, Out=outputs, experts=8)
    make = lambda: hnn.MoELinear.init(Experts, In, Out, key=jax.random.key(0), use_bias=False)
    call = lambda model, x: model(x, hax.full(Experts, tokens // 8, jnp.int32))
    moved, _, prediction = added(make, recipe, (T, In), (T, Out), device, call)
    assert moved <= prediction.overhead_bytes
