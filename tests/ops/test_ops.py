"""The low-level functions: Flax's numbers bit for bit, the guide's examples, gradients that carry state."""

import ast
import importlib
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops as flax_ops
from helpers import assert_same_bits

from haliax_fp8 import ops


f32, bf16, f16 = jnp.float32, jnp.bfloat16, jnp.float16
e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
FP8_DTYPES = [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, 1e-37, 1e-30, 3e38, -3e38, np.inf, -np.inf, np.nan, 464.0, 465.0, 61440.0]

by_name = pytest.mark.parametrize
over_fp8_dtypes = by_name("q_dtype", FP8_DTYPES, ids=lambda d: jnp.dtype(d).name)
over_compute_dtypes = by_name("compute_dtype", [f32, bf16], ids=["f32", "bf16"])
# Outside `jit`, JAX has no arrays of an element type that it does not know.
jitted = by_name("transform", [jax.jit], ids=["jit"])
jitted_or_not = by_name("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
over_ways_to_run = by_name(
    "transform, state_shape",
    [(jax.jit, ()), (jax.jit, (1,)), (lambda f: f, (1,))],
    ids=["jit-scalar", "jit-one", "eager-one"],
)


def random_values(seed, shape, dtype=f32, binades=30):
    """Normal values over many magnitudes, with every special value among them."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * np.exp2(rng.uniform(-binades, binades, shape))
    values.reshape(-1)[: len(SPECIAL)] = SPECIAL[: values.size]
    with np.errstate(over="ignore"):
        return jnp.asarray(values.astype(np.float32)).astype(dtype)


def random_scale(seed, shape):
    return jnp.exp2(jnp.asarray(np.random.default_rng(seed).uniform(-20, 20, shape), f32))


# --- Bit equality of each function -----------------------------------------------------------------------------------


@over_fp8_dtypes
@by_name("out_dtype", [f32, bf16, f16], ids=["f32", "bf16", "f16"])
def test_get_fp8_max_is_flax(q_dtype, out_dtype):
    assert_same_bits(ops.get_fp8_max(q_dtype, out_dtype), flax_ops.get_fp8_max(q_dtype, out_dtype))


@by_name(
    "transform, q_dtype",
    [(jax.jit, e4m3), (jax.jit, jnp.float8_e5m2fnuz), *((lambda f: f, dtype) for dtype in FP8_DTYPES)],
)
@over_compute_dtypes
def test_quantize_and_qdq_are_flax(q_dtype, compute_dtype, transform):
    # Flax leaves two different dtypes to implicit promotion; ours works under strict promotion, the suite's setting.
    inputs = [(random_values(0, (40, 25), x_dtype), random_scale(1, (40, 1))) for x_dtype in (f32, bf16, f16)]
    inputs.append((random_values(2, ()), random_scale(3, ())))

    def both(library):
        functions = library.quantize, library.qdq
        return transform(lambda inputs: [f(x, q_dtype, s, compute_dtype) for f in functions for x, s in inputs])

    actual = both(ops)(inputs)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert_same_bits(actual, both(flax_ops)(inputs))


@jitted_or_not
@over_compute_dtypes
def test_dequantize_is_flax(compute_dtype, transform):
    inputs = [
        (random_values(seed, (40, 25)).clip(-200, 200).astype(x_dtype), random_scale(seed, scale_shape))
        for x_dtype, scale_shapes in [
            (f32, [(), (1,), (1, 25), (40, 25)]),
            *((d, [(40, 1)]) for d in [bf16, *FP8_DTYPES]),
        ]
        for seed, scale_shape in enumerate(scale_shapes)
    ]

    def dequantize_all(library):
        return transform(lambda inputs: [library.dequantize(x, compute_dtype, s) for x, s in inputs])(inputs)

    assert_same_bits(dequantize_all(ops), dequantize_all(flax_ops))


@jitted_or_not
@by_name("fp8_max", [448.0, 57344.0, 240.0])
def test_compute_scale_is_flax(transform, fp8_max):
    bits = np.random.default_rng(0).integers(0, 2**32, 20000, dtype=np.uint32)
    amax = jnp.concatenate([jnp.asarray(SPECIAL, f32), jnp.asarray(bits.view(np.float32))])
    args = amax, random_scale(1, amax.shape), jnp.asarray(fp8_max, f32)

    def with_margins(library):
        return transform(lambda *args: [library.compute_scale(*args, margin) for margin in (0, 1, 3, -2, 0.5)])(*args)

    assert_same_bits(with_margins(ops), with_margins(flax_ops))


def test_compute_scale_needs_both_reciprocals():
    """The formula that is mathematically the same is another function: the reason for this one's shape."""
    amax = jnp.asarray(np.random.default_rng(0).uniform(0.1, 10, 10000), f32)
    quotient = amax / jnp.asarray(448, f32)
    scale = ops.compute_scale(amax, 1.0, 448.0)
    assert 0.2 < np.mean(np.asarray(scale != quotient))
    np.testing.assert_allclose(scale, quotient, rtol=3 * jnp.finfo(f32).eps)


@jitted_or_not
@by_name("x_dtype", [f32, bf16], ids=["f32", "bf16"])
def test_compute_amax_history_is_flax(transform, x_dtype):
    finite = random_values(0, (64,), x_dtype)[len(SPECIAL) :]
    inputs = [(finite, random_scale(length, (length,))) for length in (1, 2, 5, 1024)]
    inputs += [(jnp.asarray([1.0, value], x_dtype), random_scale(0, (3,))) for value in SPECIAL]

    def record_all(library):
        return transform(lambda inputs: [library.compute_amax_history(x, h) for x, h in inputs])(inputs)

    assert_same_bits(record_all(ops), record_all(flax_ops))


def test_history_is_a_ring_with_the_newest_first():
    history, seen = jnp.zeros(4), []
    for amax in range(1, 6):
        history = ops.compute_amax_history(jnp.asarray([0.5, -amax], f32), history)
        seen.append(history.tolist())
    assert seen == [[1, 0, 0, 0], [2, 0, 0, 1], [3, 0, 1, 2], [4, 1, 2, 3], [5, 2, 3, 4]]


@over_ways_to_run
@over_fp8_dtypes
def test_update_fp8_meta_is_flax(transform, q_dtype, state_shape):
    ours, flaxs = (
        transform(lambda x, s, h, library=library: library.update_fp8_meta(x, q_dtype, s, h))
        for library in (ops, flax_ops)
    )
    for value in [2.5, *SPECIAL]:
        args = jnp.asarray([3.0, -4.0], f32), random_scale(0, state_shape), jnp.asarray([0.0, value, 0.0], f32)
        assert_same_bits(ours(*args), flaxs(*args))


# --- Gradients, and fifty steps of delayed scaling --------------------------------------------------------------------


def state_of(seed, state_shape, length=8):
    return random_scale(seed, state_shape), random_scale(seed + 1, (length,))


@pytest.mark.smoke
@over_ways_to_run
@over_compute_dtypes
@by_name("max_grad", [False, True], ids=["f32_state", "max_grad_state"])
@by_name("name", ["in_qdq", "out_qdq", "in_q"])
def test_outputs_and_gradients_are_flax(name, transform, compute_dtype, state_shape, max_grad):
    def pull_back(library):
        def function(x, scale, history):
            if max_grad:
                scale, history = scale.astype(library.fp32_max_grad), history.astype(library.fp32_max_grad)
            out = getattr(library, name)(compute_dtype, e5m2, x, scale, history)
            return out if name != "in_q" else (out[0].astype(f32), out[1])

        def out_and_gradients(x, cotangent, scale, history):
            out, vjp = jax.vjp(function, x, scale, history)
            if name == "in_q":
                cotangent = cotangent.astype(f32), scale.astype(out[1].dtype)
            gradients = vjp(cotangent)
            return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, f32), out), gradients

        return transform(out_and_gradients)

    ours, flaxs = pull_back(ops), pull_back(flax_ops)
    for seed in range(2):
        args = random_values(seed, (16, 8), compute_dtype), random_values(seed + 9, (16, 8), compute_dtype)
        args = *args, *state_of(seed, state_shape)
        if max_grad and transform is not jax.jit:
            with pytest.raises(TypeError, match="outside of jax.jit.*Put jax.jit"):
                ours(*args)
            continue
        assert_same_bits(ours(*args), flaxs(*args))


