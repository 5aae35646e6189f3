"""The demo's models: attention, positions, stacks of blocks, experts."""

import dataclasses
from functools import partial

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import haliax_fp8 as fp8
from haliax_fp8._cli.demo import Mlp, fused_causal_attention, layer_norm, next_token_loss
from haliax_fp8.models import (
    MixtureOfExperts,
    Transformer,
    TransformerConfig,
    causal_attention,
    rotary_tables,
    rotate,
)


CONFIG = TransformerConfig(
    layers=2, hidden=16, heads=4, kv_heads=2, head_dim=8, mlp=24, vocab=32, max_length=12, unroll=1
)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return eqx.filter_jit(Transformer.init)(CONFIG, key=jax.random.key(0))


@pytest.fixture(scope="module")
def tokens() -> hax.NamedArray:
    return hax.random.randint(jax.random.key(1), {"batch": 2, "position": 12}, 0, 32)


@pytest.mark.more
def test_no_position_sees_a_later_one(model, tokens):
    changed = tokens.array.at[:, 7].add(1) % 32
    logits = eqx.filter_jit(lambda model, tokens: model(tokens).array)
    before, after = logits(model, tokens), logits(model, hax.named(changed, tokens.axes))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.all(np.any(before[:, 7:] != after[:, 7:], axis=-1))


def test_rope_depends_on_distance_only():
    Position, HeadDim = hax.Axis("position", 9), hax.Axis("head_dim", 8)
    cos, sin = rotary_tables(Position, HeadDim, 100.0)
    query, key = (hax.random.normal(jax.random.key(i), HeadDim).broadcast_axis(Position) for i in (2, 3))
    turned = [rotate(x, cos, sin).array for x in (query, key)]
    scores = np.asarray(turned[0] @ turned[1].T)
    for distance in range(-8, 9):
        diagonal = np.diagonal(scores, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-5, atol=1e-5)
    assert np.ptp(scores) > 0.1


@pytest.mark.more
def test_grouped_query_attention_is_attention_with_repeated_keys(model):
    grouped = model.blocks.get_layer(1).attention
    Position = hax.Axis("position", 5)
    x = hax.random.normal(jax.random.key(5), (Position, CONFIG.Hidden))
    cos, sin = rotary_tables(Position, CONFIG.HeadDim, CONFIG.rope_theta)

    def projected(layer):
        return layer(x).rearrange((..., Position, CONFIG.HeadDim)).array.reshape(-1, 5, 8)

    def turned(heads):
        return jnp.stack([rotate(hax.named(h, (Position, CONFIG.HeadDim)), cos, sin).array for h in heads])

    query, key = turned(projected(grouped.query)), turned(projected(grouped.key))
    value = projected(grouped.value)
    key, value = (jnp.repeat(x, CONFIG.heads // CONFIG.kv_heads, axis=0) for x in (key, value))
    scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), query @ key.mT / jnp.sqrt(8.0), -jnp.inf)
    mixed = (jax.nn.softmax(scores) @ value).reshape(CONFIG.kv_heads, -1, 5, 8)
    axes = (CONFIG.KvHeads, CONFIG.Group, Position, CONFIG.HeadDim)
    expected = grouped.output(hax.named(mixed, axes)).rearrange((Position, CONFIG.Hidden))
    got = grouped(x, cos, sin).rearrange((Position, CONFIG.Hidden))
    np.testing.assert_allclose(got.array, expected.array, rtol=1e-5, atol=1e-6)


def loss(model, tokens):
    return hax.mean(hax.square(model(tokens) - 1.0)).scalar()


@pytest.mark.more
@pytest.mark.parametrize("change", [{"checkpointing": True}, {"unroll": 2}])
def test_checkpointing_and_unrolling_change_no_gradient(change, model, tokens):
    other = dataclasses.replace(CONFIG, **change)
    # The same weights in a model whose blocks are folded differently.
    blocks = hax.nn.Stacked(
        model.blocks.stacked, model.blocks.Block, hax.nn.ScanCheckpointPolicy.from_bool_or_str(other.checkpointing)
    )
    changed = dataclasses.replace(model, blocks=blocks, config=other)
    expected, got = (eqx.filter_jit(eqx.filter_grad(loss))(m, tokens) for m in (model, changed))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.more
def test_blocks_one_by_one_are_the_stacked_blocks(model, tokens):
    one_by_one = Transformer.init(dataclasses.replace(CONFIG, stacked=False), key=jax.random.key(0)).blocks
    blocks = dataclasses.replace(one_by_one, blocks=[model.blocks.get_layer(i) for i in range(CONFIG.layers)])
    other = dataclasses.replace(model, blocks=blocks)
    expected, got = (eqx.filter_jit(lambda model: model(tokens).array)(m) for m in (model, other))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.more
def test_functions_between_products_are_changed(tokens):
    """All of them, in each block: two norms, attention and activation."""
    seen = []

    def noted(function):
        seen.append(function)
        return function

    config = dataclasses.replace(CONFIG, between=noted, stacked=False)
    Transformer.init(config, key=jax.random.key(0))(tokens)
    # Attention knows its window and scale.
    kinds = [type(one).__name__ if isinstance(one, eqx.Module) else getattr(one, "func", one) for one in seen]
    assert kinds == ["RmsNorm", config.attention, "RmsNorm", config.activation] * config.layers


