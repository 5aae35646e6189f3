"""State and gradients under random compositions of JAX's transformations, exactly.

Every program below computes the same thing in another way: the same layer used `uses` times in a row. All numbers are
small integers and all scales powers of two, so that float32 arithmetic is exact in any order; a float64 NumPy model of
the products and the state has to be met to the last bit.
"""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import sqnr, state_is_constant
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P
from transformations import LOOPS, WRAPPERS, bounded_loop, python_loop, with_custom_jvp, with_custom_vjp

import haliax_fp8 as fp8
from haliax_fp8._state.table import guarded
from haliax_fp8.recipes import StaticScaling


WIDTH, LENGTH = 8, 4
SHAPE = (2, 4, WIDTH)


# --- The model in float64 ---------------------------------------------------------------------------------------------


def quantized(x, scale, dtype):
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x / scale, -limit, limit).astype(np.float32).astype(dtype).astype(np.float64)


def numpy_model(scale, history, w, x, c, uses):
    """`loss = sum(c * h)` with `h = relu(h @ w)` applied `uses` times: loss, dw, dx, and the state of the next step."""
    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    h, saved, amaxes = x, [], np.zeros(3)
    qw = quantized(w, scale[1], e4m3)
    for _ in range(uses):
        qh = quantized(h, scale[0], e4m3)
        out = (qh @ qw) * (scale[0] * scale[1])
        amaxes = np.maximum(amaxes, [np.abs(h).max(), np.abs(w).max(), 0.0])
        saved.append((qh, out > 0))
        h = np.maximum(out, 0.0)
    loss, g, dw = (c * h).sum(), c, np.zeros_like(w)
    for qh, positive in reversed(saved):
        g = np.where(positive, g, 0.0)
        amaxes[2] = max(amaxes[2], np.abs(g).max())
        qg = quantized(g, scale[2], e5m2)
        dw = dw + (qh.reshape(-1, WIDTH).T @ qg.reshape(-1, WIDTH)) * (scale[0] * scale[2])
        g = (qg @ qw.T) * (scale[2] * scale[1])
    history = np.concatenate([amaxes[:, None], history[:, 2:], history[:, :1]], axis=1)
    top = history.max(axis=1)
    new_scale = np.where(top > 0, top / np.array([448.0, 448.0, 57344.0]), scale)
    return loss, dw, g, new_scale, history


# --- The same in JAX, in many ways ------------------------------------------------------------------------------------


def layer(op, w, h, flag):
    return jax.nn.relu(op(h, w, (((h.ndim - 1,), (0,)), ((), ()))))


def gradients_plain(loss, params, x, c):
    return fp8.filter_grad(lambda params, x: loss(params, x, c))(params, x)


def gradients_jit(loss, params, x, c):
    return eqx.filter_jit(gradients_plain)(loss, params, x, c)


def gradients_value_and_grad(loss, params, x, c):
    return eqx.filter_jit(fp8.filter_value_and_grad(loss))(params, x, c)[1]


def gradients_accumulated(loss, params, x, c):
    total = None
    for part in range(x.shape[0]):
        total = fp8.accumulate_gradients(total, gradients_plain(loss, params, x[part][None], c[part][None]))
    return total


def gradients_accumulated_in_scan(loss, params, x, c):
    def step(total, part):
        return fp8.accumulate_gradients(total, gradients_plain(loss, params, part[0][None], part[1][None])), None

    first = gradients_plain(loss, params, x[0][None], c[0][None])
    return lax.scan(step, first, (x[1:], c[1:]))[0]


def gradients_per_example(loss, params, x, c):
    """`vmap(grad)`: parameters' gradients are summed over examples, state's are maximised, by hand."""
    each = eqx.filter_vmap(lambda x, c: gradients_plain(loss, params, x[None], c[None]))(x, c)
    overwrites, rest = fp8.partition_for_grad_overwrite(each)
    merge = lambda reduce, tree: jax.tree.map(lambda a: reduce(a, axis=0), tree)
    overwrites, rest = merge(jnp.max, overwrites), merge(jnp.sum, rest)
    is_state = lambda node: node is None or isinstance(node, fp8.OverwriteWithGradient)
    return jax.tree.map(lambda a, b: b if a is None else a, overwrites, rest, is_leaf=is_state)


