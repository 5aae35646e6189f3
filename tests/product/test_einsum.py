"""Fp8Einsum and `Fp8DotGeneral` inside other einsums: any subscripts, roles kept, numbers of Flax and of NumPy."""

import functools
import re
from collections.abc import Callable

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.linen import fp8_ops
from helpers import E4M3, E5M2, dot_generals, precisions_of, quantize, round_to, sqnr, state_is_constant
from hypothesis import given, settings, strategies as st
from numpy_reference import OPERANDS, DelayedScalingReference, amax, assert_state_is

import haliax_fp8
from haliax_fp8 import (
    DelayedScaling,
    Fp8DotGeneral,
    Fp8Einsum,
    apply_updates,
    filter_grad,
    partition_for_grad_overwrite,
)
from haliax_fp8._einsum import Subscripts
from haliax_fp8.training import fp8_states


SHORT = DelayedScaling(amax_history_length=4)


def normal(seed: int, shape, scale: float = 1.0) -> jax.Array:
    return jnp.asarray((scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32))


def small_integers(seed: int, shape) -> jax.Array:
    """-1, 0 and 1: their sums, too, are numbers of E4M3 and E5M2 as long as few are added, so nothing is rounded."""
    return jnp.asarray(np.random.default_rng(seed).integers(-1, 2, shape).astype(np.float32))


@functools.partial(jax.jit, static_argnames=("function", "subscripts"))
def products(function, subscripts, einsum, x, w, g):
    """The output; its gradients with respect to `einsum` and both operands, for the output's gradient g."""
    out, vjp = jax.vjp(lambda einsum, x, w: function(einsum, subscripts, x, w), einsum, x, w)
    return out, *vjp(g)


def fp8(einsum, subscripts, x, w):
    return einsum(subscripts, x, w)


def high_precision(einsum, subscripts, x, w):
    return jnp.einsum(subscripts, x, w)


def updated[T](model: T, gradients: T) -> T:
    """The model with the state of the next step and unchanged parameters."""
    overwrites, _ = partition_for_grad_overwrite(gradients)
    return apply_updates(model, jax.tree.map(lambda _: None, overwrites), overwrites)


def newest(op: Fp8DotGeneral) -> list[float]:
    return [float(op.amax_history(operand)[0]) for operand in OPERANDS]


# --- Any subscripts ---------------------------------------------------------------------------------------------------


CASES = {
    # subscripts: shapes of input and kernel, and what is left of each once it is a plain product's operand
    "mk,kn->mn": ((5, 3), (3, 4)),
    "mk,nk->mn": ((5, 3), (4, 3)),
    "km,kn->nm": ((3, 5), (3, 4)),
    "mk,kn->nm": ((5, 3), (3, 4)),  # `jnp.einsum` exchanges the operands here
    "mk,kn": ((5, 3), (3, 4)),
    "ba,cb": ((2, 3), (5, 2)),
    "Zk,kA": ((5, 3), (3, 4)),  # capital letters come first
    "...k,kn->...n": ((2, 5, 3), (3, 4)),
    "k...,kn->n...": ((3, 2, 5), (3, 4)),
    "...k,k...->...": ((2, 3), (3, 2)),
    "...k,...kn->...n": ((5, 3), (2, 5, 3, 4)),
    "...mk,...kn": ((2, 5, 3), (2, 3, 4)),
    "...k,kn->n": ((5, 3), (3, 4)),  # the ellipsis is summed
    "mk,kn->...mn": ((5, 3), (3, 4)),  # and may stand for nothing
    "bmk,bkn->bmn": ((2, 5, 3), (2, 3, 4)),
    "bmk,bkn->mnb": ((2, 5, 3), (2, 3, 4)),
    "bhqd,bkhd->bqhk": ((2, 3, 4, 2), (2, 5, 3, 2)),
    "gecm,emh->gech": ((2, 3, 4, 2), (3, 2, 5)),
    "bsd,dhk->bshk": ((2, 3, 4), (4, 2, 5)),
    "bshk,hkd->bsd": ((2, 3, 2, 5), (2, 5, 4)),
    "k,kn->n": ((3,), (3, 4)),
    "mk,k->m": ((5, 3), (3,)),
    "k,k->": ((3,), (3,)),
    "m,n->mn": ((5,), (4,)),
    "mn,mn->mn": ((5, 4), (5, 4)),
    ",n->n": ((), (4,)),
    "iik,kn->in": ((3, 3, 2), (2, 4)),  # a diagonal
    "ii,ij->j": ((3, 3), (3, 4)),
    "mkx,kny->mn": ((5, 3, 2), (3, 4, 2)),  # x and y are summed before the product
    "mk,kn->m": ((5, 3), (3, 4)),
    "mk,kn->": ((5, 3), (3, 4)),
    "mk,kn->mn, size 1": ((5, 1), (3, 4)),  # broadcast, and so summed over the other operand alone
    "...k,...kn->...n, size 1": ((2, 1, 3), (5, 3, 4)),
    "mn,mn->mn, size 1": ((5, 1), (1, 4)),
}