@over_ways_to_run
@over_compute_dtypes
def test_out_dq_and_its_gradients_are_flax(transform, compute_dtype, state_shape):
    def pull_back(library):
        def out_and_gradients(lhs_scale, rhs_scale, out, cotangent):
            primal, vjp = jax.vjp(lambda *args: library.out_dq(compute_dtype, *args), lhs_scale, rhs_scale, out)
            return primal, vjp(cotangent)

        return transform(out_and_gradients)

    ours, flaxs = pull_back(ops), pull_back(flax_ops)
    for seed in range(2):
        args = random_scale(seed, state_shape), random_scale(seed + 5, state_shape)
        args = *args, random_values(seed, (16, 8), compute_dtype), random_values(seed + 9, (16, 8), compute_dtype)
        assert_same_bits(ours(*args), flaxs(*args))


def test_out_dq_gives_the_gradient_in_the_dtype_of_its_input():
    scale = jnp.ones(1)
    gradient = jax.grad(lambda out: ops.out_dq(bf16, scale, scale, out).astype(f32).sum())(jnp.ones(3, f32))
    assert_same_bits(gradient, jnp.ones(3, f32))


@by_name("compute_dtype, state_shape", [(f32, ()), (bf16, (1,))], ids=["f32-scalar", "bf16-one"])
def test_fifty_steps_are_flax(compute_dtype, state_shape):
    """A product with state carried from step to step; a zero, an infinite and a NaN step, tiny and huge ones."""

    def step(library):
        def product(a, b, states):
            (a_scale, a_history), (b_scale, b_history), (g_scale, g_history) = states
            qa, new_a_scale = library.in_q(compute_dtype, e4m3, a, a_scale, a_history)
            qb, new_b_scale = library.in_q(compute_dtype, e4m3, b, b_scale, b_history)
            direct = library.out_dq(
                compute_dtype, new_a_scale, new_b_scale, jnp.dot(qa, qb, preferred_element_type=compute_dtype)
            )
            rounded = jnp.dot(
                library.in_qdq(compute_dtype, e4m3, a, a_scale, a_history),
                library.in_qdq(compute_dtype, e4m3, b, b_scale, b_history),
            )
            return direct, library.out_qdq(compute_dtype, e5m2, rounded, g_scale, g_history)

        @jax.jit
        def out_and_gradients(a, b, cotangents, states):
            # One library's in_q and in_qdq share the state, so that their cotangents add: halved, they stay amaxes.
            out, vjp = jax.vjp(product, a, b, states)
            a_bar, b_bar, new_states = vjp(cotangents)
            halved = [jax.tree.map(lambda s: s / 2, s) for s in new_states[:2]]
            return out, a_bar, b_bar, [*halved, new_states[2]]

        return out_and_gradients

    rng = np.random.default_rng(0)
    ours = flaxs = [(jnp.ones(state_shape), jnp.zeros(16)) for _ in range(3)]
    factors = np.exp2(rng.uniform(-40, 40, 50)).astype(np.float32)
    factors[[10, 20, 30]] = 0.0, np.inf, np.nan
    our_step, flax_step = step(ops), step(flax_ops)
    for factor in factors:
        a, b, g = (rng.normal(size=(8, 8)).astype(np.float32) * f for f in (factor, np.float32(1), factor))
        args = jnp.asarray(a).astype(compute_dtype), jnp.asarray(b).astype(compute_dtype)
        cotangents = (jnp.asarray(g).astype(compute_dtype),) * 2
        actual, expected = our_step(*args, cotangents, ours), flax_step(*args, cotangents, flaxs)
        assert_same_bits(actual, expected)
        ours, flaxs = actual[-1], expected[-1]
    # The run would prove little if the scales had stayed where they began.
    assert all(float(scale.reshape(())) != 1.0 for scale, _ in ours)


