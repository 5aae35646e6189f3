"""Arguments of the wrong kind: each is refused with an error that names the argument and what to give instead."""

import inspect
import typing

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import unchecked

import haliax_fp8 as fp8
from haliax_fp8 import DelayedScaling, Fp8DotGeneral, Fp8Einsum, Recipe, ops
from haliax_fp8.layers.config import Fp8Options
from haliax_fp8.recipes import (
    E4M3,
    BlockScaling,
    CurrentScaling,
    HadamardScaling,
    MovingAverage,
    Percentile,
    Quantization,
    RowwiseScaling,
    StaticScaling,
)


MATRICES = (((1,), (0,)), ((), ()))
x, w = jnp.ones((2, 4)), jnp.ones((4, 3))
rows, kernels = jnp.ones((4, 2)), jnp.ones((2, 2, 3))


def op(recipe="current"):
    return Fp8DotGeneral.init(recipe)


def ragged(sizes, lhs=rows):
    return op().ragged_dot(lhs, kernels, sizes)


def ensemble(layers=3):
    return eqx.filter_vmap(lambda key: fp8.fp8_linear_layers(eqx.nn.Linear(4, 3, key=key)))(
        jax.random.split(jax.random.key(0), layers)
    )


MODEL = eqx.nn.Linear(4, 3, key=jax.random.key(0))
PLAIN = eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(0))
CONVERTED = fp8.fp8_linear_layers(PLAIN)
OVERWRITES = fp8.partition_for_grad_overwrite(CONVERTED)[0]


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def with_weight(weight):
    return eqx.tree_at(lambda layer: layer.weight, MODEL, weight)


def applied(updates=None, overwrites=OVERWRITES):
    return fp8.apply_updates(CONVERTED, fp8.trainable(CONVERTED) if updates is None else updates, overwrites)


def labels_that_optax_calls():
    optimizer = optax.multi_transform({"all": optax.sgd(0.1)}, jax.tree.map(lambda _: "all", fp8.trainable(CONVERTED)))
    optimizer.init(fp8.trainable(CONVERTED))


