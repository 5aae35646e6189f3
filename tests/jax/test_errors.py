"""JAX still says what `_jax/errors.py` looks for, and its traceback of an error in a loss shows the user's frames."""

import dataclasses
import inspect
import pathlib
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import haliax_fp8 as fp8
from haliax_fp8._jax import errors
from haliax_fp8._jax.max_grad import to_max_grad
from haliax_fp8.preflight.compile import UNUSED_DONATION, donated_inside


RULES = {name: f for name, f in vars(errors).items() if inspect.isfunction(f) and name.startswith("is_about")}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    """A node of a tree."""

    x: object


def raised_by(function, *args):
    with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError)) as caught:
        function(*args)
    return caught.value


def said_of(error):
    """The names of the functions that recognize an error."""
    named = lambda f: f(error, holding=Node) if f is errors.is_about_structure else f(error)
    return {name for name, f in RULES.items() if named(f)}


def raised_by_state(function):
    """The error that a function of state raises."""
    return raised_by(jax.jit(lambda x: function(to_max_grad(x))), jnp.ones((3, 2)))


def test_casts_and_sums_of_state():
    assert said_of(raised_by_state(lambda x: x.astype(jnp.bfloat16))) == {"is_about_cast"}
    assert said_of(raised_by_state(lambda x: lax.reduce_sum(x, (0,)))) == {"is_about_sum"}
    assert said_of(raised_by_state(lambda x: x + x)) == set()


def test_functions_of_state_that_are_transposed():
    """As by `lax.custom_root`."""
    error = raised_by_state(lambda x: jax.linear_transpose(lambda x: x.astype(jnp.float32), x))
    assert said_of(error) == {"is_about_linear_transpose"}


@pytest.mark.parametrize(
    "trees", [(Node(1.0), [1.0]), ([1.0], Node(1.0)), ((1.0, 2.0), [1.0]), ((1.0, None), (1.0, Node(1.0)))]
)
def test_trees_that_do_not_fit(trees):
    assert said_of(raised_by(lambda: jax.tree.map(lambda x, y: x, *trees))) == {"is_about_structure"}


def test_arrays_that_were_deleted():
    x = jnp.ones(3)
    x.delete()
    assert said_of(raised_by(lambda: x + 1)) == said_of(raised_by(jax.jit(jnp.sin), x)) == {"is_about_deleted_array"}


def test_mesh_axes_that_are_mapped():
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))):
        divided = jax.vmap(lambda x: lax.with_sharding_constraint(x, P("data")), spmd_axis_name="data")
        assert said_of(raised_by(jax.jit(divided), jnp.ones((2, 4)))) == {"is_about_mapped_mesh_axis"}


def test_other_errors():
    with jax.numpy_dtype_promotion("strict"):
        promotion = raised_by(lambda: jnp.ones(3) + jnp.ones(3, jnp.bfloat16))
    shapes = raised_by(lambda: jnp.ones(3) @ jnp.ones(4))
    assert said_of(promotion) == said_of(shapes) == said_of(ValueError("three rows")) == set()


def test_donations_without_use_are_a_warning():
    with pytest.warns(UserWarning) as caught:
        jax.jit(lambda x: x.sum(), donate_argnums=0)(jnp.ones(4))
    assert [str(warning.message).startswith(UNUSED_DONATION) for warning in caught] == [True]


def test_donations_inside():
    add = jax.jit(lambda x, y: (x + 1, y + 1), donate_argnums=1)
    traced = jax.jit(lambda x, y: jnp.sin(add(x["a"], y)[0]) + x["b"]).trace(
        {"a": jnp.ones(3), "b": jnp.ones(3)}, jnp.ones(3)
    )
    assert donated_inside(traced) == [False, False, True]


def users_loss(model, x):
    return users_mistake(model, x)


def users_mistake(model, x):
    return jax.vmap(model)(x) @ jnp.ones((3, 3))


@pytest.mark.parametrize(
    "how", ["step", "calibrate", "microbatches", "filter_grad", "filter_value_and_grad", "statistics"]
)
def test_an_error_in_the_users_loss_shows_the_users_frames(how):
    model = fp8.fp8_linear_layers(eqx.nn.Linear(8, 8, key=jax.random.key(0)))
    x = jnp.ones((4, 8))
    step = fp8.TrainStep(users_loss, optax.sgd(0.1), microbatches=2 if how == "microbatches" else 1)
    call = {
        "statistics": lambda: fp8.quantization_statistics(model, users_loss, x),
        "calibrate": lambda: step.calibrate(model, x),
        "filter_grad": lambda: fp8.filter_grad(users_loss)(model, x),
        "filter_value_and_grad": lambda: eqx.filter_jit(fp8.filter_value_and_grad(users_loss))(model, x),
    }.get(how, lambda: step(model, step.init(model), x))
    with pytest.raises(TypeError, match="contracting") as caught:
        call()
    frames = traceback.extract_tb(caught.value.__traceback__)
    package = str(pathlib.Path(fp8.__file__).parent)
    assert not [frame for frame in frames if frame.filename.startswith(package)]
    assert [frame.name for frame in frames if frame.filename == __file__][-2:] == ["users_loss", "users_mistake"]