# --- The guide's examples ---------------------------------------------------------------------------------------------

fp8_ops = ops
E4M3_MAX = jnp.finfo(e4m3).max.astype(f32)


@pytest.fixture
def operands():
    k0, k1 = jax.random.split(jax.random.key(0), 2)
    return jax.random.uniform(k0, (16, 32)), jax.random.uniform(k1, (32, 64))


def assert_is_fp8_product(function, *args):
    """That the one product takes FP8 operands, and that its result is as near as their rounding allows."""
    lowered = jax.jit(function).lower(*args).as_text()
    products = [line for line in lowered.splitlines() if "dot_general" in line]
    assert len(products) == 1 and products[0].count("f8E4M3FN") == 2, products


def assert_near_product(actual, a, b):
    # Each factor is off by at most half a unit in the last place, 2**-4; all are positive, so the sums are no worse.
    reference = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    error = np.abs(np.asarray(actual, np.float64) - reference) / reference
    assert error.max() < 2 * 2**-4 + 2**-8 + 1e-3  # 1e-3: subnormals.
    assert error.max() > 0


def test_guide_current_scaling(operands):
    a, b = operands

    @jax.jit
    def dot_fp8(a, b):
        a_scale = jnp.max(jnp.abs(a)) / E4M3_MAX
        b_scale = jnp.max(jnp.abs(b)) / E4M3_MAX
        a = fp8_ops.quantize(a, e4m3, a_scale, f32)
        b = fp8_ops.quantize(b, e4m3, b_scale, f32)

        c = jnp.dot(a, b, preferred_element_type=f32)
        c = fp8_ops.dequantize(c, f32, a_scale * b_scale)
        return c

    assert_near_product(dot_fp8(a, b), a, b)
    assert_is_fp8_product(dot_fp8, a, b)