CASES = {
    "labels that are a model": (labels_that_optax_calls, "labels or masks for Optax, pass lambda _: labels"),
    "operands of a recipe": (
        lambda: Recipe(DelayedScaling(), DelayedScaling(), DelayedScaling()),
        r"input=DelayedScaling.* of Recipe is not a Quantization; use .*Recipe.of\(scaling\)",
    ),
    "a recipe of a name": (
        lambda: Recipe.of("delayed"),
        "scaling='delayed' of Recipe.of is not a Scaling; use .*recipes.by_name",
    ),
    "a format's name": (
        lambda: Quantization("E4M3", CurrentScaling()),
        "format='E4M3' of Quantization is not a Format; use E4M3 or E5M2",
    ),
    "format and scaling exchanged": (lambda: Quantization(CurrentScaling(), E4M3), "format=Current.* is not a Format"),
    "no rounding": (
        lambda: Quantization(E4M3, CurrentScaling(), "nearest"),
        "rounding='nearest' of Quantization is not a Rounding; use Rounding.TO_NEAREST or Rounding.STOCHASTIC",
    ),
    "no scaling behind a rotation": (
        lambda: HadamardScaling("nvfp4"),
        "scaling='nvfp4' of HadamardScaling",
    ),
    "a block's size": (lambda: BlockScaling(size=12.5), "size=12.5 of BlockScaling must be an integer"),
    "current, power of two": (
        lambda: CurrentScaling(power_of_two="yes"),
        "power_of_two='yes' .* must be True or False",
    ),
    "rows, power of two": (
        lambda: RowwiseScaling(power_of_two=1),
        "power_of_two=1 .* must be True or False",
    ),
    "an average's decay": (
        lambda: MovingAverage("a"),
        "decay='a' of MovingAverage must be a finite number",
    ),
    "a percentile": (lambda: Percentile("99"), "percent='99' of Percentile must be a finite number"),
    "a static scale": (lambda: StaticScaling("1"), "scale='1' of StaticScaling must be a finite number"),
    "a static margin": (
        lambda: StaticScaling(margin=100),
        "margin=100 of StaticScaling must lie between -17 and 17",
    ),
    "an op's recipe": (lambda: Fp8DotGeneral.init(3), "recipe=3 is not a recipe"),
    "a device": (
        lambda: fp8.recipes.supported("delayed", 3),
        "device=3 of supported is not a Device; use a name such as 'h100'",
    ),
    "a list as an operand": (lambda: op()([[1.0] * 4], w, MATRICES), r"lhs of an FP8 product is a list; .*jnp.asarray"),
    "a number as an operand": (lambda: op()(x, 1.0, MATRICES), "rhs of an FP8 product is a float; pass an array"),
    "a list in a grouped product": (lambda: ragged(jnp.array([1, 1]), [[1.0, 1.0]]), "lhs of an FP8 product is a list"),
    "a list in an einsum": (lambda: Fp8Einsum.init()("ab,bc->ac", x, [[1.0]]), "kernel of an FP8 einsum is a list"),
    "no dimension numbers": (
        lambda: op()(x, w, None),
        r"dimension_numbers=None must be \(\(lhs_contract, rhs_contract\)",
    ),
    "flat dimension numbers": (lambda: op()(x, w, (1, 0)), r"dimension_numbers=\(1, 0\) must be"),
    "half of them": (lambda: op()(x, w, (((1,), (0,)),)), "dimension_numbers=.* must be"),
    "group sizes in a list": (lambda: ragged([2, 2]), r"group_sizes=\[2, 2\] must be an array of integers"),
    "fractional group sizes": (lambda: ragged(jnp.array([2.0, 2.0])), "group_sizes=.* must be an array of integers"),
    "groups beyond the rows": (
        lambda: ragged(jnp.array([2, 3])),
        r"group_sizes=\[2, 3\] must not .* the 4 rows of lhs",
    ),
    "negative groups": (lambda: ragged(jnp.array([-1, 3])), r"group_sizes=\[-1, 3\] must not be negative"),
    "state that is not there": (
        lambda: eqx.tree_at(lambda op: op.state, op("delayed"), None)(x, w, MATRICES),
        "without its state; .*eqx.combine",
    ),
    "an ensemble, not mapped": (lambda: jax.vmap(ensemble())(x), r"state of \(3,\) layers.*eqx.filter_vmap"),
    "a cast of integers": (
        lambda: fp8.recipes.saturating_cast(jnp.array([1]), E4M3),
        "x of saturating_cast is int32, not a float",
    ),
    "a cast to a name": (
        lambda: fp8.recipes.saturating_cast(x, "E4M3"),
        "format='E4M3' of saturating_cast is not a Format",
    ),
    "quantize, a scale that does not fit": (
        lambda: fp8.recipes.quantize(x, jnp.ones(3), E4M3),
        r"scale of shape \(3,\) does not fit data of shape \(2, 4\)",
    ),
    "quantize, a scale of 0": (
        lambda: fp8.recipes.quantize(x, jnp.float32(0), E4M3),
        "scale must be positive and finite",
    ),
    "quantize, a scale of bfloat16": (
        lambda: fp8.recipes.quantize(x, jnp.bfloat16(1), E4M3),
        "scale.dtype=bfloat16 must be float32",
    ),
    "quantize, integers": (
        lambda: fp8.recipes.quantize(jnp.array([1]), 1.0, E4M3),
        "x.dtype=int32 is not floating-point",
    ),
    "quantize to a name": (lambda: fp8.recipes.quantize(x, 1.0, "E4M3"), "cast='E4M3' must be a format such as E4M3"),
    "quantize to float16": (
        lambda: fp8.recipes.quantize(x, 1.0, jnp.float16),
        "cast=float16 is not the dtype of a format",
    ),
    "scale and history exchanged": (
        lambda: ops.in_q(jnp.float32, E4M3.dtype, x, jnp.zeros(16), jnp.ones(1)),
        r"scale.shape=\(16,\).*are scale and amax_history swapped",
    ),
    "scale and history exchanged, qdq": (
        lambda: ops.in_qdq(jnp.float32, E4M3.dtype, x, jnp.zeros(16), jnp.ones(1)),
        "are scale and amax_history swapped",
    ),
    "rematerialized": (
        lambda: fp8.memory.rematerialized(3),
        "function=3 of rematerialized is not a Callable; use a function",
    ),
    "compressed": (lambda: fp8.memory.compressed(3), "function=3 of compressed is not a Callable; use a function"),
    "compressed, scaling": (
        lambda: fp8.memory.compressed(jax.nn.silu, "rowwise"),
        "scaling='rowwise' of compressed is not a Sc",
    ),
    # Numbers that are something else than they look.
    "a fraction for a percentage": (lambda: Percentile(0.9999), r"percent=0.9999 .*would clip 99 % .*use 99\.99"),
    "another fraction": (lambda: Percentile(0.95), r"percent=0.95 .*not a fraction; use 95"),
    "most of a tensor": (lambda: Percentile(5.0), r"percent=5.0 .*would clip 95 % .*use 99\.99"),
    "a huge history": (lambda: DelayedScaling(2**40), "amax_history_length=1099511627776 must be at most 65536"),
    "the configuration's history": (
        lambda: fp8.Fp8Config(amax_history_length=2**30),
        "amax_history_length=1073741824 must be at most",
    ),
    "a huge interval": (
        lambda: DelayedScaling(update_interval=2**40),
        "update_interval=1099511627776 must .* at most 16777216",
    ),
    "a huge block": (lambda: BlockScaling(2**40), "size=1099511627776 of a block must be at most 65536"),
    "a denormal scale": (lambda: StaticScaling(1e-45), "scale=1e-45 .*smallest normal float32"),
    "a negative size": (lambda: Fp8DotGeneral.init(kernel_shape=(-1,)), r"kernel_shape=\(-1,\) has a negative size"),
    "one negative size": (lambda: Fp8DotGeneral.init(kernel_shape=(8, -2)), r"kernel_shape=\(8, -2\) has a negative"),
    # What has another call.
    "an einsum by its class": (lambda: Fp8Einsum(), r"use Fp8Einsum\.init\(recipe='delayed'\)"),
    "an op by its class": (lambda: Fp8DotGeneral(), r"use Fp8DotGeneral\.init\(recipe='delayed'\)"),
    "no recipe": (lambda: fp8.recipes.by_name(None), "name=None is not the name of a recipe"),
    "no device": (lambda: fp8.devices.Device.by_name(float("nan")), "name=nan is not the name of a device"),
    "an einsum without subscripts": (
        lambda: Fp8Einsum.init("current")(None, x, w),
        "subscripts=None of an FP8 einsum must be a string",
    ),
    # Arrays that are something else.
    "an input in FP8": (lambda: op()(x.astype(E4M3.dtype), w, MATRICES), "lhs .*float8_e4m3fn, but the product quan"),
    "a kernel in FP8": (lambda: op()(x, w.astype(E4M3.dtype), MATRICES), "rhs .*float8_e4m3fn, but the product quan"),
    "rows in FP8": (lambda: ragged(jnp.array([2, 2]), rows.astype(E4M3.dtype)), "lhs .*float8_e4m3fn"),
    "a layer's input in FP8": (
        lambda: fp8.fp8_linear_layers(MODEL)(jnp.ones(4, E4M3.dtype)),
        "lhs .*float8_e4m3fn, but the product",
    ),
    "a weight that is text": (lambda: fp8.fp8_linear_layers(with_weight("w")), "its weight is of type str"),
    "a weight in FP8": (
        lambda: fp8.fp8_linear_layers(with_weight(MODEL.weight.astype(E4M3.dtype))),
        "its weight has dtype float8_e4m3fn already",
    ),
    "a scale that is text": (lambda: fp8.recipes.quantize(x, "1", E4M3), "scale='1' is not an array"),
    "a scale of Flax's functions": (
        lambda: ops.quantize(x, E4M3.dtype, "1", jnp.float32),
        "scale='1' is not an array",
    ),
    "no scale": (lambda: ops.dequantize(x, jnp.float32, None), "scale=None is not an array"),
    "a number to split": (lambda: fp8.partition_for_grad_overwrite(3), "tree is of type int"),
    "a number to train": (lambda: fp8.trainable(3), "model is of type int, and has no layers"),
    "no optimizer": (lambda: fp8.memory.HostOptimizer(None), "optimizer=None of HostOptimizer is not an optimizer"),
    "an optimizer's function": (
        lambda: fp8.memory.HostOptimizer(optax.sgd),
        "of HostOptimizer is not an optimizer; use optax.adamw",
    ),
    "no folder": (lambda: fp8.huggingface.check_folder(None), "directory=None is not a path"),
    "empty files": (
        lambda: fp8.huggingface.export_model(MODEL, "unused", shard_bytes=0),
        "shard_bytes=0 must be a positive integer",
    ),
    "files without a size": (
        lambda: fp8.huggingface.export_model(MODEL, "unused", shard_bytes=float("nan")),
        "shard_bytes=nan must be a positive integer",
    ),
    "what JSON does not know": (
        lambda: fp8.huggingface.export_model(MODEL, "unused", hf_config={"a": float("nan")}),
        "hf_config={'a': nan} cannot be written as JSON",
    ),
    # The arguments of a step.
    "a model for updates": (lambda: applied(updates=CONVERTED), "updates contain a .*; pass the updates"),
    "negated overwrites": (
        # State that is still being computed is not waited for.
        lambda: applied(overwrites=jax.block_until_ready(jax.tree.map(jnp.negative, OVERWRITES))),
        "overwrites hold negative scales",
    ),
    "batch and state exchanged": (
        lambda: fp8.TrainStep(loss, optax.adam(0.1))(CONVERTED, x, optax.adam(0.1).init(fp8.trainable(CONVERTED))),
        r"opt_state is an array of shape .*step\(model, opt_state, \*batch\)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name(case):
    call, message = CASES[case]
    with unchecked(), pytest.raises(ValueError, match=message):
        call()


# --- What is accepted, and right --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3.dtype, jnp.float8_e4m3fn, "float8_e4m3fn"], ids=str)
def test_a_dtype_quantizes_as_its_format_does(dtype):
    """A dtype can be called as well, and would not clip: 1000 would be NaN."""
    values = jnp.array([0.3, 1000.0, -1e30])
    quantized = fp8.recipes.quantize(values, 1.0, dtype)
    expected = fp8.recipes.quantize(values, jnp.float32(1), E4M3)
    assert quantized.data.dtype == E4M3.dtype
    np.testing.assert_array_equal(quantized.data.astype(np.float32), expected.data.astype(np.float32))
    np.testing.assert_array_equal(quantized.data.astype(np.float32)[1:], [448.0, -448.0])


@pytest.mark.parametrize("margin", [-17, 17])
def test_the_largest_margins_leave_something(margin):
    """The amax itself neither vanishes nor, with headroom, is clipped: 448 * 2**-17 rounds to two subnormals."""
    memory = DelayedScaling(amax_history_length=1, margin=margin).memory
    table = memory.update(jnp.array([memory.first_row]), jnp.array([[3.0]]), (E4M3.max,))
    data = fp8.recipes.quantize(jnp.array([3.0]), table[0, 0], E4M3).data
    assert 0.0 < float(data[0]) <= 448.0
    assert float(data[0]) == (448.0 if margin < 0 else 2 * E4M3.smallest_subnormal)


def test_an_ensemble_under_vmap_and_arrays_of_numpy():
    out = eqx.filter_vmap(lambda layer, x: jax.vmap(layer)(x), in_axes=(0, None))(ensemble(), x)
    assert out.shape == (3, 2, 3)
    with unchecked():
        assert op()(np.ones((2, 4), np.float32), np.ones((4, 3), np.float32), MATRICES).shape == (2, 3)


def test_groups_are_checked_where_their_sizes_are_known_only():
    out = jax.jit(lambda sizes: ragged(sizes))(jnp.array([1, 3]))
    np.testing.assert_array_equal(out, ragged(jnp.array([1, 3])))
    assert Fp8DotGeneral.init(kernel_shape=(3,), stack=(hax.Axis("layers", 2),)).stack[0].size == 2


def test_options_of_conversion_are_those_of_the_configuration():
    """Editors complete them from the type."""
    options = typing.get_type_hints(Fp8Options)
    assert options == typing.get_type_hints(fp8.Fp8Config)
    assert inspect.signature(fp8.fp8_linear_layers).parameters["options"].annotation in (
        typing.Unpack[Fp8Options],
        "Unpack[Fp8Options]",
    )


def test_names_of_other_libraries():
    assert fp8.recipes.by_name("blockwise") is fp8.recipes.named["deepseek"]
    for name, meant in (
        ("quantize_linear_layers", r"use fp8_linear_layers\("),
        ("QuantizationConfig", r"use Fp8Config\("),
        ("Fp8DotGeneralOp", r"use Fp8DotGeneral\.init\("),
        ("DotGeneralOp", r"any function.*Fp8DotGeneral\.init\("),
        ("DefaultDotGeneralOp", r"use restore_linear_layers\("),
        ("Int8DotGeneralOp", r"use Fp8DotGeneral\.init\(.*haliax\.quantization"),
        ("fp8_scaled_dot_general", r"use Fp8DotGeneral\.init\("),
    ):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'; {meant}"):
            getattr(fp8, name)
    with pytest.raises(AttributeError, match="has no attribute 'other'$"):
        _ = fp8.other
