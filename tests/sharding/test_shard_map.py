"""Inside `shard_map`, products have the scales that the whole tensors have; and it can be inside a gradient."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import haliax_fp8 as fp8
from haliax_fp8.recipes import CurrentScaling, NVFP4Scaling, Recipe
from haliax_fp8.training import with_max_gradients


NUMBERS = (((1,), (0,)), ((), ()))


def loss(model, x):
    op, w = model
    return (op(x, w, NUMBERS) ** 2).sum()


def problem(recipe):
    """A model, rows of very different sizes, and a mesh over them."""
    x = jax.random.normal(jax.random.key(0), (8, 64)) * jnp.arange(1.0, 9.0)[:, None]
    w = jax.random.normal(jax.random.key(1), (64, 32))
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Auto,))
    return (fp8.Fp8DotGeneral.init(recipe), w), x, mesh


def kernel_gradients(recipe, *, check_vma):
    """Inside `shard_map`, and without."""
    model, x, mesh = problem(recipe)

    def inside(model, x):
        gradient = fp8.filter_grad(loss)(model, x)[1]
        return gradient if check_vma else lax.psum(gradient, "rows")

    specs = dict(mesh=mesh, in_specs=(P(), P("rows")), out_specs=P(), check_vma=check_vma)
    divided = eqx.filter_jit(jax.shard_map(inside, **specs))(model, x)
    return divided, eqx.filter_jit(fp8.filter_grad(loss))(model, x)[1]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("recipe", ["current", "mxfp8", "deepseek"])
def test_scales_are_those_of_the_whole_tensor(recipe, check_vma):
    divided, whole = kernel_gradients(recipe, check_vma=check_vma)
    assert np.linalg.norm(divided - whole) <= 1e-6 * np.linalg.norm(whole)


def test_scales_of_each_device():
    """Another scale for each part: the FP8 numbers differ, by a rounding error of E4M3 and E5M2."""
    divided, whole = kernel_gradients(Recipe.of(CurrentScaling(per_device=True)), check_vma=True)
    assert 1e-4 < np.linalg.norm(divided - whole) / np.linalg.norm(whole) < 2.0**-3


@pytest.mark.parametrize("per_device", [True, False])
@pytest.mark.parametrize("scaling", [CurrentScaling, NVFP4Scaling])
def test_per_device_needs_no_communication(scaling, per_device):
    model, x, mesh = problem(Recipe.of(scaling(per_device=per_device)))
    out = jax.shard_map(lambda x: model[0](x, model[1], NUMBERS), mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    assert ("all_reduce" in jax.jit(out).lower(x).as_text()) != per_device


def maxima_over_devices(function, *args):
    """How many there are in a program."""
    found = jax.jit(function).lower(*args).as_text().split('"stablehlo.all_reduce"')[1:]
    return sum("stablehlo.maximum" in text.split("stablehlo.return")[0] for text in found)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("gradient", [fp8.filter_grad, eqx.filter_grad], ids=["ours", "equinox's"])
def test_one_maximum_over_devices_serves_all_operands(gradient, check_vma):
    """Of a kernel that all devices have, too."""
    model, x, mesh = problem("delayed")
    inside = lambda model, x: gradient(loss)(model, x)[0]
    take = jax.shard_map(inside, mesh=mesh, in_specs=(P(), P("rows")), out_specs=P(), check_vma=check_vma)
    assert maxima_over_devices(take, model, x) == 1


def with_astype(model):
    return jax.tree.map(lambda x: x.astype(fp8.fp32_max_grad), model[0]), model[1]


@pytest.mark.parametrize(
    "cast, taken",
    [
        (with_astype, "inside"),
        (with_astype, "outside"),
        (with_astype, "outside, cast inside"),
        (with_max_gradients, "inside"),
        (with_max_gradients, "outside"),
    ],
)
def test_casts_by_the_caller(cast, taken):
    """`astype` casts to a type that does not say where it was made, so it is refused wherever it was."""
    model, x, mesh = problem("delayed")
    specs = dict(mesh=mesh, out_specs=P(), check_vma=False)
    each = lambda model, x: loss(cast(model) if taken == "outside, cast inside" else model, x)
    around = jax.shard_map(lambda model, x: lax.psum(each(model, x), "rows"), in_specs=(P(), P("rows")), **specs)
    outside = jax.grad(lambda model: around(cast(model) if taken == "outside" else model, x))
    inside = lambda model, x: jax.grad(lambda model: loss(cast(model), x))(model)[0]
    take = jax.jit(jax.shard_map(inside, in_specs=(P(), P("rows")), **specs) if taken == "inside" else outside)
    args = (model, x) if taken == "inside" else (model,)
    if cast is with_astype or taken != "inside":
        remedy = "Take the gradient inside shard_map, or use check_vma=True.*cast it with .*with_max_gradients"
        with pytest.raises(ValueError, match=remedy):
            take(*args)
        return
    op = take(*args)
    whole, _ = eqx.filter_jit(fp8.filter_grad(loss))(model, x)
    np.testing.assert_array_max_ulp(np.asarray(op.state.array), np.asarray(whole.state.array), 2)


@pytest.mark.parametrize("specs", ["prefix", "leaves"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_around_it(check_vma, specs):
    """Specs may have the structure of the model as it is outside."""
    model, x, mesh = problem("delayed")
    of_model = P() if specs == "prefix" else jax.tree.map(lambda _: P(), model)
    total = jax.shard_map(
        lambda model, x: lax.psum(loss(model, x), "rows"),
        mesh=mesh,
        in_specs=(of_model, P("rows")),
        out_specs=P(),
        check_vma=check_vma,
    )
    take = eqx.filter_jit(fp8.filter_grad(total))
    if not check_vma:
        with pytest.raises(ValueError, match="Take the gradient inside shard_map, or use check_vma=True"):
            take(model, x)
        return
    (op, _), (whole, _) = take(model, x), eqx.filter_jit(fp8.filter_grad(loss))(model, x)
    np.testing.assert_array_equal(op.amax_history("input")[0], jnp.max(jnp.abs(x)))
    np.testing.assert_array_max_ulp(np.asarray(op.state.array), np.asarray(whole.state.array), 2)