def test_guide_delayed_scaling(operands):
    a, b = operands
    a_scale = jnp.array(1.0)
    b_scale = jnp.array(1.0)
    a_amax_hist = jnp.zeros((1024,))
    b_amax_hist = jnp.zeros((1024,))

    @jax.jit
    def dot_fp8(a, a_scale, a_amax_hist, b, b_scale, b_amax_hist):
        a, a_scale = fp8_ops.in_q(f32, e4m3, a, a_scale, a_amax_hist)
        b, b_scale = fp8_ops.in_q(f32, e4m3, b, b_scale, b_amax_hist)

        c = jnp.dot(a, b, preferred_element_type=f32)
        c = fp8_ops.out_dq(f32, a_scale, b_scale, c)
        return c

    args = a, a_scale, a_amax_hist, b, b_scale, b_amax_hist
    assert_near_product(dot_fp8(*args), a, b)
    assert_is_fp8_product(dot_fp8, *args)


@jitted
@by_name("cast, printed", [(True, "1.0 [3. 0. 0. ... 0. 0. 0.]\n"), (False, "2.0 [5. 0. 0. ... 0. 0. 0.]\n")])
def test_guide_reuse(cast, printed, transform, capsys):
    a_scale = jnp.array(1.0)
    a_amax_hist = jnp.zeros((1024,))
    fmax32 = fp8_ops.fp32_max_grad

    def reuse_fp8_param(x, y, scale, amax_history):
        if cast:
            scale = scale.astype(fmax32)
            amax_history = amax_history.astype(fmax32)

        x = fp8_ops.in_qdq(f32, e4m3, x, scale, amax_history)
        y = fp8_ops.in_qdq(f32, e4m3, y, scale, amax_history)
        return x + y

    reuse_fp8_param_fn = jax.grad(reuse_fp8_param, (0, 1, 2, 3))
    reuse_fp8_param_fn = transform(reuse_fp8_param_fn)

    _, _, new_ah, new_sf = reuse_fp8_param_fn(2.0, 3.0, a_scale, a_amax_hist)
    print(new_ah, new_sf)
    assert capsys.readouterr().out == printed