def operand_axes(subscripts: str, x_shape, w_shape) -> tuple[str, str]:
    """`np.einsum` subscripts that make each operand that of a plain product."""
    parsed = Subscripts.parse(subscripts, x_shape, w_shape)
    return tuple(f"{old}->{new}" for old, new in zip(parsed.operands, parsed.reduced, strict=True))


def numpys(subscripts: str, x_shape) -> str:
    """NumPy, unlike JAX, wants an ellipsis that is summed spelt out."""
    return subscripts.replace("...", "z" * (len(x_shape) - 1)) if subscripts.endswith("->n") else subscripts


def basis(shape):
    """The arrays with a single 1."""
    return np.eye(int(np.prod(shape)), dtype=np.float32).reshape(-1, *shape)


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
def test_any_subscripts(case):
    """Output and both gradients are those of `np.einsum`, exactly, where operands are numbers of the formats.

    The amaxes are those of input and kernel, in this order, whatever the subscripts.
    """
    subscripts, (x_shape, w_shape) = case.split(", size")[0], CASES[case]
    x, w = small_integers(0, x_shape), 2 * small_integers(1, w_shape)
    multiply = lambda x, w: np.einsum(numpys(subscripts, x_shape), x, w)
    g = 4 * small_integers(2, multiply(x, w).shape)
    out, gradients, dx, dw = products(fp8, subscripts, Fp8Einsum.init(SHORT), x, w, g)
    np.testing.assert_array_equal(out, multiply(x, w), strict=True)
    # By definition: how far the sum of output times g moves with each element.
    for actual, moved in ((dx, lambda e: multiply(e, w)), (dw, lambda e: multiply(x, e))):
        np.testing.assert_array_equal(np.ravel(actual), [np.sum(g * moved(e)) for e in basis(actual.shape)])
    reduced = [np.einsum(axes, a) for axes, a in zip(operand_axes(subscripts, x_shape, w_shape), (x, w), strict=True)]
    assert newest(gradients.dot_general) == [*map(amax, reduced), amax(g)]


@st.composite
def einsums(draw):
    """Subscripts with ellipses, repeated, summed and broadcast axes, with shapes that fit."""
    letters = draw(st.lists(st.sampled_from("abcXY"), min_size=1, max_size=4, unique=True))
    sizes = {name: draw(st.integers(1, 3)) for name in letters}
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    sides, shapes = [], []
    for _ in range(2):
        side = draw(st.lists(st.sampled_from(letters), max_size=4))
        own = {
            name: draw(st.sampled_from([1, size])) if draw(st.integers(0, 4)) == 0 else size
            for name, size in sizes.items()
        }
        shape = [own[name] for name in side]
        if draw(st.booleans()):
            position, count = draw(st.integers(0, len(side))), draw(st.integers(0, len(batch)))
            side.insert(position, "...")
            shape[position:position] = [draw(st.sampled_from([1, size])) for size in batch[len(batch) - count :]]
        sides.append("".join(side))
        shapes.append(tuple(shape))
    subscripts = ",".join(sides)
    if draw(st.booleans()):
        present = [name for name in letters if name in subscripts]
        out = draw(st.lists(st.sampled_from(present), unique=True)) if present else []
        out.insert(draw(st.integers(0, len(out))), "...")
        subscripts += draw(st.sampled_from(["->", " -> "])) + "".join(out)
    return subscripts, *shapes


