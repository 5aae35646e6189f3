"""Kernels as the first operand, and other orders of operands and axes: in stacks, in ensembles, batched.

Each is compared with products that are made one by one.
"""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haliax_fp8 as fp8
from haliax_fp8._state.table import guarded, unguarded
from haliax_fp8.recipes import BlockScaling


OPERANDS = ("input", "kernel", "output_grad")
SIZE, MEMBERS, BATCH = 8, 3, 4
SCALING = fp8.DelayedScaling(amax_history_length=1)
# Of each member or layer: input, kernel, output gradient. All products of two differ.
SCALES = np.array([[0.5, 0.75, 3.0], [0.375, 2.0, 0.25], [1.25, 0.625, 7.0]], np.float32)

kernel_first_or_second = pytest.mark.parametrize("kernel_first", [True, False], ids=["kernel first", "kernel second"])


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def op_with(scales, stack=()):
    """An op, or a stack of them, before its first step but for its scales."""
    # `SIZE + 1` rows of input, so that the sizes of free axes tell it from the kernel.
    op = fp8.Fp8DotGeneral.init(SCALING, kernel_shape=(SIZE,), stack=stack)
    with_scales = lambda table: guarded(unguarded(table).at[..., 0].set(scales))
    return eqx.tree_at(lambda op: op.state.table.array, op, replace_fn=with_scales)


def times(op, x, w, kernel_first):
    """`x @ w`, of rows."""
    if kernel_first:
        return op(w, x, (((0,), (1,)), ((), ()))).T
    return op(x, w, (((1,), (0,)), ((), ())))


def newest(op):
    """The amaxes that a gradient carries, `[*stack, operand]`."""
    return jnp.stack([op.amax_history(operand)[..., 0] for operand in OPERANDS], axis=-1)


@pytest.mark.more
@kernel_first_or_second
def test_a_stack_takes_the_scales_of_each_product(kernel_first):
    """A scan computes the products of scales beforehand, all three together: each has to meet its own product."""
    w, x, g = normal(0, MEMBERS, SIZE, SIZE), normal(1, SIZE + 1, SIZE), normal(2, SIZE + 1, SIZE)

    def scanned(model, x):
        op, w = model
        arrays, static = eqx.partition(op, eqx.is_array)

        def layer(x, layer):
            arrays, w = layer
            return times(eqx.combine(arrays, static), x, w, kernel_first), None

        return (jax.lax.scan(layer, x, (arrays, w))[0] * g).sum()

    def unrolled(model, x):
        for op, w in model:
            x = times(op, x, w, kernel_first)
        return (x * g).sum()

    stack = op_with(SCALES, (hax.Axis("layer", MEMBERS),))
    take = lambda loss, model: eqx.filter_jit(fp8.filter_grad(lambda both: loss(*both)))((model, x))
    (of_stack, of_w), of_x = take(scanned, (stack, w))
    layers, of_x_alone = take(unrolled, [(op_with(SCALES[i]), w[i]) for i in range(MEMBERS)])
    assert jnp.isfinite(of_x).all()
    np.testing.assert_allclose(of_x, of_x_alone, rtol=1e-6)
    np.testing.assert_allclose(of_w, jnp.stack([of_w for _, of_w in layers]), rtol=1e-6)
    np.testing.assert_allclose(newest(of_stack), jnp.stack([newest(op) for op, _ in layers]), rtol=1e-6)
    np.testing.assert_array_equal(newest(of_stack)[:, 1], jnp.abs(w).max((1, 2)))
    np.testing.assert_array_equal(newest(of_stack)[[0, -1], [0, 2]], [jnp.abs(x).max(), jnp.abs(g).max()])