@pytest.mark.more
def test_learned_positions_and_a_tied_head():
    config = dataclasses.replace(
        CONFIG,
        rope_theta=None,
        tied_head=True,
        norm=layer_norm,
        feed_forward=Mlp.init,
        biases=("query", "key", "value", "output", "up", "down"),
    )
    model = Transformer.init(config, key=jax.random.key(0))
    assert model.head is None and model.positions.axes == (hax.Axis("position", 12), config.Hidden)
    assert all(layer.bias is not None for layer in (model.blocks.stacked.mlp.up, model.blocks.stacked.attention.query))
    # The same token everywhere: only positions differ.
    logits = model(hax.zeros({"position": 5}, dtype=jnp.int32))
    assert logits.axes == (hax.Axis("position", 5), config.Vocab)
    assert len({row.tobytes() for row in np.asarray(logits.array)}) == 5


@pytest.mark.more
def test_a_token_goes_through_the_experts_that_its_router_likes_best():
    init = partial(MixtureOfExperts.init, experts=4, chosen=2)
    layer = init(CONFIG, key=jax.random.key(0))
    x = hax.random.normal(jax.random.key(1), {"batch": 3, "position": 5, "hidden": 16})
    got = layer(x).rearrange(("batch", "position", "hidden")).array

    def expert(e, row):
        multiply = lambda linear, x, axis: hax.dot(x, linear.weight["experts", e], axis=axis)
        inner = hnn.silu(multiply(layer.gate, row, "hidden")) * multiply(layer.up, row, "hidden")
        return multiply(layer.down, inner, "mlp").array

    for row, out in zip(x.array.reshape(-1, 16), got.reshape(-1, 16), strict=True):
        row = hax.named(row, CONFIG.Hidden)
        likes = layer.router(row).array
        best = np.argsort(likes)[-2:]
        shares = jax.nn.softmax(likes[best])
        expected = shares[0] * expert(int(best[0]), row) + shares[1] * expert(int(best[1]), row)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6)


def test_sequence_beyond_the_table_is_refused(model):
    with pytest.raises(ValueError, match="tokens has 13 positions, more than max_length=12"):
        model(hax.zeros({"position": 13}, dtype=jnp.int32))


@pytest.mark.parametrize(
    "sizes, message",
    [({"heads": 4, "kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"), ({"head_dim": 7}, "head_dim=7 is odd")],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**sizes)


# --- The loss ---------------------------------------------------------------------------------------------------------


def mean_cross_entropy(model, tokens):
    """By the definition, of all tokens at once."""
    log_shares = jax.nn.log_softmax(model(tokens).rearrange(("batch", "position", "vocab")).array, axis=-1)
    target_log_shares = jnp.take_along_axis(log_shares[:, :-1], tokens.array[:, 1:, None], axis=-1)
    return -target_log_shares.mean()


@pytest.mark.more
@pytest.mark.parametrize("tied_head", [False, True])
def test_the_loss_of_parts_is_that_of_all_tokens(tokens, tied_head):
    model = Transformer.init(dataclasses.replace(CONFIG, tied_head=tied_head), key=jax.random.key(0))
    expected, gradient = eqx.filter_jit(eqx.filter_value_and_grad(mean_cross_entropy))(model, tokens)
    for at_once in (8,) if tied_head else (8, 1):
        loss = eqx.filter_value_and_grad(partial(next_token_loss, at_once=at_once))
        loss_in_parts, of_model = eqx.filter_jit(loss)(model, tokens)
        # Sums of 22 numbers in float32, in another order.
        np.testing.assert_allclose(loss_in_parts, expected, rtol=1e-6)
        for a, b in zip(jax.tree.leaves(of_model), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_logits_in_float32_are_never_whole(model, tokens):
    """The largest float32 array with the vocabulary as an axis is that of two tokens of each sequence."""
    loss = eqx.filter_value_and_grad(partial(next_token_loss, at_once=4))
    text = eqx.filter_jit(loss).lower(model, tokens).as_text()
    assert "2x2x32xf32" in text and "2x12x32xf32" not in text
    whole = eqx.filter_jit(eqx.filter_value_and_grad(next_token_loss)).lower(model, tokens).as_text()
    assert "2x12x32xf32" in whole


@pytest.mark.more
def test_an_fp8_head_records_the_maximum_over_parts(tokens):
    model = fp8.fp8_linear_layers(Transformer.init(CONFIG, key=jax.random.key(0)), targets=["head"])
    whole, parts = (
        eqx.filter_jit(fp8.filter_grad(partial(next_token_loss, at_once=at_once)))(model, tokens).head.dot_general
        for at_once in (None, 4)
    )
    for operand in ("input", "kernel", "output_grad"):
        a, b = whole.amax_history(operand)[0], parts.amax_history(operand)[0]
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.more
def test_fused_attention_is_given_what_causal_attention_is():
    """With JAX's own attention instead of cuDNN's, which no CPU has."""
    Position, KvHeads, Group, HeadDim = hax.make_axes(position=6, kv_heads=2, group=3, head_dim=8)
    Batch = hax.Axis("batch", 2)
    query = hax.random.normal(jax.random.key(0), (Batch, KvHeads, Position, Group, HeadDim))
    key, value = (hax.random.normal(jax.random.key(i), (Batch, Position, KvHeads, HeadDim)) for i in (1, 2))
    rotary = rotary_tables(Position, HeadDim, 100.0)
    attend = partial(fused_causal_attention, attention=jax.nn.dot_product_attention)
    fused = attend(query, key, value, *rotary).rearrange(query.axes)
    expected = causal_attention(query, key, value, *rotary).rearrange(query.axes)
    np.testing.assert_allclose(fused.array, expected.array, atol=1e-5)