def over_two_devices(function, out_specs):
    """Under `shard_map`: parameters on both devices, half of the rows on each."""
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return jax.shard_map(function, mesh=mesh, in_specs=(P(), P("devices"), P("devices")), out_specs=out_specs)


def gradients_in_shard_map(loss, params, x, c):
    inside = lambda params, x, c: fp8.filter_grad(lambda params: loss(params, x, c))(params)
    return eqx.filter_jit(over_two_devices(inside, P()))(params, x, c)


def gradients_around_shard_map(loss, params, x, c):
    total = over_two_devices(lambda params, x, c: lax.psum(loss(params, x, c), "devices"), P())
    return eqx.filter_jit(fp8.filter_grad(total))(params, x, c)


GRADIENTS = {
    "grad": gradients_plain,
    "jit(grad)": gradients_jit,
    "value_and_grad": gradients_value_and_grad,
    "accumulated": gradients_accumulated,
    "accumulated in a scan": gradients_accumulated_in_scan,
    "vmap(grad)": gradients_per_example,
    "grad in shard_map": gradients_in_shard_map,
    "grad of shard_map": gradients_around_shard_map,
}
OF_PARTS = {name for name in GRADIENTS if name not in ("grad", "jit(grad)", "value_and_grad")}


def integers(rng, shape, limit):
    return rng.integers(-limit, limit + 1, shape).astype(np.float64)


def make_op(scale, history):
    op = fp8.Fp8DotGeneral.init(fp8.DelayedScaling(amax_history_length=LENGTH))
    table = jnp.concatenate([jnp.asarray(scale)[:, None], jnp.asarray(history)], axis=1).astype(jnp.float32)
    return eqx.tree_at(lambda op: op.state.table.array, op, guarded(table))


def history_of(state):
    """What lies between the scale and its guard."""
    return state.array[..., 1:-1]


def random_problem(seed, shape=SHAPE):
    rng = np.random.default_rng(seed)
    scale = 2.0 ** rng.integers(-2, 3, 3)
    return {
        "scale": scale,
        "history": np.abs(integers(rng, (3, LENGTH), 9)),
        "w": integers(rng, (WIDTH, WIDTH), 3),
        "x": integers(rng, shape, 3),
        "c": integers(rng, shape, 3),
    }


def as_jax(*arrays):
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def check(gradients, problem, uses):
    op, w, x = gradients
    _, dw, dx, scale, history = numpy_model(**problem, uses=uses)
    np.testing.assert_array_equal(w, dw)
    np.testing.assert_array_equal(x, dx)
    np.testing.assert_array_equal(history_of(op.state), history)
    # One rounding in float32 of each division.
    np.testing.assert_allclose(op.state.scale, scale, rtol=3 * 2.0**-24)


compositions = given(
    seed=st.integers(0, 1000),
    uses=st.integers(1, 3),
    wrappers=st.lists(st.sampled_from(sorted(WRAPPERS)), min_size=1, max_size=3),
    loop=st.sampled_from(sorted(LOOPS)),
    gradient=st.sampled_from(sorted(GRADIENTS)),
)


@pytest.mark.more
@settings(max_examples=20, deadline=None, derandomize=True)
@compositions
def test_any_composition_gives_the_gradients_and_the_state_of_the_plain_call_or_is_refused(
    seed, uses, wrappers, loop, gradient
):
    check_composition(seed, uses, wrappers, loop, gradient)


@pytest.mark.more
@settings(max_examples=60, deadline=None, derandomize=True)
@compositions
def test_more_compositions(seed, uses, wrappers, loop, gradient):
    """Others: without a source of chance, Hypothesis draws by a test's name."""
    check_composition(seed, uses, wrappers, loop, gradient)


@pytest.mark.parametrize("inside", ["custom_jvp of each row", "custom_vjp of each row"])
def test_derivatives_of_each_row_inside_equinoxs(inside):
    """Equinox gives state no tangent; the function inside makes zeros of that, or a gradient that nobody collects."""
    check_composition(0, 1, [inside, "filter_custom_jvp"], "python", "jit(grad)")