@pytest.mark.more
@settings(max_examples=300, deadline=None)
@given(einsums(), st.integers(0, 100))
def test_parsing_is_numpys(case, seed):
    """The reduced operands give the result, and have no axis that is neither in the other nor in the result."""
    subscripts, x_shape, w_shape = case
    rng = np.random.default_rng(seed)
    x, w = (rng.integers(-3, 4, shape).astype(np.float64) for shape in (x_shape, w_shape))
    parsed = Subscripts.parse(subscripts, x_shape, w_shape)
    reduced = [np.einsum(axes, a) for axes, a in zip(operand_axes(*case), (x, w), strict=True)]
    for axes, other in (parsed.reduced, parsed.reduced[::-1]):
        assert len(set(axes)) == len(axes) and set(axes) <= set(other) | set(parsed.out)
    shared = set(parsed.reduced[0]) & set(parsed.reduced[1])
    left, right = (dict(zip(names, a.shape, strict=True)) for names, a in zip(parsed.reduced, reduced, strict=True))
    assert all(left[name] == right[name] for name in shared), "broadcasting is done"
    result = np.einsum(f"{parsed.reduced[0]},{parsed.reduced[1]}->{parsed.out}", *reduced)
    np.testing.assert_array_equal(result, np.einsum(subscripts, x, w))


@pytest.mark.parametrize(
    "subscripts, x_shape, w_shape",
    [
        ("mk,kn->mn", (5, 3), (4, 4)),
        ("ii,ij->j", (3, 2), (3, 4)),
        ("...k,...kn->...n", (2, 3), (5, 3, 4)),
        ("mk,kn->mn", (5, 3, 2), (3, 4)),
        ("...mk,kn->mn", (3,), (3, 4)),
        ("mk,kn->mm", (5, 3), (3, 4)),
        ("mk,kn->mz", (5, 3), (3, 4)),
        ("mk,kn->mn->m", (5, 3), (3, 4)),
        ("mk,kn=mn", (5, 3), (3, 4)),
        ("...m...,mn->n", (5, 3, 5), (3, 4)),
        ("m.k,kn->mn", (5, 2, 3), (3, 4)),
        ("mk->m", (5, 3), (3, 4)),
        ("mk,kn,nl->ml", (5, 3), (3, 4)),
    ],
)
def test_subscripts_that_do_not_fit(subscripts, x_shape, w_shape):
    with pytest.raises(ValueError, match="^" + re.escape(f"subscripts={subscripts!r}")):
        Fp8Einsum.init(SHORT)(subscripts, jnp.ones(x_shape), jnp.ones(w_shape))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_other_numbers_of_operands_are_refused_with_the_remedy(count):
    subscripts = ",".join(["ij", "jk", "kl"][:count]) + "->il"
    with pytest.raises(ValueError, match=f"came with {count} operands;.*Split a longer product"):
        Fp8Einsum.init(SHORT)(subscripts, *[jnp.ones((2, 2))] * count)


# --- Numbers ----------------------------------------------------------------------------------------------------------


