"""Products that XLA's compiler for GPUs writes in its own ways: gradients of convolutions, and products of a vector."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest
from compiled_models import abstract, struct

import haliax_fp8 as fp8
from haliax_fp8._cli.demo import next_token_loss
from haliax_fp8.models import Transformer, TransformerConfig
from haliax_fp8.preflight import compilable_devices, inspect_step


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compilable_devices["h100"].missing() is not None, reason="needs the package jax-cuda13-pjrt"),
]


@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_convolutions_multiply_as_often(stride):
    """cuDNN's calls describe the convolution whose gradient they compute."""
    layer = eqx.filter_eval_shape(
        lambda: eqx.nn.Conv2d(32, 64, 3, stride, use_bias=False, dtype=jnp.bfloat16, key=jax.random.key(0))
    )
    x, outputs = struct(8, 32, 35, 35), {1: 33, 2: 17}[stride]

    def gradient(layer, x):
        total = lambda arguments: (jax.vmap(arguments[0])(arguments[1]).astype(jnp.float32) ** 2).sum()
        return eqx.filter_grad(total)((layer, x))

    products = inspect_step(gradient, layer, x, device="h100").products
    implementations = {product.implementation for product in products}
    assert {"__cudnn$convBackwardFilter", "__cudnn$convBackwardInput"} <= implementations
    # Each output position reads a window that lies within the input.
    assert [product.flops for product in products] == 3 * [2 * 8 * outputs**2 * 64 * 32 * 3**2]


def test_products_with_one_row_or_column_are_named():
    """XLA makes them multiplications and sums of elements, which no share of products counts."""
    linear = lambda outputs: eqx.nn.Linear(256, outputs, key=jax.random.key(0))
    layers = {"body": linear(256), "head": linear(1)}
    model = abstract(lambda: fp8.fp8_linear_layers(layers))

    def loss(model, x):
        of_row = lambda row: model["head"](jax.nn.gelu(model["body"](row)))
        return (jax.vmap(of_row)(x).astype(jnp.float32) ** 2).mean()

    report = inspect_step(lambda m, x: fp8.filter_grad(loss)(m, x), model, struct(512, 256), device="h100")
    assert report.fp8_share == 1.0 and {product.layer for product in report.products} == {"m.body"}
    assert report.step.elementwise == ("m.head",)
    assert any("element by element" in finding and finding.endswith("m.head") for finding in report.findings)
    of_row = inspect_step(lambda m, x: m["body"](x), model, struct(256), device="h100")
    assert of_row.products == () and of_row.step.elementwise == ("m.body",)
    with pytest.raises(AssertionError, match="no matrix products\n  m.body is computed element by"):
        of_row.require(fp8_flops=0.5)


def test_a_language_model_has_no_such_layer():
    """Its loss multiplies logits and targets, and its positions frequencies: nothing that a layer does."""
    config = TransformerConfig(layers=2, hidden=128)
    model = abstract(lambda: fp8.fp8_linear_layers(Transformer.init(config, key=jax.random.key(0))))
    tokens = hax.NamedArray(jax.ShapeDtypeStruct((4, 64), jnp.int32), ("batch", "position"))
    step = lambda model, tokens: fp8.filter_grad(next_token_loss)(model, tokens)
    assert inspect_step(step, model, tokens, device="h100").step.elementwise == ()


def test_the_gradient_of_a_batched_weight_is_no_product_of_activations():
    def gradient(weight, x):
        per_head = lambda weight, x: jnp.einsum("nhd,hde->nhe", x, weight)
        return jax.grad(lambda weight, x: (per_head(weight, x).astype(jnp.float32) ** 2).sum())(weight, x)

    weight = {"u": struct(4, 64, 32)}
    products = inspect_step(lambda m, x: gradient(m["u"], x), weight, struct(512, 4, 64), device="h100").products
    assert [product.reason for product in products] == ["not converted"] * 2
