"""`fp32_max_grad`: cotangents of one value combine by maximum, through every transformation. What it needs of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import dtypes
from jax.core import ShapedArray
from jax.experimental import checkify
from jax.sharding import NamedSharding, PartitionSpec as P

from haliax_fp8._jax import max_grad
from haliax_fp8._jax.max_grad import StateOutsideJit, fp32_max_grad, is_max_grad, to_float32, to_max_grad


NEVER_USED = -np.inf


@jax.custom_vjp
def observe(x, state):
    """Returns `x`; the cotangent of `state` is `x` itself, so that a gradient shows which uses reached it, and how."""
    return x


observe.defvjp(
    lambda x, state: (x, (x, state)),
    lambda residuals, cotangent: (
        cotangent,
        to_max_grad(jnp.broadcast_to(residuals[0], residuals[1].shape))
        if is_max_grad(residuals[1])
        else jnp.broadcast_to(residuals[0], residuals[1].shape),
    ),
)


def check(loss, state, *args, expected, cast=to_max_grad):
    """The gradient with respect to float32 state that is cast to the type inside the differentiated function."""
    gradient = jax.jit(jax.grad(lambda state, *args: loss(cast(state), *args)))(state, *args)
    assert gradient.dtype == jnp.float32 and isinstance(gradient, jax.Array) and not is_max_grad(gradient)
    np.testing.assert_array_equal(gradient, np.broadcast_to(expected, np.shape(state)))


STATE = jnp.asarray([10.0, 20.0], jnp.float32)
TWO, FIVE, THREE = (jnp.asarray(x, jnp.float32) for x in (2.0, 5.0, 3.0))


def three_uses(state):
    return observe(TWO, state) + observe(FIVE, state) + observe(THREE, state)


def test_single_use():
    check(lambda state: observe(TWO, state), STATE, expected=2.0)


@pytest.mark.smoke
def test_several_uses_give_the_maximum():
    check(three_uses, STATE, expected=5.0)


def test_plain_float32_gives_the_sum():
    """What the type is for. A test that could not tell maximum from sum would prove nothing."""
    check(three_uses, STATE, expected=10.0, cast=lambda state: state)


def test_maximum_of_negative_cotangents():
    """The identity is -inf, not zero: zero would hide it."""
    check(lambda state: observe(-TWO, state) + observe(-FIVE, state), STATE, expected=-2.0)


def test_nan_and_infinity_are_not_hidden():
    nan, infinity = jnp.asarray(jnp.nan), jnp.asarray(jnp.inf)
    check(lambda state: observe(TWO, state) + observe(nan, state), STATE, expected=np.nan)
    check(lambda state: observe(infinity, state) + observe(TWO, state), STATE, expected=np.inf)


def test_use_in_a_function_that_is_jitted_itself():
    inner = jax.jit(observe)
    check(lambda state: inner(TWO, state) + inner(FIVE, state), STATE, expected=5.0)


@pytest.mark.parametrize("unroll", [1, 2])
def test_scan_constant(unroll):
    def loss(state, xs):
        return lax.scan(lambda total, x: (total + observe(x, state), None), 0.0, xs, unroll=unroll)[0]

    check(loss, STATE, jnp.asarray([2.0, 5.0, 3.0]), expected=5.0)


def test_scan_carry():
    def loss(state, xs):
        def body(carry, x):
            total, state = carry
            return (total + observe(x, state), state), None

        return lax.scan(body, (0.0, state), xs)[0][0]

    check(loss, STATE, jnp.asarray([2.0, 5.0, 3.0]), expected=5.0)


def test_scan_xs():
    """A stack of layers: each has its own state, used twice in its step."""

    def loss(states, xs):
        def body(total, step):
            state, x = step
            return total + observe(x, state) + observe(-x, state), None

        return lax.scan(body, 0.0, (states, xs))[0]

    states = jnp.zeros((3, 2))
    check(loss, states, jnp.asarray([2.0, -5.0, 3.0]), expected=np.array([[2.0], [5.0], [3.0]]))


def test_scan_in_a_scan():
    def loss(state, xs):
        inner = lambda row: lax.scan(lambda total, x: (total + observe(x, state), None), 0.0, row)[0]
        return lax.scan(lambda total, row: (total + inner(row), None), 0.0, xs)[0]

    check(loss, STATE, jnp.asarray([[2.0, 1.0], [5.0, 0.0], [3.0, 4.0]]), expected=5.0)


@pytest.mark.parametrize("taken, expected", [(False, NEVER_USED), (True, 2.0)], ids=["not_taken", "taken"])
def test_cond(taken, expected):
    def loss(state, taken):
        return lax.cond(taken, lambda state: observe(TWO, state), lambda state: TWO * 3, state)

    check(loss, STATE, jnp.asarray(taken), expected=expected)


def test_cond_beside_another_use():
    """The branch that is not taken adds nothing to the use beside it, whichever sign that has."""

    def loss(state, taken):
        branch = lax.cond(taken, lambda state: observe(FIVE, state), lambda state: FIVE, state)
        return branch + observe(-TWO, state)

    check(loss, STATE, jnp.asarray(False), expected=-2.0)
    check(loss, STATE, jnp.asarray(True), expected=5.0)


def test_switch_over_experts():
    """Which of several states are reached depends on the data; the others say so."""

    def loss(states, choices):
        def body(total, choice):
            branches = [lambda x, states, i=i: observe(x, states[i]) for i in range(3)]
            return total + lax.switch(choice, branches, 1.0 + choice.astype(jnp.float32), states), None

        return lax.scan(body, 0.0, choices)[0]

    states = [STATE, STATE, STATE]
    gradients = jax.jit(jax.grad(lambda states, choices: loss([to_max_grad(s) for s in states], choices)))(
        states, jnp.asarray([0, 2, 0])
    )
    np.testing.assert_array_equal(jnp.stack(gradients)[:, 0], [1.0, NEVER_USED, 3.0])


def test_vmap_of_an_ensemble():
    """Each member has its own state and takes its own maximum."""

    def loss(states, xs, ys):
        return jax.vmap(lambda state, x, y: observe(x, state) + observe(y, state))(states, xs, ys).sum()

    xs, ys = jnp.asarray([1.0, 5.0, 2.0]), jnp.asarray([4.0, 3.0, -1.0])
    check(loss, jnp.zeros((3, 2)), xs, ys, expected=np.array([[4.0], [5.0], [2.0]]))


def test_vmap_of_gradients():
    gradient = jax.grad(lambda state, x: three_uses(to_max_grad(state)) + observe(x, to_max_grad(state)))
    gradients = jax.jit(jax.vmap(gradient))(jnp.zeros((3, 2)), jnp.asarray([1.0, 7.0, 6.0]))
    # Two casts in this function: each takes its own maximum, and float32 adds them.
    np.testing.assert_array_equal(gradients[:, 0], [5.0 + 1.0, 5.0 + 7.0, 5.0 + 6.0])


@pytest.mark.parametrize(
    "policy", [None, jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.nothing_saveable]
)
def test_checkpoint(policy):
    check(jax.checkpoint(three_uses, policy=policy), STATE, expected=5.0)


def test_checkpointed_scan():
    def loss(state, xs):
        body = jax.checkpoint(lambda total, x: (total + observe(x, state), None))
        return lax.scan(body, 0.0, xs)[0]

    check(loss, STATE, jnp.asarray([2.0, 5.0, 3.0]), expected=5.0)


def test_optimization_barrier():
    check(lambda state: three_uses(lax.optimization_barrier(state)), STATE, expected=5.0)


def test_sharded_state():
    """A history over several devices: the gradient is sharded as the state is."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, P("x"))
    state = jax.device_put(jnp.arange(8.0), sharding)
    gradient = jax.jit(jax.grad(lambda state: three_uses(to_max_grad(state))), out_shardings=sharding)(state)
    assert gradient.sharding == sharding
    np.testing.assert_array_equal(gradient, np.full(8, 5.0))


