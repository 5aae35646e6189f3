"""`compare`, against the same distances taken by hand in NumPy, and under every transformation."""

import functools
import warnings

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from residual_stack import Embed, residual_stack

import haliax_fp8 as fp8
from haliax_fp8.statistics import compare


X = jax.random.normal(jax.random.key(1), (8, 16))


def loss(model, x):
    return jnp.mean((jax.vmap(model)(x) - jnp.sin(x)) ** 2)


def converted(model, recipe="current"):
    return fp8.fp8_linear_layers(model, fp8.Fp8Config(recipe=recipe))


def expected(a, b):
    """Relative error, one minus the cosine, and the largest difference, in float64."""
    a, b = (np.asarray(x, np.float64).ravel() for x in (a, b))
    norm = np.linalg.norm
    return norm(b - a) / norm(a), 1 - a @ b / norm(a) / norm(b), np.abs(b - a).max() / np.abs(a).max()


def check(distance, a, b):
    distances = distance.relative_error, distance.cosine_distance, distance.largest
    # Sums of float32 numbers in another order.
    np.testing.assert_allclose([float(x) for x in distances], expected(a, b), rtol=2e-3, atol=1e-7)


def by_hand(model, x, probes):
    """The input and the product of each layer; `probes` are added to products, so their gradients are theirs."""
    products, h = [], x
    for layer, probe in zip(model.layers, probes, strict=True):
        product = jax.vmap(layer)(h) - layer.bias[None] + probe
        products.append((h, product))
        h = product + layer.bias[None]
        h = jax.nn.relu(h) if layer is not model.layers[-1] else h
    return jnp.mean((h - jnp.sin(x)) ** 2), products


@pytest.mark.more
def test_of_every_layer_alone_and_accumulated():
    plain = eqx.nn.MLP(16, 16, 32, 1, key=jax.random.key(0))
    model = converted(plain)
    comparison = compare(plain, model, loss, X)
    probes = [jnp.zeros((8, layer.out_features)) for layer in plain.layers]
    grads, of_layers = [], []
    for m in (plain, model):
        (_, products), of_probes = jax.value_and_grad(lambda p, m=m: by_hand(m, X, p), has_aux=True)(probes)
        of_layers.append(products)
        grads.append(of_probes)
    of_weights = [fp8.filter_grad(loss)(m, X).layers for m in (plain, model)]
    product = lambda dot, x, w: dot(x, w, (((1,), (1,)), ((), ())))
    for i in range(2):
        layer = comparison[f"layers.{i}"]
        (x, of_plain), (_, of_model) = of_layers[0][i], of_layers[1][i]
        check(layer.output, of_plain, of_model)
        check(layer.output_grad, grads[0][i], grads[1][i])
        check(layer.kernel_grad, of_weights[0][i].weight, of_weights[1][i].weight)
        # Alone: the op gets what the plain model has.
        op, w = model.layers[i].dot_general, plain.layers[i].weight
        (a, of_a), (b, of_b) = (jax.vjp(functools.partial(product, dot), x, w) for dot in (jax.lax.dot_general, op))
        check(layer.fprop, a, b)
        for name, x_grad, y_grad in zip(("dgrad", "wgrad"), of_a(grads[0][i]), of_b(grads[0][i]), strict=True):
            check(getattr(layer, name), x_grad, y_grad)
    check(comparison.result, loss(plain, X), loss(model, X))
    fprop = comparison["layers.0"].fprop
    np.testing.assert_allclose(fprop.sqnr, -20 * np.log10(fprop.relative_error))
    text = str(comparison)
    assert max(map(len, text.splitlines())) <= 80 and "kernel's" in text
    assert text.count("layers") == 2, "once in each table"
    errors = [float(layer.wgrad.relative_error) for _, layer in comparison.each()]
    assert comparison.worst(1).paths[0] == f"layers.{int(np.argmax(errors))}" or max(errors) < 0.05


@pytest.mark.more
def test_in_a_stack_under_checkpointing_and_jit():
    """A stack's layers are those of the unrolled model, forward and backward."""
    stack = residual_stack()
    blocks = stack.unstacked()
    x = hax.random.normal(jax.random.key(2), (hax.Axis("batch", 4), Embed))
    in_scan = eqx.filter_jit(lambda a, b: compare(a, b, lambda m, x: hax.mean(m.fold(x) ** 2), x))(
        stack, converted(stack)
    )

    def unrolled(blocks, x):
        for block in blocks:
            x = block(x)
        return x

    one_by_one = compare(blocks, converted(blocks), lambda m, x: hax.mean(unrolled(m, x) ** 2), x)
    for (name, layer), (_, same) in zip(in_scan.each(), one_by_one.each(), strict=True):
        assert name.startswith("stacked.up[")
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), layer, same)
    assert set(in_scan.flat()) >= {"fp8_error/stacked.up[1]/wgrad", "fp8_error/stacked.up[0]/output"}