def test_accuracy_and_state_over_steps():
    """The products of what was rounded, with the scales of the steps before; histories and scales bit for bit."""
    einsum, expected = Fp8Einsum.init(SHORT), DelayedScalingReference(4)
    for step in range(3):
        x, w, g = normal(step, (8, 6, 48), 3.0), normal(9 + step, (4, 48, 16), 0.1), normal(20, (6, 4, 8, 16), 1e-3)
        out, gradients, dx, dw = products(fp8, "tbk,hkn->bhtn", einsum, x, w, g)
        qx, qw, qg = (
            quantize(a, einsum.dot_general.scale(operand), dtype)
            for a, operand, dtype in zip((x, w, g), OPERANDS, (E4M3, E4M3, E5M2), strict=True)
        )
        for actual, subscripts, *rounded in (
            (out, "tbk,hkn->bhtn", qx, qw),
            (dx, "bhtn,hkn->tbk", qg, qw),
            (dw, "tbk,bhtn->hkn", qx, qg),
        ):
            value = np.einsum(subscripts, *rounded)
            bound = np.einsum(subscripts, *map(np.abs, rounded))
            # A sum of n terms in float32 is off by n roundings at most; scaling rounds twice more.
            assert np.all(np.abs(actual - value) <= (64 + 2) * np.finfo(np.float32).eps * bound)
        expected.record(input=amax(x), kernel=amax(w), output_grad=amax(g))
        einsum = updated(einsum, gradients)
        assert_state_is(einsum.dot_general, expected)
    reference = products(high_precision, "tbk,hkn->bhtn", None, x, w, g)
    # Two operands in E4M3 leave 28.5 dB of normally distributed data, one of them in E5M2 24.5 dB.
    for actual, exact, gate in zip((out, dx, dw), (reference[0], *reference[2:]), (28.0, 24.0, 24.0), strict=True):
        assert sqnr(exact, actual) >= gate