def test_a_use_without_a_tangent_of_state_is_refused_beside_another():
    """The other use reaches the layer, so nothing is missing at the end."""
    problem = random_problem(0)
    w, x, c = as_jax(problem["w"], problem["x"], problem["c"])
    f = nested(["custom_jvp of each row", "filter_custom_jvp"])

    def loss(params):
        op, w = params
        return (c * (f(op, w, 2.0 * x, jnp.asarray(True)) + layer(op, w, x, True))).sum()

    params = make_op(problem["scale"], problem["history"]), w
    with pytest.raises(ValueError, match="takes state for a constant.*eqx.filter_grad"):
        eqx.filter_jit(fp8.filter_grad(loss))(params)
    op, _ = eqx.filter_jit(eqx.filter_grad(loss))(params)
    largest = np.abs(problem["x"]).max()
    assert 2.0 * largest <= float(op.amax_history("input")[0]) <= 3.0 * largest


@pytest.mark.more
@pytest.mark.parametrize("gradient", [fp8.filter_grad, lambda loss: eqx.filter_jit(fp8.filter_grad(loss))])
def test_a_function_is_differentiated_once_even_if_a_layer_is_not_used(gradient):
    """It is traced once more, to see whether it depends on that layer."""
    calls, derivatives = [], []

    @jax.custom_vjp
    def observed(x):
        return x

    observed.defvjp(lambda x: (derivatives.append(1) or x, None), lambda _, g: (g,))

    def loss(ops, x):
        calls.append(1)
        return observed(sum((op(x, x, (((1,), (0,)), ((), ()))) ** 2).sum() for op in ops))

    op, x = make_op(np.ones(3), np.zeros((3, LENGTH))), jnp.ones((WIDTH, WIDTH))
    gradient(loss)((op,), x)
    assert (len(calls), len(derivatives)) == (1, 1)
    gradients = gradient(lambda ops, x: loss(ops[:1], x))((op, op), x)
    assert (len(calls), len(derivatives)) == (3, 2)
    assert float(gradients[0].amax_history("input")[0]) == 1.0
    np.testing.assert_array_equal(op.state.overwritten_by(gradients[1].state).array, op.state.array)


@pytest.mark.parametrize(
    ("gradient", "wrappers"),
    [
        (fp8.filter_grad, ["custom_vjp", "cond of each row", "checkpoint", "vmap"]),
        (fp8.filter_grad, ["custom_jvp", "vmap of axis 1", "filter_custom_jvp", "cond of each row"]),
        (eqx.filter_grad, ["bounded loop", "custom_vjp of each row", "vmap", "checkpoint"]),
    ],
    ids=["custom_vjp", "custom_jvp", "bounded loop, Equinox's gradient"],
)
def test_nested_transformations(gradient, wrappers):
    """The innermost comes first."""
    problem = random_problem(2)
    assert problem["c"].any(axis=-1).all()  # a row whose output gradient is zero is not recorded
    w, x, c = as_jax(problem["w"], problem["x"], problem["c"])
    f = nested(wrappers)
    loss = lambda params: (c * f(*params, jnp.asarray(True))).sum()
    op = make_op(problem["scale"], problem["history"])
    if gradient is fp8.filter_grad:
        with pytest.raises(ValueError, match="eqx.filter_grad"):
            eqx.filter_jit(gradient(loss))((op, w, x))
        gradient = eqx.filter_grad
    new_op, new_w, new_x = eqx.filter_jit(gradient(loss))((op, w, x))
    _, dw, dx, _, history = numpy_model(**problem, uses=1)
    np.testing.assert_array_equal(new_w, dw)
    np.testing.assert_array_equal(new_x, dx)
    # A plain gradient may add what examples measured, and leaves the rest of a history as it is.
    updated = op.state.overwritten_by(new_op.state)
    np.testing.assert_array_equal(history_of(updated)[:, 1:], history[:, 1:])
    assert (history_of(updated)[:, 0] >= history[:, 0]).all()


def nested(wrappers):
    f, others = layer, {"custom_jvp": with_custom_jvp, "custom_vjp": with_custom_vjp, "bounded loop": bounded_loop}
    for name in wrappers:
        f = (WRAPPERS | others)[name](f)
    return f


