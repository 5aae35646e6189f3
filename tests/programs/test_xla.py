"""What each function of `_jax/xla.py` does to a program for an H100: the program with it and without it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_models import on, struct
from jax import lax

from haliax_fp8._jax import xla


f8, f32 = jnp.float8_e4m3fn, jnp.float32
ROWS, IN, OUT = 1024, 512, 256


def numbers(*shape):
    return jax.ShapeDtypeStruct(shape, f32)


def quantized(x):
    return jnp.clip(x.astype(f32) / 3.0, -448.0, 448.0).astype(f8)


def product(x, w, precision=None):
    numbers = (((1,), (0,)), ((), ()))
    return lax.dot_general(x, w, numbers, precision=precision, preferred_element_type=jnp.bfloat16)


def scales_of_layers(told, table, *xs):
    scales = (xla.computed_together if told else lambda x: x)(jnp.exp(table[:, 0]) * 3.0)
    return [x * scales[i] for i, x in enumerate(xs)]


def slices(told, table):
    scales = xla.computed_together(jnp.sqrt(jnp.max(table, axis=1)))
    one = xla.not_constant(np.float32(1.0)) if told else np.float32(1.0)
    return [scales[i : i + 1] * one for i in range(6)]


def layers(told, table, *xs):
    scales = xla.computed_together(jnp.sqrt(jnp.max(table, axis=1)))
    scales = [scales[i] * xla.not_constant(np.float32(1.0)) for i in range(6)]
    scales = xla.not_merged_across_layers(scales) if told else scales
    return [x * scale for x, scale in zip(xs, scales, strict=True)]


def joined_parts(told, table, *rows):
    """A number of a common table in front of the rest of each array's rows."""
    table = xla.computed_together(jnp.sqrt(jnp.max(table, axis=1, keepdims=True)))
    join = xla.side_by_side if told else lambda parts: lax.concatenate(parts, 1)
    return [join([table[i : i + 1, :1], x[:, 2:], x[:, 1:2]]) for i, x in enumerate(rows)]


def products_of_one_operand(told, x, *ws):
    return [product(xla.operand_per_sharer(x, w) if told else x, w) for w in ws]


def precise_products_of_one_operand(told, x, *ws):
    indices = range(len(ws)) if told else [None] * len(ws)
    return [product(x, w, xla.precision_per_sharer(index)) for index, w in zip(indices, ws, strict=True)]


def kernel_quantized_twice(told, w, x):
    hidden = jnp.tanh(product(x.astype(f8), quantized(w)))
    again = xla.prevent_cse_with_forward(w) if told else w
    return product(hidden.astype(f8), quantized(again).T)


def transposed(told, x):
    data = quantized(x)
    return data, (xla.transposed_separately(data) if told else data).T, jnp.max(jnp.abs(x))


def cast_for_both(told, x):
    data = quantized(x)
    data = xla.transposed_from_fp8(data) if told else data
    return data, data.T


def rounded(told, x):
    narrow = x.astype(f8)
    return (xla.force_cast(narrow) if told else narrow).astype(f32) * 2.0


def measured(told, x):
    """An operand's statistics: three reductions of it and of what it was quantized to."""
    data = quantized(x)
    x, data = xla.computed_before_measured((x, data)) if told else (x, data)
    back = data.astype(f32) * 3.0
    error, clipped = jnp.sum(jnp.square(back - x.astype(f32))), jnp.sum(jnp.abs(data.astype(f32)) == 448.0, axis=0)
    return data, error, clipped, jnp.sum(jnp.abs(back), axis=1)


def launches(text):
    return len(re.findall(r"^  (?:ROOT )?%\S+ = .* fusion\(", text[text.index("ENTRY") :], re.MULTILINE))


def exponentials(text):
    return text.count(" exponential(")


def products(text):
    return text.count('custom_call_target="__cublas')


def casts_to_fp8(text):
    return len(re.findall(r"= f8e4m3fn\S* convert\(", text))


def readers_of_the_argument(text):
    entry = text[text.index("ENTRY") :]
    (argument,) = re.findall(r"(%\S+) = \S+ parameter\(0\)", entry)
    return len(re.findall(rf"fusion\({re.escape(argument)}\)", entry))


