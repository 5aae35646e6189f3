"""The state of an Fp8Attention is the exact maximum over all its uses, however JAX transforms them."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from transformations import LOOPS, WRAPPERS, python_loop

import haliax_fp8 as fp8
from haliax_fp8.experimental.attention import Fp8Attention
from haliax_fp8.experimental.attention.emulated import TENSORS


LENGTH = 3
TOKENS, HEADS, HEAD_DIM = 2, 2, 64
WIDTH = TOKENS * HEADS * HEAD_DIM
# Between two ways to compute the same, float32 may round a value to its other neighbour in the format. Sums instead of
# maxima would be off by a factor.
TOLERANCE = 2.0**-7


def new_op(seed=0):
    """An op whose scales and histories are all different."""
    op = Fp8Attention.init(scaling=fp8.DelayedScaling(amax_history_length=LENGTH))
    scales = 0.01 * (1.0 + np.random.default_rng(seed).random(len(TENSORS)))
    return eqx.tree_at(lambda op: op.state, op, op.state.with_scale(jnp.asarray(scales, jnp.float32)))


def layer(op, w, h, flag):
    """Attention of the rows of `h`, each of which is a sequence; `w` weighs the channels of its keys."""
    rows = h.reshape(-1, TOKENS, HEADS, HEAD_DIM)
    return op(rows, (h * w.reshape(*(1,) * (h.ndim - 1), -1)).reshape(rows.shape), rows).reshape(h.shape)


def problem(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    x, c = (jax.random.normal(key, (2, 3, WIDTH)) for key in keys[:2])
    return new_op(seed), 1.0 + 0.1 * jax.random.normal(keys[2], (WIDTH,)), x, c


def gradients(f, loop, uses, way, seed=0):
    op, w, x, c = problem(seed)
    loss = lambda params: (c * loop(f, *params, jnp.asarray(True), uses)).sum()
    return eqx.filter_jit(way(loss))((op, w, x))


@pytest.fixture(scope="module")
def expected():
    """Two uses one after the other, of all rows at once: no transformation but the gradient."""
    return gradients(layer, python_loop, 2, fp8.filter_grad)


REFUSED = {
    "cond of each row",
    "switch of each row",
    "custom_vjp of each row",
    "filter_custom_jvp",
    "filter_custom_vjp of each row",
}


def check(found, expected):
    """Histories and scales of the next step, and the gradients."""
    for name in TENSORS:
        a, b = (tree[0].amax_history(name) for tree in (found, expected))
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, err_msg=name)
        np.testing.assert_allclose(found[0].scale(name), expected[0].scale(name), rtol=TOLERANCE, err_msg=name)
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert float(jnp.linalg.norm(a - b)) < TOLERANCE * float(jnp.linalg.norm(b))


@pytest.mark.more
def test_uses_differ_in_their_amaxes():
    """Or a maximum could not be told from either of them."""
    once, twice = (gradients(layer, python_loop, uses, fp8.filter_grad)[0] for uses in (1, 2))
    changed = [name for name in TENSORS if not np.allclose(once.amax_history(name), twice.amax_history(name))]
    assert {"output_grad", "scores_grad"} <= set(changed)


@pytest.mark.more
@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_each_transformation_is_exact(wrapper, expected):
    if wrapper in REFUSED:
        with pytest.raises(ValueError, match="eqx.filter_grad"):
            gradients(WRAPPERS[wrapper](layer), python_loop, 2, fp8.filter_grad)
        return
    check(gradients(WRAPPERS[wrapper](layer), python_loop, 2, fp8.filter_grad), expected)


@pytest.mark.more
@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_each_loop_is_exact(loop, expected):
    f = WRAPPERS["vmap"](WRAPPERS["checkpoint"](layer))
    check(gradients(f, LOOPS[loop], 2, fp8.filter_grad), expected)


# Uses of their own, or copies of the state that JAX sums.
SUMMED = {
    "loop over rows",
    "lax.map",
    "custom_vjp of each row",
    "filter_custom_vjp of each row",
    "cond of each row",
    "switch of each row",
}


@pytest.mark.more
@pytest.mark.parametrize("wrapper", sorted(WRAPPERS))
def test_a_plain_gradient_is_exact_for_one_use_and_corrupts_nothing(wrapper):
    f = WRAPPERS[wrapper](layer)
    op = new_op()
    exact = gradients(layer, python_loop, 1, fp8.filter_grad)[0]
    found = op.state.overwritten_by(gradients(f, python_loop, 1, eqx.filter_grad)[0].state)
    uses = 6 if wrapper in SUMMED else 1
    newest, largest = np.asarray(found.array)[:, 1], np.asarray(exact.state.array)[:, 1]
    assert (newest >= largest * (1 - TOLERANCE)).all() and (newest <= uses * largest * (1 + TOLERANCE)).all()
    np.testing.assert_array_equal(found.array[:, 2 : 1 + LENGTH], op.state.array[:, 2 : 1 + LENGTH])


@pytest.mark.more
def test_only_one_operand_is_mapped():
    """All examples attend to the same keys."""
    op, _, x, c = problem()
    rows, grad = (a.reshape(-1, TOKENS, HEADS, HEAD_DIM) for a in (x, c))
    mapped = lambda op: (grad * jax.vmap(lambda q: op(q, rows[0], rows[1]))(rows)).sum()
    repeated = [jnp.broadcast_to(rows[i], rows.shape) for i in (0, 1)]
    batched = lambda op: (grad * op(rows, *repeated)).sum()
    found, whole = (eqx.filter_jit(fp8.filter_grad(loss))(op) for loss in (mapped, batched))
    check((found,), (whole,))


@pytest.mark.more
def test_members_of_an_ensemble_have_states_of_their_own():
    problems = [problem(seed) for seed in (1, 2, 3)]
    ops, ws, xs, cs = jax.tree.map(lambda *leaves: jnp.stack(leaves), *problems)

    def loss(ops):
        return eqx.filter_vmap(lambda op, w, x, c: (c * layer(op, w, x, None)).sum())(ops, ws, xs, cs).sum()

    together = eqx.filter_jit(fp8.filter_grad(loss))(ops)
    plain = eqx.filter_jit(eqx.filter_grad(loss))(ops)
    alone = eqx.filter_jit(fp8.filter_grad(lambda op, w, x, c: (c * layer(op, w, x, None)).sum()))
    for i, arguments in enumerate(problems):
        for found in (together, plain):
            check((jax.tree.map(lambda a, i=i: a[i], found),), (alone(*arguments),))


@pytest.mark.more
def test_gradients_of_each_example():
    """`vmap(grad)`: each example has its own amaxes. With a plain gradient the first has the maximum of all."""
    op, w, x, c = problem()
    rows, cs = (a.reshape(-1, WIDTH) for a in (x, c))
    gradient = lambda row, c, way: way(lambda op: (c * layer(op, w, row, None)).sum())(op)
    each, plain = (
        eqx.filter_jit(eqx.filter_vmap(lambda row, c, way=way: gradient(row, c, way)))(rows, cs)
        for way in (fp8.filter_grad, eqx.filter_grad)
    )
    for i in (0, 4):
        alone = eqx.filter_jit(gradient)(rows[i], cs[i], fp8.filter_grad)
        check((jax.tree.map(lambda a, i=i: a[i], each),), (alone,))
    for name in TENSORS:
        newest = plain.amax_history(name)[:, 0]
        np.testing.assert_allclose(newest[0], each.amax_history(name)[:, 0].max(), rtol=TOLERANCE)
        np.testing.assert_array_equal(newest[1:], 0.0)


@pytest.mark.more
def test_stacked_layers_have_states_of_their_own():
    op, w, x, c = problem()
    stacked = eqx.filter_vmap(lambda seed: new_op())(jnp.arange(2))

    def scanned(ops):
        arrays, static = eqx.partition(ops, eqx.is_array)
        body = lambda h, arrays: (layer(eqx.combine(arrays, static), w, h, None), None)
        return (c * lax.scan(body, x, arrays)[0]).sum()

    def one_by_one(ops):
        return (c * layer(ops[1], w, layer(ops[0], w, x, None), None)).sum()

    apart = [jax.tree.map(lambda a, i=i: a[i], stacked) for i in (0, 1)]
    expected = eqx.filter_jit(fp8.filter_grad(one_by_one))(apart)
    for way in (fp8.filter_grad, eqx.filter_grad):
        found = eqx.filter_jit(way(scanned))(stacked)
        for i in (0, 1):
            check((jax.tree.map(lambda a, i=i: a[i], found),), (expected[i],))


@pytest.mark.more
def test_microbatches_take_the_maximum(expected):
    op, w, x, c = problem()
    total = None
    for part in (0, 1):
        loss = lambda params, part=part: (c[part] * python_loop(layer, *params, x[part], None, 2)).sum()
        total = fp8.accumulate_gradients(total, eqx.filter_jit(fp8.filter_grad(loss))((op, w)))
    check(total, expected[:2])


@pytest.mark.more
def test_a_use_without_effect_and_no_use_leave_the_state():
    op, w, x, c = problem()
    for loss in (lambda op: (c * x).sum() + 0.0 * op.scaling.margin, lambda op: (c * x).sum()):
        gradient = fp8.filter_grad(loss)(op)
        np.testing.assert_array_equal(op.state.overwritten_by(gradient.state).array, op.state.array)


@pytest.mark.more
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_takes_the_maximum_over_devices(check_vma, expected):
    op, w, x, c = problem()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.shard_map(mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=(P(), P()), check_vma=check_vma)
    def step(state, w, x, c):
        def loss(params):
            op_, w = params
            return (c * python_loop(layer, op_, w, x, None, 2)).sum()

        gradient, of_w = fp8.filter_grad(loss)((eqx.tree_at(lambda op: op.state.table.array, op, state), w))
        return gradient.state.array, of_w if check_vma else lax.psum(of_w, "data")

    state, of_w = jax.jit(step)(op.state.array, w, x, c)
    check((eqx.tree_at(lambda op: op.state.table.array, op, state), of_w), expected[:2])


@pytest.mark.more
def test_divided_batches_are_as_whole_ones(expected):
    op, w, x, c = problem()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    put = lambda a: jax.device_put(a, jax.sharding.NamedSharding(mesh, P("data")))
    loss = lambda params, x, c: (c * python_loop(layer, *params, x, None, 2)).sum()
    check(eqx.filter_jit(fp8.filter_grad(loss))((op, w), put(x), put(c)), expected[:2])


def test_state_that_an_optimizer_changed_gives_nan():
    op, w, x, _ = problem()
    changed = jax.tree.map(lambda a: a * 0.9, op)
    assert bool(jnp.isnan(layer(changed, w, x, None)).all())


@pytest.mark.more
def test_partition_and_update_find_the_state():
    op, w, x, c = problem()
    gradient = fp8.filter_grad(lambda op: (c * layer(op, w, x, None)).sum())(op)
    overwrites, rest = fp8.partition_for_grad_overwrite(gradient)
    assert jax.tree.leaves(rest) == []
    new = fp8.apply_updates(op, rest, overwrites)
    check((new,), (gradient,))
    assert isinstance(fp8.trainable(op), Fp8Attention) and jax.tree.leaves(fp8.trainable(op)) == []


def test_haliax_stacked_and_a_cast_model(expected):
    op = Fp8Attention.init(stack=(hax.Axis("layers", 2),))
    assert op.state.table.axes[0].name == "layers"
    low = fp8.cast_params(new_op(), jnp.bfloat16)
    assert low.state.array.dtype == jnp.float32