@pytest.mark.parametrize("with_derivative", [with_custom_jvp, with_custom_vjp])
def test_mapped_derivatives_have_the_axes_of_the_result(with_derivative):
    """The kernel first, and as many rows as columns: axes that are exchanged fit as well."""
    problem = random_problem(9, (WIDTH, WIDTH))
    w, x, c = as_jax(problem["w"], problem["x"], problem["c"])

    def product(op, w, row, flag):
        return jax.nn.relu(op(w, row, (((0,), (0,)), ((), ()))))

    op = make_op(problem["scale"], problem["history"])
    op = dataclasses.replace(op, kernel_shape=(WIDTH,))

    def loss(params):
        # Inside `jit`, JAX maps before it differentiates.
        return (c * eqx.filter_jit(mapped)(with_derivative(product), *params)).sum()

    # A mapped `custom_vjp` is refused by ours, and exact in a plain gradient.
    gradient = eqx.filter_grad if with_derivative is with_custom_vjp else fp8.filter_grad
    check(eqx.filter_jit(gradient(loss))((op, w, x)), problem, uses=1)


# What copies a layer's state for each example, or takes it for a constant. Alone some of these are exact.
MAY_BE_REFUSED = {
    "cond of each row",
    "switch of each row",
    "custom_jvp of each row",
    "custom_vjp of each row",
    "filter_custom_jvp",
    "filter_custom_vjp of each row",
}


def check_composition(seed, uses, wrappers, loop, gradient):
    """Exact, or refused by an error that names the construct."""
    try:
        check_exactness(seed, uses, wrappers, loop, gradient)
    except ValueError as error:
        assert MAY_BE_REFUSED & set(wrappers)
        assert "eqx.filter_grad" in str(error)


def check_exactness(seed, uses, wrappers, loop, gradient):
    problem = random_problem(seed)
    f = nested(wrappers)
    flag = jnp.asarray(True)
    w, x, c = as_jax(problem["w"], problem["x"], problem["c"])

    def loss(params, x_unused, c):
        op, w, x = params
        return (c * LOOPS[loop](f, op, w, x, flag, uses)).sum()

    def loss_of_parts(params, part, c):
        op, w = params
        return (c * LOOPS[loop](f, op, w, part, flag, uses)).sum()

    op = make_op(problem["scale"], problem["history"])
    _, dw, dx, scale, history = numpy_model(**problem, uses=uses)
    if gradient in OF_PARTS:
        new_op, new_w = GRADIENTS[gradient](loss_of_parts, (op, w), x, c)
        new_x = jnp.asarray(dx)
    else:
        new_op, new_w, new_x = GRADIENTS[gradient](loss, (op, w, x), x, c)
    np.testing.assert_array_equal(new_w, dw)
    np.testing.assert_array_equal(new_x, dx)
    np.testing.assert_array_equal(history_of(new_op.state), history)
    np.testing.assert_allclose(new_op.state.scale, scale, rtol=3 * 2.0**-24)


@pytest.mark.smoke
@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_each_transformation_alone_is_exact_or_refused(wrapper):
    problem = random_problem(7)
    f = WRAPPERS[wrapper](layer)
    w, x, c = as_jax(problem["w"], problem["x"], problem["c"])

    def loss(params):
        op, w, x = params
        return (c * python_loop(f, op, w, x, jnp.asarray(True), 2)).sum()

    op = make_op(problem["scale"], problem["history"])
    if wrapper in MAY_BE_REFUSED - {"custom_jvp of each row"}:
        with pytest.raises(ValueError, match="eqx.filter_grad"):
            eqx.filter_jit(fp8.filter_grad(loss))((op, w, x))
        return
    check(eqx.filter_jit(fp8.filter_grad(loss))((op, w, x)), problem, uses=2)


@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_a_plain_gradient_corrupts_nothing(wrapper):
    """At worst the newest amax is the sum over the uses; the scale and the rest of the history stay right."""
    problem, uses = random_problem(8), 3
    f = WRAPPERS[wrapper](layer)
    w, x, c = as_jax(problem["w"], problem["x"], problem["c"])

    def loss(params):
        op, w, x = params
        return (c * python_loop(f, op, w, x, jnp.asarray(True), uses)).sum()

    op = make_op(problem["scale"], problem["history"])
    gradient = eqx.filter_jit(eqx.filter_grad(loss))((op, w, x))[0]
    new = op.state.overwritten_by(gradient.state)
    history = numpy_model(**problem, uses=uses)[4]
    newest = np.asarray(new.array)[:, 1]
    np.testing.assert_array_equal(history_of(new)[:, 1:], history[:, 1:])
    assert (newest >= history[:, 0]).all()
    rows = x.shape[0] * x.shape[1]  # each row may be a use of its own
    assert (newest <= uses * rows * history[:, 0]).all()


