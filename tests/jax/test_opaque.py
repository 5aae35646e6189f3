"""Functions that are one equation to JAX."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations
from jax import lax
from jax.experimental import pallas as pl

from haliax_fp8._jax.opaque import opaque, opaque_constant


@opaque
def powers(x, pair, *, power):
    first, second = pair
    return {"sum": first + second, "nothing": None}, x**power


ARGUMENTS = jnp.arange(3.0), (jnp.ones(3), 2 * jnp.ones(3))


def expected(x, pair, power):
    return {"sum": pair[0] + pair[1], "nothing": None}, x**power


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_takes_and_returns_trees(wrap):
    found = wrap(lambda *args: powers(*args, power=3))(*ARGUMENTS)
    jax.tree.map(np.testing.assert_array_equal, found, expected(*ARGUMENTS, 3))


def test_is_one_equation_that_shows_what_is_inside():
    jaxpr = jax.make_jaxpr(lambda *args: powers(*args, power=3))(*ARGUMENTS)
    (equation,) = jaxpr.eqns
    assert equation.primitive.name == "fp8_powers"
    assert [inner.primitive.name for inner in equation.params["jaxpr"].eqns] == ["add", "integer_pow"]


def test_is_mapped():
    first, second = ARGUMENTS[1]
    found = jax.vmap(lambda x, y: powers(x, (first, y), power=2), (0, None))(jnp.eye(3), second)
    stacked = expected(jnp.eye(3), (jnp.ones((3, 3)), 2 * jnp.ones((3, 3))), 2)
    jax.tree.map(np.testing.assert_array_equal, found, stacked)


def test_a_constant_has_no_derivative():
    constant = opaque_constant(squared)
    for wrap in (lambda f: f, jax.jit, lambda f: lambda x: jax.vmap(f)(x[None])[0]):
        found = jax.grad(lambda x: (x * wrap(constant)(x)).sum())(jnp.arange(3.0))  # noqa: B023
        np.testing.assert_array_equal(found, jnp.arange(3.0) ** 2)


@opaque
def as_integers(x):
    return x.astype(int)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.vmap], ids=["itself", "mapped"])
def test_internals_traces_belong_to_their_context(wrap):
    """The same operand, traced again where JAX would: here with other integers by default."""
    x = jnp.ones((2, 3), np.float32)
    dtypes = []
    for x64 in (False, True, False):
        with jax.enable_x64(x64):
            dtypes.append(wrap(as_integers)(x).dtype)
    assert dtypes == [np.int32, np.int64, np.int32]


def squared(x):
    return x * x


@pytest.mark.parametrize("wrap, whole", [(opaque, True), (jax.jit, False)])
def test_stays_whole_in_a_differentiated_scan(wrap, whole):
    """JAX takes what is merely jitted apart, to see what it can move out, and makes a program of its own of it."""
    square = wrap(squared)

    def loss(x):
        return lax.scan(lambda carry, _: (carry + x * square(lax.stop_gradient(x)), None), x, length=3)[0].sum()

    def inside(function):
        jaxpr = jax.make_jaxpr(function)(jnp.arange(3.0))
        calls = [e.params for e in equations(jaxpr) if "squared" in (e.primitive.name[4:], e.params.get("name"))]
        return [params.get("call_jaxpr", params.get("jaxpr")) for params in calls]

    (before,), after = inside(square), inside(jax.grad(loss))
    assert after and all(jaxpr is before for jaxpr in after) == whole
    np.testing.assert_allclose(jax.grad(loss)(jnp.arange(3.0)), 1 + 3 * jnp.arange(3.0) ** 2)


@pytest.mark.more
def test_traces_of_other_shapes_and_models_leave_nothing_behind():
    """Training with many lengths traces often; what JAX forgets, nothing here remembers.

    In a process of its own, which checks no annotations: beartype 0.22 keeps every function that it has checked.
    """
    code = """
        import gc, equinox as eqx, jax, jax.numpy as jnp
        from haliax_fp8 import filter_grad, fp8_linear_layers

        gradient = filter_grad(lambda model, x: (jax.vmap(model)(x) ** 2).mean())

        def objects_after(sizes):
            for size in sizes:
                model = fp8_linear_layers(eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(size)))
                eqx.filter_make_jaxpr(gradient)(model, jnp.zeros((size, 8)))
            jax.clear_caches()
            gc.collect()
            return len(gc.get_objects())

        before = objects_after(range(1, 3))
        print(objects_after(range(3, 11)) - before)
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    # One trace makes thousands of objects.
    assert int(subprocess.run(run, check=True, capture_output=True, text=True).stdout) < 50


@pytest.mark.parametrize("times", [0, 1, 2])
def test_is_not_differentiated(times):
    """Nor is what `vmap` makes of it."""

    def square(x):
        return powers(x, (x, x), power=2)[1]

    for _ in range(times):
        square = jax.vmap(square)
    with pytest.raises(ValueError, match="restore_linear_layers"):
        jax.grad(lambda x: square(x).sum())(jnp.ones((2,) * times))


@opaque
def doubled_by_pallas(x):
    def body(x_ref, out_ref):
        out_ref[...] = 2.0 * x_ref[...]

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
def test_internals_a_pallas_kernel_may_be_inside(wrap):
    """JAX traces Pallas kernels with references, which no equation of another primitive may hold."""
    x = jnp.arange(8.0).reshape(2, 4)
    np.testing.assert_array_equal(wrap(doubled_by_pallas)(x), 2.0 * x)