@pytest.mark.more
def test_uses_ensembles_experts_and_layers_that_are_not_reached():
    """Of two uses the worst; members of an ensemble apart; grouped products; a layer that is not called."""
    Experts, Rows, E, Out = hax.make_axes(experts=2, rows=8, embed=16, out=16)

    class Model(eqx.Module):
        twice: eqx.nn.Linear
        members: eqx.nn.Linear
        experts: hnn.MoELinear
        unused: eqx.nn.Linear
        plain: eqx.nn.Linear

    keys = jax.random.split(jax.random.key(0), 4)
    linear = lambda key: eqx.nn.Linear(16, 16, use_bias=False, key=key)
    members = eqx.filter_vmap(linear)(jax.random.split(keys[0], 2))
    experts = hnn.MoELinear.init(Experts, E, Out, key=keys[1], use_bias=False)
    model = Model(linear(keys[2]), members, experts, linear(keys[3]), linear(keys[3]))
    config = fp8.Fp8Config(recipe="current", targets="(twice|members|experts|unused)")
    of_fp8 = fp8.fp8_linear_layers(model, config)
    big = jnp.where(jnp.arange(16) == 3, 300.0, 1.0)[None]

    def result(model, x):
        first = jax.vmap(model.twice)(x)
        second = jax.vmap(model.twice)(x * big)
        of_members = eqx.filter_vmap(lambda member: jax.vmap(member)(x))(model.members)
        sizes = hax.named(jnp.array([3, 5]), Experts)
        of_experts = model.experts(hax.named(x, (Rows, E)), sizes)
        return (
            jnp.sum(first**2)
            + jnp.sum(second**2)
            + jnp.sum(of_members**2)
            + hax.sum(of_experts**2).array
            + jnp.sum(jax.vmap(model.plain)(x))
        )

    comparison = compare(model, of_fp8, result, X)
    errors = []
    for x in (X, X * big):
        a, b = (jax.vmap(m.twice)(x) for m in (model, of_fp8))
        errors.append(expected(a, b)[0])
    np.testing.assert_allclose(float(comparison["twice"].fprop.relative_error), max(errors), rtol=1e-3)
    of_members = lambda m: eqx.filter_vmap(lambda member: jax.vmap(member)(X))(m.members)
    for i, (a, b) in enumerate(zip(of_members(model), of_members(of_fp8), strict=True)):
        np.testing.assert_allclose(comparison["members"].output.relative_error[i], expected(a, b)[0], rtol=1e-3)
    sizes = jnp.array([3, 5])
    a = jax.lax.ragged_dot(X, model.experts.weight.array, sizes)
    b = of_fp8.experts.dot_general.ragged_dot(X, of_fp8.experts.weight.array, sizes)
    np.testing.assert_allclose(comparison["experts"].fprop.relative_error, expected(a, b)[0], rtol=1e-3)
    assert np.isnan(comparison["unused"].output.relative_error) and "reached" in str(comparison)
    assert comparison["plain"].fprop.relative_error == comparison["plain"].output.relative_error == 0.0


@pytest.mark.more
def test_nothing_is_said_of_a_gradient_that_state_is_constant():
    plain = eqx.nn.MLP(16, 16, 32, 1, key=jax.random.key(0))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the gradient of an FP8 layer's weight was taken")
        compare(plain, converted(plain, "delayed"), loss, X)


def test_a_result_that_is_no_loss_has_no_gradients():
    plain = eqx.nn.Linear(16, 16, use_bias=False, key=jax.random.key(0))
    comparison = compare(plain, converted(plain), lambda layer, x: jax.vmap(layer)(x), X)
    check(comparison[""].output, jax.vmap(plain)(X), jax.vmap(converted(plain))(X))
    assert list(comparison.flat()) == ["fp8_error/model/fprop", "fp8_error/model/output"]
    assert "Gradients" not in str(comparison) and comparison.result.largest == comparison[""].output.largest


def test_errors_name_what_differs():
    plain = eqx.nn.MLP(16, 16, 32, 1, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"layers\[0\].weight: bfloat16\[32, 16\] and float32"):
        compare(fp8.cast_params(plain, jnp.bfloat16), converted(plain), loss, X)
    with pytest.raises(ValueError, match="contains no layer that can be converted"):
        compare(eqx.nn.LayerNorm(4), eqx.nn.LayerNorm(4), loss, X)
    with pytest.raises(ValueError, match="converted has no FP8 layer.* they are swapped"):
        compare(converted(plain), plain, loss, X)
    with pytest.raises(ValueError, match="converted has no FP8 layer.* convert it"):
        compare(plain, plain, loss, X)
    with pytest.raises(ValueError, match="without floating-point arrays"):
        compare(plain, converted(plain), lambda model, x: 3, X)


@pytest.mark.more
@pytest.mark.parametrize("mapped", [False, True])
def test_the_kernel_may_be_the_first_operand(mapped):
    """`einsum` may swap the operands: distances are those of input and kernel."""
    Rows, In, Out = hax.make_axes(rows=8, features=48, out=32)
    plain = hnn.Linear.init(In, Out, key=jax.random.key(0), use_bias=False)
    model, x = converted(plain), hax.random.normal(jax.random.key(2), (Rows, In))

    def loss(order, model, x):
        def product(x):
            return hax.dot(*order((x, model.weight)), axis=In, dot_general=model.dot_general)

        out = hax.vmap(product, Rows)(x) if mapped else product(x)
        return jnp.mean(jnp.sin(out.rearrange((Rows, Out)).array))

    first, second = (functools.partial(loss, order) for order in (reversed, tuple))
    distances = [compare(plain, model, loss, x)[""] for loss in (first, second)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6), *distances)
