"""On a mesh with explicit axes, products have the types and the numbers that they have elsewhere."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import haliax_fp8 as fp8


NUMBERS = (((1,), (0,)), ((), ()))

# Of other recipes than delayed scaling, one layout.
OTHER_RECIPES = [(recipe, "fsdp") for recipe in ("current", "rowwise", "deepseek", "mxfp8", "nvfp4")]
# The specs of x, of both kernels, and of both outputs.
LAYOUTS = {
    "data": (P("data"), P(), P(), P("data"), P("data")),
    "fsdp": (P("data"), P("data"), P("data"), P("data"), P("data")),
    "columns": (P(), P(None, "model"), P("model"), P(None, "model"), P()),
    "rows": (P(None, "model"), P("model"), P("model"), P(None, "model"), P(None, "model")),
    "fsdp and columns": (P("data"), P("data", "model"), P("model", "data"), P("data", "model"), P("data")),
}


def mesh_of(*kinds):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds)


def explicit(spec, kinds):
    """What of a spec names explicit axes, as `out_sharding` has to; None where there are none."""
    named = dict(zip(("data", "model"), kinds, strict=True))
    spec = P(*(axis if named.get(axis) == AxisType.Explicit else None for axis in spec))
    return spec if AxisType.Explicit in kinds else None


def step(recipe, layout, *kinds):
    """Loss and gradients, the new state among them, of two layers."""
    mesh, key = mesh_of(*kinds), jax.random.key(0)
    outs = [explicit(spec, kinds) for spec in LAYOUTS[layout][3:]]

    def loss(model, x):
        (op, w), (other, v) = fp8.with_rounding_keys(model, key) if recipe == "nvfp4" else model
        h = jax.nn.relu(op(x, w, NUMBERS, out_sharding=outs[0]))
        return jnp.mean(other(h, v, NUMBERS, out_sharding=outs[1]) ** 2)

    arrays = [jax.random.normal(k, (n, 64)) / 8 for k, n in zip(jax.random.split(key, 3), (8, 64, 64), strict=True)]
    with jax.set_mesh(mesh):
        x, w, v = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, LAYOUTS[layout][:3], strict=True))
        model = [(fp8.Fp8DotGeneral.init(recipe), w), (fp8.Fp8DotGeneral.init(recipe), v)]
        value, gradients = eqx.filter_jit(fp8.filter_value_and_grad(loss))(model, x)
    for (_, kernel), (_, gradient) in zip(model, gradients, strict=True):
        assert jax.typeof(gradient) == jax.typeof(kernel)
    return float(value), gradients


@pytest.mark.parametrize("recipe, layout", [*OTHER_RECIPES, *(("delayed", layout) for layout in LAYOUTS)])
def test_numbers_are_those_of_automatic_axes(recipe, layout):
    check_step(recipe, layout, AxisType.Explicit, AxisType.Explicit)


@pytest.mark.more
@pytest.mark.parametrize("recipe, layout", [("delayed", "fsdp"), ("delayed", "columns"), *OTHER_RECIPES])
def test_numbers_are_those_of_automatic_axes_on_a_mesh_with_both_kinds(recipe, layout):
    check_step(recipe, layout, AxisType.Explicit, AxisType.Auto)


def check_step(recipe, layout, *kinds):
    loss, gradients = step(recipe, layout, *kinds)
    expected_loss, expected = step(recipe, layout, AxisType.Auto, AxisType.Auto)
    assert np.isfinite(loss)
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    for (op, w), (expected_op, expected_w) in zip(gradients, expected, strict=True):
        w, expected_w = np.asarray(w), np.asarray(expected_w)
        assert np.linalg.norm(w - expected_w) <= (3e-2 if recipe == "nvfp4" else 5e-3) * np.linalg.norm(expected_w)
        if op.state is not None:
            assert not any(jax.typeof(op.state.array).sharding.spec)
            np.testing.assert_array_max_ulp(np.asarray(op.state.array), np.asarray(expected_op.state.array), 2)


@pytest.mark.more
@pytest.mark.parametrize("kinds", [("Explicit", "Explicit"), ("Explicit", "Auto")])
def test_equinox_layer_under_vmap(kinds):
    """Its output and gradients have the types that the plain layer's have."""
    mesh = mesh_of(*(AxisType[kind] for kind in kinds))
    with jax.set_mesh(mesh):
        layer = eqx.nn.Linear(32, 64, key=jax.random.key(0))
        weight = jax.device_put(layer.weight, NamedSharding(mesh, P("model")))
        layer = eqx.tree_at(lambda layer: layer.weight, layer, weight)
        x = jax.device_put(jax.random.normal(jax.random.key(1), (8, 32)), NamedSharding(mesh, P("data")))
        run = lambda layer, x: (jnp.mean((out := jax.vmap(layer)(x)) ** 2), out)
        take = eqx.filter_jit(fp8.filter_value_and_grad(run, has_aux=True))
        (_, plain_out), plain = take(layer, x)
        (_, out), gradients = take(fp8.fp8_linear_layers(layer), x)
    assert jax.typeof(out) == jax.typeof(plain_out) and jax.typeof(gradients.weight) == jax.typeof(plain.weight)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 2) or "Auto" in kinds