def test_guide_deprecated_functions(operands):
    """`quantize_dequantize` and `in_qdq`, `out_qdq` give the numbers of the functions that replace them."""
    a, b = operands
    scale, history = jnp.array(1.0), jnp.zeros((1024,))
    qa, qb = (fp8_ops.quantize(x, e4m3, scale, f32) for x in operands)
    direct = fp8_ops.dequantize(jnp.dot(qa, qb, preferred_element_type=f32), f32, scale * scale)
    by_value = jnp.dot(*(fp8_ops.quantize_dequantize(x, e4m3, scale, f32) for x in operands))
    c = jnp.dot(fp8_ops.in_qdq(f32, e4m3, a, scale, history), fp8_ops.in_qdq(f32, e4m3, b, scale, history))
    c = fp8_ops.out_qdq(f32, e5m2, c, scale, history)
    np.testing.assert_allclose(by_value, direct, rtol=32 * jnp.finfo(f32).eps)
    assert_same_bits(c, by_value)
    assert fp8_ops.qdq is fp8_ops.quantize_dequantize
    for function in (fp8_ops.quantize_dequantize, fp8_ops.in_qdq, fp8_ops.out_qdq):
        assert "Deprecated" in function.__doc__


# --- Several uses of one state ----------------------------------------------------------------------------------------


@by_name("state_shape", [(), (1,)], ids=["scalar", "one"])
@by_name("carried", [False, True], ids=["constant", "carried"])
def test_scan_takes_the_maximum_over_its_steps(state_shape, carried):
    """Three uses in a scan, by three steps: each gradient is the state after recording the largest of its uses."""

    def loss(xs, scale, history):
        scale, history = scale.astype(ops.fp32_max_grad), history.astype(ops.fp32_max_grad)

        def body(carry, x):
            state = carry[1:] if carried else (scale, history)
            return (carry[0] + ops.in_qdq(f32, e4m3, x, *state), *carry[1:]), None

        carry = (jnp.zeros(()), scale, history) if carried else (jnp.zeros(()),)
        return jax.lax.scan(body, carry, xs)[0][0]

    gradients = jax.jit(jax.grad(loss, (1, 2)))
    scale, history = jnp.ones(state_shape), jnp.zeros(3)
    for amax in (2.0, 3.0, 4.0):
        expected = ops.update_fp8_meta(jnp.asarray([amax], f32), e4m3, scale, history)
        scale, history = gradients(jnp.asarray([0.5, -amax, 1.0], f32), scale, history)
        assert_same_bits((scale, history), expected)
    assert history.tolist() == [4.0, 2.0, 3.0]


@jitted
def test_product_with_max_grad_state(transform, operands):
    """`in_q` hands scales of that type on to `out_dq`; used twice, the amaxes are those of the larger operand."""
    a, b = operands

    def loss(scale, history):
        scale, history = scale.astype(ops.fp32_max_grad), history.astype(ops.fp32_max_grad)
        (qa, a_scale), (qb, b_scale) = (ops.in_q(f32, e4m3, x, scale, history) for x in (a, 3 * b))
        return ops.out_dq(f32, a_scale, b_scale, jnp.dot(qa, qb, preferred_element_type=f32)).sum()

    value, (scale, history) = transform(jax.value_and_grad(loss, (0, 1)))(jnp.ones(1), jnp.zeros(4))
    assert_same_bits((scale, history), (jnp.ones(1), jnp.zeros(4).at[0].set(3 * b.max())))
    np.testing.assert_allclose(value, 3 * (a @ b).sum(), rtol=2**-3)


# --- Shapes, limits, errors -------------------------------------------------------------------------------------------