def test_cotangent_of_state_that_has_the_type_outside():
    """The type may also come from outside of the differentiated function; then the cotangent has it too."""

    def take(state):
        cotangent = jax.vjp(three_uses, to_max_grad(state))[1](TWO)[0]
        assert is_max_grad(cotangent)
        return to_float32(cotangent)

    np.testing.assert_array_equal(jax.jit(take)(STATE), [5.0, 5.0])


def test_indexing_a_stack():
    """What the index leaves out is not reached, whether it is known at run time only or moves with a scan."""

    def loss(states, index, indices):
        def body(total, i):
            return total + observe(-(1.0 + i.astype(jnp.float32)), states[i]), None

        return lax.scan(body, 0.0, indices)[0] + observe(TWO, states[index])

    states, index, indices = jnp.zeros((4, 2)), jnp.asarray(1), jnp.asarray([1, 2, 2])
    expected = np.array([[NEVER_USED], [2.0], [-3.0], [NEVER_USED]])
    check(loss, states, index, indices, expected=expected)


# --- The casts --------------------------------------------------------------------------------------------------------


def test_casts_are_exact_and_idempotent():
    bits = np.random.default_rng(0).integers(0, 2**32, 1000, dtype=np.uint32)

    def there_and_back(x):
        there = to_max_grad(to_max_grad(x))
        assert is_max_grad(there) and not is_max_grad(x) and there.shape == x.shape
        return to_float32(there)

    back = jax.jit(there_and_back)(jnp.asarray(bits.view(np.float32)))
    assert back.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(back).view(np.uint32), bits)
    assert to_float32(jnp.ones(2, jnp.bfloat16)).dtype == jnp.float32