@pytest.mark.more
@pytest.mark.parametrize("transform", [eqx.filter_jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("of_x", [P(), P("data")], ids=["replicated", "divided"])
def test_a_product_is_the_one_of_a_single_device(transform, of_x):
    """Inside `jit` and outside, and with either form of `out_sharding`; of integers, whose sums are exact."""

    def loss(operands, g, out_sharding):
        op, x, w = operands
        out = op(x, w, NUMBERS, out_sharding=out_sharding)
        return jnp.sum(out * g), out

    take, op = transform(fp8.filter_value_and_grad(loss, has_aux=True)), fp8.Fp8DotGeneral.init()
    shapes = (8, 16), (16, 24), (8, 24)
    x, w, g = (jax.random.randint(jax.random.key(i), s, -4, 5).astype(jnp.float32) for i, s in enumerate(shapes))
    expected = take((op, x, w), g, None)
    mesh = mesh_of(AxisType.Explicit, AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, w, g = (jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((x, of_x), (w, P()), (g, P("data"))))
        for out_sharding in (P("data"), NamedSharding(mesh, P("data"))):
            got = take((op, x, w), g, out_sharding)
            jax.tree.map(np.testing.assert_array_equal, got, expected)
            (_, out), (_, dx, _) = got
            assert jax.typeof(out) == jax.typeof(g) and jax.typeof(dx) == jax.typeof(x)


def test_ambiguous_contraction_is_jax_error():
    mesh = mesh_of(AxisType.Explicit, AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, w = (jax.device_put(jnp.ones((32, 32)), NamedSharding(mesh, s)) for s in (P(None, "model"), P("model")))
        for dot in (lax.dot_general, fp8.Fp8DotGeneral.init()):
            with pytest.raises(Exception, match="ambiguous how the output should be sharded"):
                dot(x, w, NUMBERS)
        with pytest.raises(Exception, match="ambiguous how the output should be sharded"):
            fp8.Fp8DotGeneral.init().ragged_dot(x, jnp.stack([w, w]), jnp.array([16, 16]))


GROUPED = {
    "rows": (P("data"), P(), P("data")),
    "rows and outputs": (P("data"), P(None, None, "model"), P("data", "model")),
    "rows and experts": (P("data"), P("data"), P("data")),
    "inputs": (P("data", "model"), P(None, "model"), P("data")),
}


@pytest.mark.more
@pytest.mark.parametrize("kinds", [("Explicit", "Explicit"), ("Explicit", "Auto")])
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.parametrize("layout", GROUPED)
def test_grouped_products(layout, recipe, kinds):
    """Numbers and state of automatic axes, types of the operands; the state is everywhere.

    The outputs are three blocks, which two devices cannot divide.
    """
    sizes = jnp.array([3, 0, 9, 2], jnp.int32)
    x, w = jax.random.normal(jax.random.key(0), (16, 64)), jax.random.normal(jax.random.key(1), (4, 64, 96))

    def gradients(*kinds):
        *specs, out = GROUPED[layout]
        out = explicit(out, kinds)
        loss = lambda op, x, w: jnp.mean(op.ragged_dot(x, w, sizes, out_sharding=out) ** 2)
        mesh = mesh_of(*kinds)
        with jax.set_mesh(mesh):
            operands = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, w), specs, strict=True)]
            take = eqx.filter_jit(fp8.filter_grad(lambda args: loss(*args)))
            got = take((fp8.Fp8DotGeneral.init(recipe), *operands))
        return operands, got

    operands, (op, *got) = gradients(*(AxisType[kind] for kind in kinds))
    _, (expected_op, *expected) = gradients(AxisType.Auto, AxisType.Auto)
    for operand, gradient, reference in zip(operands, got, expected, strict=True):
        assert jax.typeof(gradient) == jax.typeof(operand)
        np.testing.assert_allclose(gradient, reference, rtol=1e-5, atol=1e-6)
    if op.state is not None:
        np.testing.assert_array_equal(op.state.array, expected_op.state.array)


def test_devices_keep_their_parts_of_an_ensembles_kernels():
    """A plain gradient compares the kernels of members, bit by bit, to tell them from replicas of one layer."""
    make = lambda key: eqx.nn.Linear(64, 32, use_bias=False, key=key)
    layers = fp8.fp8_linear_layers(eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 3)))
    x = jax.random.normal(jax.random.key(1), (3, 16, 64))
    loss = lambda layers, x: (eqx.filter_vmap(lambda layer, x: jax.vmap(layer)(x))(layers, x) ** 2).mean()
    plain = eqx.filter_grad(loss)(layers, x)
    mesh = mesh_of(AxisType.Auto, AxisType.Auto)
    put = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
    divided = eqx.tree_at(lambda l: l.weight, layers, put(layers.weight, None, "data", "model"))
    compiled = eqx.filter_jit(eqx.filter_grad(loss)).lower(divided, put(x)).compile()
    op = compiled(divided, put(x)).dot_general
    np.testing.assert_array_equal(op.amax_history("kernel"), plain.dot_general.amax_history("kernel"))
    text = compiled.compiled.as_text()
    assert "all-reduce(" in text and "all-gather(" not in text