@by_name("shape", [(2, 3), (3,), ()], ids=str)
@by_name("scale_shape", [(1,), ()], ids=str)
def test_a_scale_of_one_element_fits_every_shape(shape, scale_shape):
    x, scale, history = jnp.full(shape, 3.0), jnp.full(scale_shape, 0.5), jnp.asarray([224.0, 0.0], f32)
    assert_same_bits(ops.quantize(x, e4m3, scale, f32), jnp.full(shape, 6.0, e4m3))
    assert_same_bits(ops.qdq(x, e4m3, scale, f32), x)
    assert_same_bits(ops.in_q(f32, e4m3, x, scale, history), (jnp.full(shape, 6.0, e4m3), scale))
    assert_same_bits(ops.out_dq(f32, scale, scale, x), x / 4)


def test_scale_per_row():
    x = jnp.asarray([[1.0, 2.0], [100.0, 400.0]], f32)
    scale = ops.compute_scale(jnp.max(x, axis=1, keepdims=True), jnp.ones((2, 1)), 448.0)
    data = ops.quantize(x, e4m3, scale, f32)
    assert data.astype(f32).max(axis=1).tolist() == [448.0, 448.0]
    np.testing.assert_allclose(ops.dequantize(data, f32, scale), x, rtol=2**-4)


def test_an_empty_array_has_amax_zero():
    data, scale = ops.in_q(f32, e4m3, jnp.zeros((0, 4)), jnp.ones(1), jnp.zeros(3))
    assert (data.shape, scale.tolist()) == ((0, 4), [1.0])
    assert ops.compute_amax_history(jnp.zeros((0, 4)), jnp.ones(3)).tolist() == [0.0, 1.0, 1.0]


def test_numpy_arrays_and_python_scalars():
    x, history = np.asarray([3.0, 500.0], np.float32), np.zeros(4, np.float32)
    assert ops.quantize(x, e4m3, 2.0, f32).astype(f32).tolist() == [1.5, 256.0]
    assert ops.in_qdq(f32, e4m3, 3.0, 1.0, history) == 3.0
    assert ops.update_fp8_meta(x, "float8_e4m3fn", np.float32(2.0), history)[0].tolist() == 2.0


X, SCALE, HISTORY = jnp.ones(3), jnp.ones(1), jnp.zeros(4)