@pytest.mark.smoke
def test_ensemble_members_keep_states_of_their_own():
    problems = [random_problem(seed) for seed in (1, 2, 3)]
    stack = lambda name: jnp.stack(as_jax(*(p[name] for p in problems)))
    ops = eqx.filter_vmap(make_op)(stack("scale"), stack("history"))

    @eqx.filter_vmap
    def gradients(op, w, x, c):
        member = lambda params: (c * jax.vmap(jax.vmap(lambda r: layer(*params[:2], r, None)))(params[2])).sum()
        return fp8.filter_grad(member)((op, w, x))

    def outside(params, c):
        each = eqx.filter_vmap(lambda op, w, x, c: (c * jax.vmap(lambda r: layer(op, w, r, None))(x)).sum())
        return each(*params, c).sum()

    inside = eqx.filter_jit(gradients)(ops, stack("w"), stack("x"), stack("c"))
    around = eqx.filter_jit(fp8.filter_grad(outside))((ops, stack("w"), stack("x")), stack("c"))
    for result in (inside, around):
        for i, problem in enumerate(problems):
            check(jax.tree.map(lambda a, i=i: a[i], result), problem, uses=1)


@pytest.mark.smoke
def test_scanned_layers_keep_states_of_their_own():
    """Ops as the scanned-over argument: each layer's state is that of a layer alone, whatever the others do."""
    problems = [random_problem(seed) for seed in (4, 5)]
    scales, histories, ws = (np.stack([p[name] for p in problems]) for name in ("scale", "history", "w"))
    ops = eqx.filter_vmap(make_op)(jnp.asarray(scales, jnp.float32), jnp.asarray(histories, jnp.float32))
    x, c = as_jax(problems[0]["x"], problems[0]["c"])

    def scanned(params):
        arrays, static = eqx.partition(params[0], eqx.is_array)
        body = lambda h, layer_arrays: (layer(eqx.combine(layer_arrays[0], static), layer_arrays[1], h, None), None)
        return (c * lax.scan(body, x, (arrays, params[1]))[0]).sum()

    def unrolled(params):
        h = x
        for i in range(2):
            op, w = jax.tree.map(lambda a, i=i: lax.dynamic_index_in_dim(a, i, keepdims=False), params)
            h = layer(op, w, h, None)
        return (c * h).sum()

    params = (ops, jnp.asarray(ws, jnp.float32))
    results = [eqx.filter_jit(fp8.filter_grad(f))(params) for f in (scanned, unrolled)]
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.more
def test_slicing_a_stack_in_the_differentiated_function_is_explained():
    op = jax.tree.map(lambda a: jnp.stack([a, a]), make_op(np.ones(3), np.zeros((3, LENGTH))))
    loss = lambda op: layer(jax.tree.map(lambda a: a[0], op), jnp.ones((8, 8)), jnp.ones((2, 8)), None).sum()
    with pytest.raises(ValueError, match="dynamic_index_in_dim"):
        fp8.filter_grad(loss)(op)
    assert float(eqx.filter_grad(loss)(op).amax_history("input")[0, 0]) == 1.0