def test_three_products_in_fp8():
    """With axes summed and repeated there are still three products, all of FP8 operands."""
    x, w, g = normal(0, (5, 3, 3, 2)), normal(1, (3, 4, 6)), normal(2, (4, 5))
    for subscripts, arrays in (("bkkx,kny->nb", (x, w, g)), ("mk,nk->nm", (x[..., 0, 0], w[..., 0].T, g))):
        equations = dot_generals(functools.partial(products, fp8, subscripts), Fp8Einsum.init(SHORT), *arrays)
        pairs = [{v.aval.dtype for v in equation.invars} for equation in equations]
        assert (len(pairs), pairs.count({E4M3}), pairs.count({E4M3, E5M2})) == (3, 1, 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtypes(dtype):
    """Result and gradients have the operands' dtypes, or what was asked for; `precision` is passed on."""
    x, w = normal(0, (5, 3)).astype(dtype), normal(1, (3, 4)).astype(dtype)
    einsum = Fp8Einsum.init(SHORT)
    out, _, dx, dw = products(fp8, "mk,kn->nm", einsum, x, w, jnp.ones((4, 5), dtype))
    assert out.dtype == dx.dtype == dw.dtype == dtype
    assert einsum("mk,kn->nm", x, w, preferred_element_type=jnp.float32).dtype == jnp.float32
    for precision, expected in (("highest", 2), (None, 1)):  # of fprop and dgrad
        backward = jax.grad(lambda x, p=precision: einsum("mk,kn->nm", x, w, precision=p).astype(jnp.float32).sum())
        used = [precisions_of(equation) for equation in dot_generals(backward, x)]
        assert used.count({jax.lax.Precision.HIGHEST}) == expected
    assert Fp8Einsum.init(SHORT, compute_dtype=dtype)("mk,kn->nm", x.astype(jnp.float32), w).dtype == dtype


@pytest.mark.more
def test_under_vmap_and_in_a_stack():
    """A mapped axis is one more batch axis: one amax. State with the axes of a stack goes through a `scan`."""
    x, w = normal(0, (6, 5, 3)), normal(1, (3, 4))
    loss = lambda einsum, x: jax.vmap(lambda x: einsum("mk,kn->mn", x, w))(x).sum()
    assert newest(jax.grad(loss)(Fp8Einsum.init(SHORT), x).dot_general) == [amax(x), amax(w), 1.0]

    Layers = hax.Axis("layers", 3)
    einsums, kernels = Fp8Einsum.init(SHORT, stack=(Layers,)), normal(2, (3, 3, 3))

    def stacked(einsums, x):
        body = lambda x, layer: (layer[0]("mk,kn->mn", x, layer[1]), None)
        return jax.lax.scan(body, x, (einsums, kernels))[0].sum()

    history = filter_grad(stacked)(einsums, x[0]).dot_general.amax_history("kernel")
    np.testing.assert_array_equal(history[:, 0], np.max(np.abs(kernels), axis=(1, 2)))


# --- Flax -------------------------------------------------------------------------------------------------------------


FLAX_CASES = pytest.mark.parametrize(
    "subscripts, x_shape, w_shape, g_shape",
    [
        ("mk,kn->mn", (16, 32), (32, 64), (16, 64)),
        ("...k,nk->...n", (2, 3, 32), (64, 32), (2, 3, 64)),
        ("...k,kn->...n", (2, 3, 64), (64, 32), (2, 3, 32)),
    ],
)


@state_is_constant
@FLAX_CASES
def test_flaxs_test_of_its_einsum(subscripts, x_shape, w_shape, g_shape):
    """Operands that are numbers of the formats: the loss and its gradients are those of `jnp.einsum`, to 1e-2."""
    arrays = zip((x_shape, w_shape, g_shape), (E4M3, E4M3, E5M2), strict=True)
    x, w, g = (jnp.asarray(round_to(normal(i, s), dtype).astype(np.float32)) for i, (s, dtype) in enumerate(arrays))

    def loss(einsum, x, w):
        return jnp.sum(einsum(subscripts, x, w) * g)

    out, gradients = jax.jit(jax.value_and_grad(loss, argnums=(1, 2)))(Fp8Einsum.init(), x, w)
    expected, references = jax.value_and_grad(functools.partial(loss, jnp.einsum), argnums=(0, 1))(x, w)
    for actual, reference in zip((out, *gradients), (expected, *references), strict=True):
        np.testing.assert_allclose(actual, reference, atol=1e-2, rtol=1e-2)


FLAX_NAMES = {operand: f"{operand}_amax_history" for operand in OPERANDS}


@functools.partial(jax.jit, static_argnames="subscripts")
def flax_products(variables, subscripts, x, w, g):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        apply = lambda variables, x, w: nn.Fp8Einsum(amax_history_length=4).apply(variables, subscripts, x, w)
        out, vjp = jax.vjp(apply, variables, x, w)
        return out, *vjp(g)


@FLAX_CASES
def test_bits_are_flaxs(subscripts, x_shape, w_shape, g_shape):
    """Five steps at changing magnitudes: output, gradients and histories; the scale that a step used is Flax's."""
    einsum = Fp8Einsum.init(SHORT)
    names = [f"{operand}_{part}" for operand in OPERANDS for part in ("scale", "amax_history")]
    collection = fp8_ops.OVERWRITE_WITH_GRADIENT
    variables = {collection: {name: jnp.ones(1) if name.endswith("scale") else jnp.zeros(4) for name in names}}
    for step, factor in enumerate((1.0, 300.0, 1e-3, 7.0, 1e4)):
        x, w, g = (normal(3 * step + i, s, factor) for i, s in enumerate((x_shape, w_shape, g_shape)))
        used = {operand: einsum.dot_general.scale(operand) for operand in OPERANDS}
        expected_out, variables, *expected = flax_products(variables, subscripts, x, w, g)
        out, gradients, *actual = products(fp8, subscripts, einsum, x, w, g)
        einsum = updated(einsum, gradients)
        for ours, theirs in zip((out, *actual), (expected_out, *expected), strict=True):
            np.testing.assert_array_equal(ours, theirs, strict=True)
        for operand in OPERANDS:
            theirs = variables[collection][f"{operand}_amax_history"]
            np.testing.assert_array_equal(einsum.dot_general.amax_history(operand), theirs)
            np.testing.assert_array_equal(used[operand], variables[collection][f"{operand}_scale"][0])


def test_flax_books_the_kernel_under_the_input_where_operands_are_exchanged():
    """The one case in which our numbers are not Flax's, on purpose."""
    x, w = jnp.full((4, 8), 2.0), jnp.full((8, 3), 0.5)
    module = nn.Fp8Einsum(amax_history_length=4)
    variables = module.init(jax.random.key(0), "mk,kn->nm", x, w)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        theirs = jax.grad(lambda variables: module.apply(variables, "mk,kn->nm", x, w).sum())(variables)
    theirs = theirs[fp8_ops.OVERWRITE_WITH_GRADIENT]
    assert [theirs[f"{operand}_amax_history"][0] for operand in ("input", "kernel")] == [0.5, 2.0]
    ours = jax.grad(lambda einsum: einsum("mk,kn->nm", x, w).sum())(Fp8Einsum.init(SHORT))
    assert newest(ours.dot_general) == [2.0, 0.5, 1.0]


class Foo(eqx.Module):
    """The module of Flax's guide: an einsum that can be exchanged, over operands that come as arguments."""

    einsum: Callable = jnp.einsum

    def __call__(self, a, b):
        return self.einsum("mk,kn->mn", a, b)


def test_the_guides_einsum_module():
    """As in the guide: the same module with and without FP8; its state; one step that overwrites it."""
    a, b = normal(0, (16, 32)), normal(1, (32, 64))
    model = Foo(einsum=Fp8Einsum.init())

    @jax.jit
    def train_step(model, a, b):
        return jnp.sum(model(a, b))

    assert sqnr(Foo()(a, b), model(a, b)) > 20
    (state,) = fp8_states(model)
    assert state.scale.shape == (3,) and state.array[..., 1:-1].shape == (3, 1024)
    gradients, da = jax.jit(jax.grad(train_step, (0, 1)))(model, a, b)
    assert da.shape == a.shape
    model = updated(model, gradients)
    expected = DelayedScalingReference(1024)
    expected.record(input=amax(a), kernel=amax(b), output_grad=1.0)
    assert_state_is(model.einsum.dot_general, expected)


class Experts(eqx.Module):
    """Experts with a fixed capacity, as einsums (GShard): dispatch and combine in high precision, kernels in FP8."""

    up: jax.Array
    down: jax.Array
    einsum_up: Callable
    einsum_down: Callable

    def __call__(self, tokens, dispatch):
        slots = jnp.einsum("gsm,gsec->gecm", tokens, dispatch)
        hidden = jax.nn.relu(self.einsum_up("gecm,emh->gech", slots, self.up))
        return jnp.einsum("gecm,gsec->gsm", self.einsum_down("gech,ehm->gecm", hidden, self.down), dispatch)


@pytest.mark.more
def test_a_mixture_of_experts_of_einsums_trains():
    """Two kernels, two states; the loss falls as it does in high precision, and amaxes are those of the operands."""
    groups, tokens_per_group, experts, capacity, width, hidden = 2, 12, 3, 4, 16, 32
    tokens = normal(0, (groups, tokens_per_group, width))
    # Each token to one slot of one expert: a permutation matrix per group.
    dispatch = jnp.stack([jnp.eye(12)[np.random.default_rng(i).permutation(12)] for i in range(groups)])
    dispatch = dispatch.reshape(groups, tokens_per_group, experts, capacity)
    wanted = normal(1, tokens.shape)
    kernels = normal(2, (experts, width, hidden), width**-0.5), normal(3, (experts, hidden, width), hidden**-0.5)
    loss = lambda model: jnp.mean((model(tokens, dispatch) - wanted) ** 2)

    @eqx.filter_jit
    def step(model):
        value, gradients = haliax_fp8.filter_value_and_grad(loss)(model)
        overwrites, gradients = partition_for_grad_overwrite(gradients)
        return value, apply_updates(model, jax.tree.map(lambda g: -0.5 * g, gradients), overwrites)

    losses = {}
    for name, einsums in (
        ("FP8", (Fp8Einsum.init(SHORT), Fp8Einsum.init(SHORT))),
        ("high precision", (jnp.einsum, jnp.einsum)),
    ):
        model, losses[name] = Experts(*kernels, *einsums), []
        for _ in range(30):
            before = model
            value, model = step(model)
            losses[name].append(float(value))
        if name == "FP8":
            assert model.einsum_up.dot_general.amax_history("kernel")[0] == amax(before.up)
            assert model.einsum_up.dot_general.amax_history("input")[0] == amax(tokens)
            assert model.einsum_down.dot_general.amax_history("kernel")[0] == amax(before.down)
    assert losses["high precision"][-1] < 0.5 * losses["high precision"][0]
    np.testing.assert_allclose(losses["FP8"], losses["high precision"], rtol=0.05)


# --- `Fp8DotGeneral` in other einsums ---------------------------------------------------------------------------------


def jitted_or_not(function):
    return pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])(function)