@by_name(
    "name, args, message",
    [
        ("get_fp8_max", (f32, f32), r"fp8_dtype=float32 is not an FP8 dtype; use one of float8_e4m3fn, float8_e5m2, "),
        ("get_fp8_max", ("float9", f32), r"fp8_dtype='float9' is not a dtype; use"),
        ("get_fp8_max", (e4m3, e4m3), r"out_dtype=float8_e4m3fn is not .* 16 bits or more; use float32"),
        ("quantize", (X, bf16, SCALE, f32), r"q_dtype=bfloat16 is not an FP8 dtype"),
        ("quantize", (X, jnp.float8_e8m0fnu, SCALE, f32), r"q_dtype=float8_e8m0fnu is not an FP8 dtype"),
        ("quantize", (X, e4m3, SCALE, jnp.int32), r"compute_dtype=int32 is not .* 16 bits or more; use float32"),
        ("quantize", (X, e4m3, SCALE, e4m3), r"compute_dtype=float8_e4m3fn is not .* 16 bits"),
        (
            "quantize",
            (jnp.arange(3), e4m3, SCALE, f32),
            r"x\.dtype=int32 is not floating-point; cast it with x\.astype",
        ),
        ("quantize", (X.astype(e4m3), e4m3, SCALE, f32), r"x\.dtype=float8_e4m3fn is not .* 16 bits"),
        ("quantize", (X, e4m3, jnp.ones(2), f32), r"scale\.shape=\(2,\) does not broadcast to x\.shape=\(3,\); use"),
        ("quantize", (X, e4m3, jnp.ones(1, int), f32), r"scale\.dtype=int32 is not floating-point"),
        ("dequantize", (X, None, SCALE), r"dq_dtype=None is not a dtype"),
        ("dequantize", (X, e5m2, SCALE), r"dq_dtype=float8_e5m2 is not .* 16 bits"),
        ("dequantize", (X, f32, jnp.ones((3, 3))), r"scale\.shape=\(3, 3\) does not broadcast"),
        ("compute_scale", (jnp.arange(3), SCALE, 448.0), r"amax\.dtype=int32 is not floating-point"),
        ("compute_scale", (X, SCALE.astype(bf16), 448.0), r"scale\.dtype=bfloat16, .* float32 or fp32_max_grad; leave"),
        ("compute_amax_history", (X, HISTORY.astype(bf16)), r"amax_history\.dtype=bfloat16, .* float32"),
        ("compute_amax_history", (X, jnp.zeros(())), r"amax_history\.shape=\(\), .* length of 1 or more; start"),
        ("compute_amax_history", (X, jnp.zeros(0)), r"amax_history\.shape=\(0,\), .* length of 1 or more"),
        ("compute_amax_history", (X, jnp.zeros((2, 4))), r"amax_history\.shape=\(2, 4\), .* jax\.vmap for stacked"),
        ("compute_amax_history", (jnp.arange(3), HISTORY), r"x\.dtype=int32 is not floating-point"),
        ("update_fp8_meta", (X, f16, SCALE, HISTORY), r"fp8_dtype=float16 is not an FP8 dtype"),
        ("in_q", (f32, f32, X, SCALE, HISTORY), r"fp8_dtype=float32 is not an FP8 dtype"),
        ("in_q", (f32, e4m3, jnp.arange(3), SCALE, HISTORY), r"inp\.dtype=int32 is not floating-point"),
        ("in_q", (f32, e4m3, X, SCALE.astype(f16), HISTORY), r"scale\.dtype=float16, .* float32"),
        ("in_qdq", (e4m3, e4m3, X, SCALE, HISTORY), r"compute_dtype=float8_e4m3fn is not .* 16 bits"),
        ("out_dq", (e4m3, SCALE, SCALE, X), r"dq_type=float8_e4m3fn is not .* 16 bits"),
        ("out_dq", (f32, SCALE, SCALE, X.astype(e4m3)), r"out\.dtype=float8_e4m3fn is not .* 16 bits"),
        ("out_dq", (f32, SCALE, SCALE.astype(bf16), X), r"rhs_scale\.dtype=bfloat16, .* float32"),
        ("out_qdq", (f32, f32, X, SCALE, HISTORY), r"q_dtype=float32 is not an FP8 dtype"),
        ("out_qdq", (jnp.int8, e5m2, X, SCALE, HISTORY), r"compute_dtype=int8 is not .* 16 bits"),
        ("out_qdq", (f32, e5m2, X.astype(e5m2), SCALE, HISTORY), r"out\.dtype=float8_e5m2 is not .* 16 bits"),
    ],
)
def test_errors_name_argument_value_and_remedy(name, args, message):
    # The suite checks annotations, users need not: without that check the functions refuse for themselves.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(getattr(ops, name))(*args)


def test_names_and_argument_order_are_flax():
    # The check is the guide's own; Flax has no function of that name.
    for name in set(ops.__all__) - {"fp32_max_grad", "quantize_dequantize", "check_fp8_call"}:
        assert list(inspect.signature(getattr(ops, name)).parameters) == list(
            inspect.signature(getattr(flax_ops, name)).parameters
        ), name


def files_of_ops():
    return [importlib.import_module(f"{ops.__name__}.{info.name}") for info in pkgutil.iter_modules(ops.__path__)]


def test_numerics_can_be_read_without_haliax():
    trees = [ast.parse(inspect.getsource(module)) for module in (ops, *files_of_ops())]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    # `..folder.module` is haliax_fp8's, `.module` one of these files.
    ours = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 2}
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert ours == {"_numerics.casts", "formats", "_jax.max_grad", "_jax.xla"}
    assert not {name for name in imported if "haliax" in name}