@pytest.mark.more
@pytest.mark.parametrize("remat", [True, "offload", "nested", "recompute", "full"])
def test_haliax_stacked_with_every_checkpointing_mode(remat):
    from haliax.nn import Linear, Stacked

    Block, E, B = hax.Axis("block", 4), hax.Axis("e", WIDTH), hax.Axis("batch", 6)

    class Layer(eqx.Module):
        linear: Linear

        @staticmethod
        def init(*, key):
            return Layer(Linear.init(E, E.alias("e2"), key=key, use_bias=False))

        def __call__(self, h):
            return hax.nn.relu(self.linear(h)).rename({"e2": "e"})

    make = lambda mode: Stacked.init(Block, Layer, gradient_checkpointing=mode)(
        key=jax.random.split(jax.random.key(0), Block.size)
    )
    x = hax.random.normal(jax.random.key(1), (B, E))
    config = fp8.Fp8Config(amax_history_length=LENGTH)

    def gradients(model):
        loss = lambda model: (model.fold(x) ** 2).sum().scalar()
        return eqx.filter_jit(fp8.filter_grad(loss))(fp8.fp8_linear_layers(model, config))

    reference = gradients(make(False)).stacked.linear
    got = gradients(make(remat)).stacked.linear
    for a, b in zip(jax.tree.leaves(reference), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.more
def test_forward_mode_takes_rounding_as_the_identity():
    """`jvp` and `linearize`: `dout = dot(dx, q(w)) + dot(q(x), dw)`, exact on integers."""
    problem = random_problem(3, (4, WIDTH))
    op, (w, x, dx) = make_op(problem["scale"], problem["history"]), as_jax(problem["w"], problem["x"], problem["c"])
    dw = jnp.flip(w)
    call = lambda x, w: op(x, w, (((1,), (0,)), ((), ())))
    scale = problem["scale"]
    qx = quantized(problem["x"], scale[0], ml_dtypes.float8_e4m3fn) * scale[0]
    qw = quantized(problem["w"], scale[1], ml_dtypes.float8_e4m3fn) * scale[1]
    expected = np.asarray(dx) @ qw + qx @ np.asarray(dw)
    out, tangent = jax.jvp(call, (x, w), (dx, dw))
    np.testing.assert_array_equal(out, qx @ qw)
    np.testing.assert_array_equal(tangent, expected)
    np.testing.assert_array_equal(jax.linearize(call, x, w)[1](dx, dw), expected)
    rows = jax.jacfwd(lambda t: call(x + t * dx, w + t * dw))(jnp.float32(0.0))
    np.testing.assert_array_equal(rows, expected)
    vmapped = jax.vmap(lambda dx: jax.jvp(lambda x: call(x, w), (x,), (dx,))[1])(jnp.stack([dx, 2 * dx]))
    np.testing.assert_array_equal(vmapped[1], 2 * (np.asarray(dx) @ qw))


@pytest.mark.smoke
@pytest.mark.parametrize("order", ["jvp of grad", "grad of grad", "grad of vmapped grad", "hessian"])
def test_second_derivatives_are_refused_with_the_remedy(order):
    op, (w, x) = make_op(np.ones(3), np.zeros((3, LENGTH))), as_jax(*(random_problem(3, (4, WIDTH))[k] for k in "wx"))
    loss = lambda w: (layer(op, w, x, None) ** 2).sum()
    takes = {
        "jvp of grad": lambda: jax.jvp(jax.grad(loss), (w,), (w,)),
        "grad of grad": lambda: jax.grad(lambda w: jax.grad(loss)(w).sum())(w),
        "grad of vmapped grad": lambda: jax.grad(lambda w: jax.vmap(jax.grad(loss))(w).sum())(jnp.stack([w, w])),
        "hessian": lambda: jax.jit(jax.hessian(loss))(w),
    }
    with pytest.raises(ValueError, match="restore_linear_layers"):
        takes[order]()


@pytest.mark.parametrize("take", ["outside", "inside"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_takes_the_maximum_over_devices(take, check_vma):
    problem = random_problem(5, (8, WIDTH))
    op, (w, x, c) = make_op(problem["scale"], problem["history"]), as_jax(*(problem[k] for k in "wxc"))
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    specs = dict(mesh=mesh, in_specs=(P(), P("devices"), P("devices")), check_vma=check_vma)
    local_loss = lambda params, x, c: (c * layer(*params, x, None)).sum()

    def inside(params, x, c):
        op, w = fp8.filter_grad(local_loss)(params, x, c)
        return op, w if check_vma else lax.psum(w, "devices")

    def outside(params, x, c):
        total = lambda params, x, c: lax.psum(local_loss(params, x, c), "devices")
        return jax.shard_map(total, out_specs=P(), **specs)(params, x, c)

    if take == "inside":
        function = jax.shard_map(inside, out_specs=P(), **specs)
    else:
        function = fp8.filter_grad(outside)
    if take == "outside" and not check_vma:
        # JAX would sum what replicated arguments receive, on every device the same maximum.
        for gradient in (function, eqx.filter_grad(outside)):
            with pytest.raises(ValueError, match="haliax_fp8.filter_grad.*inside shard_map, or use check_vma=True"):
                eqx.filter_jit(gradient)((op, w), x, c)
        return
    new_op, new_w = eqx.filter_jit(function)((op, w), x, c)
    _, dw, _, scale, history = numpy_model(**problem, uses=1)
    np.testing.assert_array_equal(new_w, dw)
    np.testing.assert_array_equal(history_of(new_op.state), history)
    np.testing.assert_allclose(new_op.state.scale, scale, rtol=3 * 2.0**-24)


@pytest.mark.parametrize("axis", ["contracted", "batch", "kernel"])
def test_sharded_jit_is_the_unsharded_program(axis):
    from jax.sharding import NamedSharding

    problem = random_problem(6, (8, WIDTH))
    op, (w, x, c) = make_op(problem["scale"], problem["history"]), as_jax(*(problem[k] for k in "wxc"))
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    x_spec, w_spec = {
        "batch": (P("devices"), P()),
        "contracted": (P(None, "devices"), P("devices")),
        "kernel": (P(), P(None, "devices")),
    }[axis]
    x, w = jax.device_put(x, NamedSharding(mesh, x_spec)), jax.device_put(w, NamedSharding(mesh, w_spec))
    loss = lambda params: (c * layer(*params, None)).sum()
    check(eqx.filter_jit(fp8.filter_grad(loss))((op, w, x)), problem, uses=1)


# --- Where JAX differentiates first and batches afterwards ------------------------------------------------------------


def mapped(f, op, w, h, in_axes=0):
    return jax.vmap(lambda row: f(op, w, row, jnp.asarray(True)), in_axes=in_axes, out_axes=in_axes)(h)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("gradient", [fp8.filter_grad, eqx.filter_grad], ids=["ours", "equinox's"])
def test_custom_jvp_under_vmap_is_the_batched_call(gradient, axis):
    problem = random_problem(11)
    w, x, c = as_jax(problem["w"], problem["x"], problem["c"])
    loss = lambda params: (c * mapped(with_custom_jvp(layer), *params, in_axes=axis)).sum()
    op = make_op(problem["scale"], problem["history"])
    check(eqx.filter_jit(gradient(loss))((op, w, x)), problem, uses=1)


@state_is_constant
@pytest.mark.more
@pytest.mark.parametrize("both", [False, True], ids=["rows", "rows and kernels"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "deepseek", "mxfp8", "nvfp4", "static"])
def test_every_recipe_differentiated_first(recipe, both):
    """Each example has scales of its own in the forward pass, and its gradients are those of a loop over examples,
    up to the rounding of output gradients, which all examples share."""
    w, x, c = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(64, 32), (3, 48, 64), (3, 48, 32)]))
    w = w if not both else jnp.stack([w, 2 * w, 0.1 * w])
    x = x * jnp.asarray([1.0, 8.0, 0.3])[:, None, None]
    op = fp8.Fp8DotGeneral.init(StaticScaling(1.0) if recipe == "static" else recipe)
    if op.recipe.needs_key:
        op = fp8.with_rounding_keys(op, jax.random.key(0))
    call = with_custom_jvp(lambda op, w, h, flag: op(h, w, (((1,), (0,)), ((), ()))))
    flag = jnp.asarray(True)
    batched = lambda w, x: (c * jax.vmap(lambda w, h: call(op, w, h, flag), (0 if both else None, 0))(w, x)).sum()
    looped = lambda w, x: sum((c[i] * call(op, w[i] if both else w, x[i], flag)).sum() for i in range(3))
    exact = lambda w, x: (c * (x @ w)).sum()
    out, *expected = [jax.jit(jax.value_and_grad(f, (0, 1)))(w, x) for f in (batched, looped, exact)]
    np.testing.assert_allclose(out[0], expected[0][0], rtol=1e-5)
    for got, loop, truth in zip(out[1], expected[0][1], expected[1][1], strict=True):
        assert got.shape == truth.shape
        assert sqnr(truth, got) > min(sqnr(truth, loop) - 3.0, 20.0), (sqnr(truth, got), sqnr(truth, loop))