@state_is_constant
@jitted_or_not
@pytest.mark.parametrize(
    "subscripts, kernel_axes",
    [("mk,kn->mn", "kn"), ("mk,kn->nm", "kn"), ("...mk,nk->...nm", "nk"), ("bmk,bkn->nbm", "bkn")],
)
def test_jnp_einsum(subscripts, kernel_axes, transform):
    """With the kernel's free sizes given, amaxes are booked right even where JAX exchanges the operands."""
    sizes = {"m": 40, "k": 32, "n": 24, "b": 2}
    shape = lambda axes: tuple(sizes[name] for name in axes.replace("...", "b"))
    axes, _ = subscripts.split("->")[0].split(",")
    x, w = normal(0, shape(axes), 3.0), normal(1, shape(kernel_axes), 0.1)
    g = normal(2, shape(subscripts.split("->")[1]))
    op = Fp8DotGeneral.init(SHORT, kernel_shape=(24,))

    def loss(op, x, w):
        return jnp.sum(jnp.einsum(subscripts, x, w, _dot_general=op) * g)

    gradients = transform(jax.grad(loss))
    expected = DelayedScalingReference(4)
    for _ in range(2):
        expected.record(input=amax(x), kernel=amax(w), output_grad=amax(g))
        op = updated(op, gradients(op, x, w))
        assert_state_is(op, expected)
    actual = transform(jax.grad(loss, argnums=(1, 2)))(op, x, w)
    reference = jax.grad(lambda x, w: jnp.sum(jnp.einsum(subscripts, x, w) * g), argnums=(0, 1))(x, w)
    assert sqnr(jnp.einsum(subscripts, x, w), jnp.einsum(subscripts, x, w, _dot_general=op)) >= 27
    assert min(map(sqnr, reference, actual)) >= 23  # of a few hundred numbers: a decibel of chance