@pytest.mark.more
@kernel_first_or_second
def test_a_batch_of_an_ensemble(kernel_first):
    """`vmap` over members inside, over examples outside: each example meets each member, at the right index.

    State is each member's own, and records the maximum over the examples; gradients of kernels are summed over them.
    """
    w, x = normal(0, MEMBERS, SIZE, SIZE), normal(1, BATCH, SIZE + 1, MEMBERS, SIZE)
    g = normal(2, BATCH, MEMBERS, SIZE + 1, SIZE)
    ensemble = eqx.filter_vmap(op_with)(jnp.asarray(SCALES))

    def together(model, x):
        member = lambda op, w, x: times(op, x, w, kernel_first)
        members = eqx.filter_vmap(member, in_axes=(eqx.if_array(0), 0, 1))
        return jax.vmap(lambda x: members(*model, x))(x)

    def gradients(function, model, x, g):
        def loss(both):
            out = function(*both)
            return (out * g).sum(), out

        (of_model, of_x), out = fp8.filter_grad(loss, has_aux=True)((model, x))
        return out, newest(of_model[0]), of_model[1], of_x

    out, amaxes, of_w, of_x = eqx.filter_jit(functools.partial(gradients, together))((ensemble, w), x, g)
    alone = eqx.filter_jit(functools.partial(gradients, lambda model, x: times(model[0], x, model[1], kernel_first)))
    single = [[alone((op_with(SCALES[m]), w[m]), x[b, :, m], g[b, m]) for m in range(MEMBERS)] for b in range(BATCH)]
    outs, of_ws, of_xs = (np.array([[one[i] for one in row] for row in single]) for i in (0, 2, 3))
    assert jnp.isfinite(out).all()
    np.testing.assert_allclose(out, outs, rtol=1e-6)
    np.testing.assert_allclose(np.moveaxis(of_x, 2, 1), of_xs, rtol=1e-6)
    np.testing.assert_allclose(of_w, of_ws.sum(axis=0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(amaxes, np.array([[one[1] for one in row] for row in single]).max(axis=0))


def test_rows_of_batched_products_keep_their_scales():
    """Batch axes wherever they are: the product of each is that of its matrices. All sizes are the same."""
    x, w, g = normal(0, 4, 4, 4), normal(1, 4, 4, 4), normal(2, 4, 4, 4)
    spread = np.exp2(np.arange(16) - 8).reshape(4, 4).astype(np.float32)
    x, w = x * spread[:, :, None], w * spread[:, None, :]
    op = fp8.Fp8DotGeneral.init("rowwise")

    def together(x, w):  # [m, b, k] times [n, k, b]
        return op(x, w, (((2,), (1,)), ((1,), (2,))))

    def one_by_one(x, w):
        return jnp.stack([op(x[:, b], w[:, :, b], (((1,), (1,)), ((), ()))) for b in range(4)])

    @functools.partial(jax.jit, static_argnums=0)
    def of(function, x, w):
        out, pullback = jax.vjp(function, x, w)
        return out, *pullback(g)

    for ours, alone in zip(of(together, x, w), of(one_by_one, x, w), strict=True):
        np.testing.assert_allclose(ours, alone, rtol=1e-6)


def test_the_order_in_which_contracted_axes_are_named_does_not_matter():
    """Blocks run along one of them: the same, whichever is named last. Powers of two would hide which one it is."""
    x, w, g = normal(0, 8, 3, 8), normal(1, 8, 8, 5), normal(2, 3, 5)
    spread = np.exp2(np.random.default_rng(3).integers(-6, 6, (8, 3, 8))).astype(np.float32)
    op = fp8.Fp8DotGeneral.init(fp8.Recipe.of(BlockScaling(size=4, power_of_two=False)))

    @functools.partial(jax.jit, static_argnums=0)
    def of(contract, x, w):
        out, pullback = jax.vjp(lambda x, w: op(x, w, (contract, ((), ()))), x, w)
        return out, *pullback(g)

    one, other = (of(contract, x * spread, w) for contract in (((0, 2), (1, 0)), ((2, 0), (0, 1))))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
