"""JAX still says what `_jax/messages.py` looks for: each function is asked about errors that JAX raises here."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from haliax_fp8._jax import messages
from haliax_fp8._jax.donated import donated_inside
from haliax_fp8._jax.max_grad import to_max_grad


RULES = {name: f for name, f in vars(messages).items() if inspect.isfunction(f) and not name.startswith("_")}
FORMS = {
    "fp32_max_grad": to_max_grad,
}


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
    named = lambda f: f(error, holding=Node) if f is messages.is_about_structure else f(error)
    return {name for name, f in RULES.items() if named(f)}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("form", FORMS)
def test_casts_and_additions_of_state(form, wrap):
    x = FORMS[form](jnp.ones((3, 2)))
    assert said_of(raised_by(wrap(lambda x: x.astype(jnp.bfloat16)), x)) == {"rejects_max_grad", "is_about_cast"}
    assert said_of(raised_by(wrap(lambda x: x + x), x)) == {"rejects_max_grad"}


def test_sums_of_state():
    x = to_max_grad(jnp.ones((3, 2)))
    for wrap in (lambda f: f, jax.jit):
        error = raised_by(wrap(lambda x: lax.reduce_sum(x, (0,))), x)
        assert said_of(error) == {"rejects_max_grad", "is_about_sum"}
    assert said_of(raised_by(lambda x: x.sum(axis=0), x)) == {"rejects_max_grad", "is_about_sum"}


def test_functions_of_state_that_are_transposed():
    """As by `lax.custom_root`."""
    error = raised_by(jax.linear_transpose, lambda x: x.astype(jnp.float32), to_max_grad(jnp.ones(3)))
    assert said_of(error) == {"rejects_max_grad", "is_about_linear_transpose"}


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
    key = raised_by(jax.jit(lambda key: key.astype(jnp.float32)), jax.random.key(0))
    shapes = raised_by(lambda: jnp.ones(3) @ jnp.ones(4))
    assert said_of(promotion) == said_of(shapes) == said_of(ValueError("three rows")) == set()
    assert "rejects_max_grad" not in said_of(key)


def test_donations_without_use_are_a_warning():
    with pytest.warns(UserWarning) as caught:
        jax.jit(lambda x: x.sum(), donate_argnums=0)(jnp.ones(4))
    assert [str(warning.message).startswith(messages.UNUSED_DONATION) for warning in caught] == [True]


def test_donations_inside():
    add = jax.jit(lambda x, y: (x + 1, y + 1), donate_argnums=1)
    traced = jax.jit(lambda x, y: jnp.sin(add(x["a"], y)[0]) + x["b"]).trace(
        {"a": jnp.ones(3), "b": jnp.ones(3)}, jnp.ones(3)
    )
    assert donated_inside(traced) == [False, False, True]