@jitted_or_not
def test_jnp_einsum_with_an_op_used_twice(transform):
    """The op is hashed, not its arrays: two calls in one trace, and two ops, do not get in each other's way."""
    x, w = normal(0, (5, 8)), normal(1, (8, 8))
    call = lambda op, x: jnp.einsum("mk,kn->mn", x, w, _dot_general=op)
    ops = [Fp8DotGeneral.init(SHORT) for _ in range(2)]
    loss = lambda ops: (call(ops[0], x) + call(ops[0], -4.0 * x) + call(ops[1], 2.0 * x)).sum()
    gradients = transform(filter_grad(loss))(ops)
    assert [newest(op)[0] for op in gradients] == [amax(4.0 * x), amax(2.0 * x)]
    scaled = eqx.tree_at(lambda op: op.state, ops[0], ops[0].state.with_scale(ops[0].state.scale * 3.0))
    assert not np.array_equal(call(scaled, x), call(ops[0], x))  # other scales, another rounding


@state_is_constant
@jitted_or_not
@pytest.mark.parametrize("names, kernel_first", [("batch input", False), ("input batch", False), ("batch input", True)])
def test_haliax_dot(names, kernel_first, transform):
    """`hax.dot(..., dot_general=op)`: output, gradients, and amaxes under the right operand."""
    Batch, In, Out = hax.make_axes(batch=24, input=48, output=20)
    axes = {"batch": Batch, "input": In}
    x = hax.named(normal(0, tuple(axes[n].size for n in names.split()), 3.0), names.split())
    w, g = hax.named(normal(1, (20, 48), 0.1), (Out, In)), hax.named(normal(2, (24, 20)), (Batch, Out))
    op = Fp8DotGeneral.init(SHORT, kernel_shape=(20,))

    def dot(op, x, w):
        return hax.dot(*((w, x) if kernel_first else (x, w)), axis=In, dot_general=op)

    def loss(op, x, w):
        return hax.sum(dot(op, x, w) * g).scalar()

    expected = DelayedScalingReference(4)
    expected.record(input=amax(x), kernel=amax(w), output_grad=amax(g))
    op = updated(op, transform(jax.grad(loss))(op, x, w))
    assert_state_is(op, expected)
    exact = np.asarray(hax.dot(x, w, axis=In).rearrange((Batch, Out)).array)
    assert sqnr(exact, dot(op, x, w).rearrange((Batch, Out))) >= 28
    dx, dw = transform(jax.grad(loss, argnums=(1, 2)))(op, x, w)
    assert sqnr(hax.dot(g, w, axis=Out).rearrange(x.axes), dx) >= 24
    assert sqnr(hax.dot(g, x, axis=Batch).rearrange(w.axes), dw) >= 24