ROWS_OF_LAYERS = (numbers(6, 64), *(numbers(256, 256) for _ in range(6)))
DIFFERENT_LAYERS = (numbers(6, 64), *(numbers(64 * (i + 1), 256) for i in range(6)))
ONE_OPERAND = (struct(ROWS, IN), *(struct(IN, OUT) for _ in range(3)))

# A function that is told or not, its arguments, what is counted, and how often it is found if told, and if not.
CASES = {
    "computed_together": (scales_of_layers, DIFFERENT_LAYERS, exponentials, 1, 6),
    "side_by_side": (joined_parts, (numbers(6, 64), *(numbers(1, 64) for _ in range(6))), launches, 2, 7),
    "operand_per_sharer": (products_of_one_operand, ONE_OPERAND, products, 3, 1),
    "precision_per_sharer": (precise_products_of_one_operand, ONE_OPERAND, products, 3, 1),
    "prevent_cse_with_forward": (kernel_quantized_twice, (struct(IN, IN), struct(ROWS, IN)), casts_to_fp8, 4, 3),
    "transposed_separately": (transposed, (struct(ROWS, IN),), readers_of_the_argument, 1, 2),
    "transposed_from_fp8": (cast_for_both, (struct(ROWS, IN),), launches, 2, 1),
    "force_cast": (rounded, (numbers(ROWS),), casts_to_fp8, 1, 0),
}


def text_of(function, told, args, device, compiled):
    return compiled(jax.jit(lambda *args: function(told, *args)), *args, device=device)[0]


@pytest.mark.parametrize(("name", "device"), on(CASES, ["h100"]))
def test_xla_does_as_it_is_told(name, device, compiled):
    function, args, count, if_told, if_not = CASES[name]
    counts = [count(text_of(function, told, args, device, compiled)) for told in (True, False)]
    assert counts == [if_told, if_not]


# A function, its arguments, and whether it is to have a launch for each of the six layers if told.
LAUNCHES = {
    "not_constant": (slices, ROWS_OF_LAYERS[:1], False),
    "not_merged_across_layers": (layers, ROWS_OF_LAYERS, True),
}


@pytest.mark.parametrize(("name", "device"), on(LAUNCHES, ["h100"]))
def test_xla_merges_or_separates_launches(name, device, compiled):
    function, args, separates = LAUNCHES[name]
    told, not_told = (launches(text_of(function, told, args, device, compiled)) for told in (True, False))
    few, many = (not_told, told) if separates else (told, not_told)
    assert few < 6 <= many


def gated(told, x, gate_kernel, up_kernel, down_kernel, grad):
    """SwiGLU between FP8 products, recomputed with its gradients, as they are in a checkpointed block."""
    outputs = product(x, gate_kernel), product(x, up_kernel)

    def swiglu(gate, up):
        gate, up = (y.astype(f32) for y in map(xla.read_together if told else lambda y: y, (gate, up)))
        return (jax.nn.silu(gate) * up).astype(jnp.bfloat16)

    out, pullback = jax.vjp(swiglu, *outputs)
    arrays = out, *pullback(product(grad, down_kernel))
    return [(quantized(y), jnp.max(jnp.abs(y.astype(f32)))) for y in arrays], [
        product(quantized(y).T, x) for y in arrays
    ]


def readers_of_products(text):
    """Launches, besides products, of the entry."""
    return len(re.findall(r" fusion\(.*kind=k(?:Loop|Input)", text[text.index("ENTRY") :]))


def fp8(*shape):
    return struct(*shape, dtype=f8)


@pytest.mark.parametrize(("name", "device"), on(["read_together"], ["h100"]))
def test_what_reads_a_product_of_tritons_is_fused(name, device, compiled):
    """With XLA's defaults. The sizes are Llama's: how XLA fuses depends on them."""
    rows, width, inner = 8192, 4096, 14336
    args = fp8(rows, width), fp8(width, inner), fp8(width, inner), fp8(width, inner), fp8(rows, width)
    texts = [
        compiled(jax.jit(lambda *args, told=told: gated(told, *args)), *args, device=device, compiler_options={})[0]
        for told in (True, False)
    ]
    told, not_told = map(readers_of_products, texts)
    assert told < not_told