def test_the_type_exists_only_inside_a_compiled_program():
    """JAX has no public array of it. Whatever would make one is an error that says where to put `jit`."""
    gradient = jax.grad(lambda state: three_uses(to_max_grad(state)))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    divided = lambda check_vma: jax.shard_map(
        gradient, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma
    )
    outside = [
        lambda state: state.astype(fp32_max_grad),
        to_max_grad,
        jax.jit(to_max_grad),
        gradient,
        jax.vmap(gradient),
        divided(True),
        divided(False),
        checkify.checkify(gradient),
    ]
    for function in outside:
        with pytest.raises(StateOutsideJit, match="outside of jax.jit.*eqx.filter_jit around the function"):
            function(jnp.asarray([[10.0, 20.0], [1.0, 2.0]]))
    with jax.disable_jit(), pytest.raises(StateOutsideJit):
        jax.jit(gradient)(STATE)


def test_only_float32_can_be_cast():
    """Another width would be rounded on its way: JAX refuses, as the type's rules say."""
    for dtype in (jnp.bfloat16, jnp.float16, jnp.int32):
        with pytest.raises(ValueError, match="float32_max_grad"):
            to_max_grad(jnp.ones(2, dtype))


def test_is_max_grad():
    jax.jit(lambda x: [] if is_max_grad(to_max_grad(x)) else pytest.fail("not recognized"))(STATE)
    assert not any(is_max_grad(x) for x in (STATE, np.zeros(2, np.float32), 1.0, None, "float32_max_grad"))


def test_full():
    """Zero in the sense of addition is the identity of the maximum; other values are taken as they are."""

    def made(value):
        filled = [lax.full((2,), v, fp32_max_grad) for v in (0, 2.0, value, to_max_grad(value))]
        filled += [jnp.zeros_like(filled[1]), lax.full_like(filled[0], to_max_grad(value))]
        assert all(map(is_max_grad, filled))
        return jnp.stack([to_float32(x) for x in filled])

    expected = [NEVER_USED, 2.0, 3.0, 3.0, NEVER_USED, 3.0]
    np.testing.assert_array_equal(jax.jit(made)(THREE), np.broadcast_to(np.reshape(expected, (6, 1)), (6, 2)))


def test_element_type():
    assert repr(fp32_max_grad) == fp32_max_grad.name == "float32_max_grad"
    assert fp32_max_grad.itemsize == 4
    same = max_grad._MaxGradDType(np.dtype(np.float32))
    assert fp32_max_grad == same and hash(fp32_max_grad) == hash(same)
    assert jnp.issubdtype(fp32_max_grad, jax.dtypes.extended)
    assert not jnp.issubdtype(jnp.float32, max_grad.max_grad) and jnp.issubdtype(fp32_max_grad, max_grad.max_grad)


# --- What the file needs of JAX's internals: each part fails on its own when JAX changes ------------------------------


def test_internals_extended_dtypes():
    assert isinstance(fp32_max_grad, dtypes.ExtendedDType)
    assert jax.dtypes.extended is dtypes.extended
    # Every abstract part of the base is there, or the type could not be made; to XLA it is float32.
    text = jax.jit(lambda x: to_float32(to_max_grad(x))).lower(jnp.ones((2, 3))).as_text()
    assert "tensor<2x3xf32>" in text and "convert" not in text


def test_internals_autodiff_asks_the_rules():
    aval = ShapedArray((2,), fp32_max_grad)
    assert aval.to_tangent_aval().dtype == fp32_max_grad
    # `add_any` of two traced arrays lowers to the rule's `max`: read from the program that XLA gets.
    text = jax.jit(jax.grad(lambda state: three_uses(to_max_grad(state)))).lower(STATE).as_text()
    assert "stablehlo.maximum" in text and "stablehlo.add" not in text


def test_internals_sums_over_an_axis_are_refused():
    """So that copies which JAX makes of a state, one for each example, cannot sum what they measured unnoticed."""
    for add in (lambda x: lax.reduce_sum(x, (0,)), lambda x: x + x):
        with pytest.raises(TypeError, match="float32_max_grad"):
            jax.jit(lambda x, add=add: add(to_max_grad(x)))(STATE)


def test_internals_key_reuse():
    """Under this flag, JAX would take state for random keys that are used twice."""
    with jax.debug_key_reuse(True):
        check(three_uses, STATE, expected=5.0)