def test_plain_functions():
    """No module, no container: an einsum is an argument like any other, and trees of them are trees."""

    def loss(params, einsums, x):
        hidden = jnp.tanh(einsums["up"]("bi,ih->bh", x, params["up"]))
        return jnp.sum(einsums["down"]("bh,ho->bo", hidden, params["down"]) ** 2)

    params = {"up": normal(0, (16, 24), 0.25), "down": normal(1, (24, 8), 0.25)}
    einsums = {name: Fp8Einsum.init(SHORT) for name in params}
    x = normal(2, (32, 16))
    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    for _ in range(2):
        used = einsums
        gradients, states = step(params, einsums, x)
        einsums = updated(einsums, states)
    # Both products and their gradients in float64, operands rounded with the scales that the second step had.
    scale = lambda name, operand: used[name].dot_general.scale(operand)
    round_for = lambda name, operand, a, format=E4M3: quantize(a, scale(name, operand), format)
    up, down = (round_for(name, "kernel", params[name]) for name in params)
    batch = round_for("up", "input", x)
    hidden = np.tanh(batch @ up)
    rounded = round_for("down", "input", hidden)
    of_down = round_for("down", "output_grad", 2 * (rounded @ down), E5M2)
    of_up = round_for("up", "output_grad", (of_down @ down.T) * (1 - hidden**2), E5M2)
    # What float32 computes may fall on the other side of a middle in FP8: one element in a hundred does not show here.
    assert sqnr(batch.T @ of_up, gradients["up"]) >= 45
    assert sqnr(rounded.T @ of_down, gradients["down"]) >= 45
    in_high_precision = jax.grad(loss)(params, {name: jnp.einsum for name in params}, x)
    assert max(sqnr(in_high_precision[name], gradients[name]) for name in params) < 30, "rounding shows"
    assert einsums["up"].dot_general.amax_history("input")[0] == amax(x)
    assert [einsums[name].dot_general.amax_history("kernel")[0] for name in params] == [*map(amax, params.values())]