def activated(told, x, kernel):
    """What widens, its activation in FP8, and the amax of that."""
    out = product(x, kernel)
    activation = jax.nn.silu((xla.read_by_activation(out, x) if told else out).astype(f32)).astype(jnp.bfloat16)
    return quantized(activation), jnp.max(jnp.abs(activation.astype(f32)))


@pytest.mark.parametrize(("name", "device"), on(["read_by_activation"], ["h100"]))
def test_what_casts_and_measures_an_activation_is_one_launch(name, device, compiled):
    args = fp8(8192, 4096), fp8(4096, 14336)
    texts = [
        compiled(jax.jit(lambda *args, told=told: activated(told, *args)), *args, device=device, compiler_options={})[0]
        for told in (True, False)
    ]
    told, not_told = map(readers_of_products, texts)
    assert told < not_told


def test_each_element_is_divided():
    random = np.random.default_rng(0)
    x, divisor = random.uniform(0, 448, (8, 64)).astype(np.float32), random.uniform(1, 9, (8, 1)).astype(np.float32)
    divided = jax.jit(lambda x, divisor: x / xla.divisor_of_each(divisor, x.shape))(x, divisor)
    np.testing.assert_array_equal(divided, x / divisor)
    assert (np.asarray(jax.jit(jnp.divide)(x, divisor)) != x / divisor).any()


# --- Completeness -----------------------------------------------------------------------------------------------------

# Functions that have a test of their own, in this folder. Small programs do not show what `transposed_once` does.
SHOWN_BY = {
    "divisor_of_each": "test_xla.py::test_each_element_is_divided",
    "divided_as_made": "test_several_devices.py::test_what_devices_send_and_keep",
    "gathered_once": "test_several_devices.py::test_what_devices_send_and_keep",
    "transposed_separately_on_one": "test_several_devices.py::test_one_device_transposes_separately",
    "keep_cast": "test_compiled_widened.py",
    "keep_cast_in_parts": "test_compiled_widened.py",
    "computed_before_measured": "test_xla.py::test_an_operand_is_quantized_once_for_all_its_statistics",
    "lowered_for_cuda": "test_barriers.py::test_a_barrier_is_in_these_programs_alone",
    "once_computed": "test_compiled_updates.py::test_an_update_reads_gradient_and_moments_twice",
    "on_cpu": "test_xla.py::test_switches_between_platforms",
    "on_cuda": "test_xla.py::test_switches_between_platforms",
    "read_by_activation": "test_xla.py::test_what_casts_and_measures_an_activation_is_one_launch",
    "read_together": "test_xla.py::test_what_reads_a_product_of_tritons_is_fused",
    "transposed_in_bytes": "test_compiled_blocks.py::test_operands_of_wgrad_are_transposed_in_bytes",
    "transposed_once": "test_compiled_kernels_once.py::test_cublaslt_finds_what_it_reads",
}


def functions_of(module):
    """Its public functions; not what it imports."""
    of_module = lambda value: getattr(value, "__module__", "") == module.__name__ and not isinstance(value, type)
    return {name for name, value in vars(module).items() if of_module(value) and not name.startswith("_")}


def test_every_function_has_a_case():
    assert functions_of(xla) == {*CASES, *LAUNCHES, *SHOWN_BY}


# --- Platforms, and programs for CPUs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choose", "platform", "factor"),
    [
        (xla.on_cuda, "cuda", "1.700000e+01"),
        (xla.on_cuda, "cpu", "1.900000e+01"),
        (xla.on_cuda, "tpu", "1.900000e+01"),
        (xla.on_cpu, "cpu", "1.700000e+01"),
        (xla.on_cpu, "cuda", "1.900000e+01"),
    ],
)
def test_switches_between_platforms(choose, platform, factor):
    switched = jax.jit(lambda x: choose(lambda x: 17.0 * x, lambda x: 19.0 * x, x))
    lowered = switched.trace(numbers()).lower(lowering_platforms=(platform,))
    assert [number for number in ("1.700000e+01", "1.900000e+01") if number in lowered.as_text()] == [factor]


def test_an_operand_is_quantized_once_for_all_its_statistics():
    """By programs for CPUs, where each reduction fuses what it reads."""
    texts = [jax.jit(functools.partial(measured, told)).lower(struct(ROWS, IN)).compile() for told in (True, False)]
    told, not_told = (casts_to_fp8(program.as_text()) for program in texts)
    assert told == 1 < not_told
