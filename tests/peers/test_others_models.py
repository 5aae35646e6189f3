"""Equinox models that others wrote convert with the one line and train; `docs/models.md` lists them.

Each test is skipped where its package is not installed. To install them all:

    uv run --group others pytest tests/peers/test_others_models.py
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import float64
from model_checks import (
    assert_amaxes_are_those_observed,
    assert_histories_hold,
    fp8_error,
    kernel_amaxes,
    ops_of,
)

from haliax_fp8 import TrainStep, calibrate, describe, fp8_linear_layers, restore_linear_layers


# The warnings of these packages are theirs. Each test compiles a model, some of them twice.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

STEPS = 4
KEY = jax.random.key(0)
TOKENS = jax.random.randint(KEY, (4, 16), 4, 24)
IMAGES = jax.random.normal(KEY, (4, 3, 16, 16))
LABELS = jnp.arange(4)


@pytest.fixture(autouse=True)
def what_users_start_with():
    """These packages promote dtypes and ranks as JAX does by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of another package.

    Args:
        package: What to install.
        build: The model.
        outputs: `outputs(model, *batch)`.
        loss: `loss(outputs, *batch)`.
        batch: What the model is trained on.
        fp8: How many layers the one line converts.
        left_alone: Layers that it leaves alone, with a part of the reason.
        only_read: Converted layers whose weight the package reads, without calling the layer.
    """

    package: str
    build: Callable[[], Any]
    outputs: Callable[..., Any]
    loss: Callable[..., Any]
    batch: tuple[Any, ...]
    fp8: int
    left_alone: dict[str, str] = dataclasses.field(default_factory=dict)
    only_read: tuple[str, ...] = ()

    def loss_fn(self, model, *batch):
        return self.loss(self.outputs(model, *batch), *batch)

    def model(self):
        pytest.importorskip(self.package)
        return self.build()


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def esm2():
    import esm2quinox

    return esm2quinox.ESM2(num_layers=2, embed_size=32, num_heads=4, token_dropout=True, key=KEY)


def zoo_llama(architecture="LlamaForCausalLM", **options):
    import eqx_zoo

    config = {
        "architectures": [architecture],
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    }
    return eqx_zoo.CausalLM(eqx_zoo.Config.from_hf({**config, **options}), key=KEY)


def zoo_moe():
    return zoo_llama(
        "Qwen3MoeForCausalLM",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def equimo_vit():
    from equimo.vision.models.vit import VisionTransformer

    return VisionTransformer(
        img_size=16, in_channels=3, dim=32, patch_size=4, num_heads=[4], depths=[1], num_classes=8, key=KEY
    )


def pdequinox_mlp():
    import pdequinox

    return pdequinox.arch.MLP(1, 3, 3, num_points=16, width_size=32, depth=2, key=KEY)


CASES = {
    "esm2quinox": Case(
        package="esm2quinox",
        build=esm2,
        outputs=lambda model, tokens: jax.vmap(model)(tokens).logits,
        loss=cross_entropy,
        batch=(TOKENS,),
        fp8=8,
    ),
    "eqx_zoo_llama": Case(
        package="eqx_zoo",
        build=zoo_llama,
        outputs=lambda model, tokens: jax.vmap(lambda t: model(t)[0])(tokens),
        loss=lambda logits, tokens: cross_entropy(logits[:, :-1], tokens[:, 1:]),
        batch=(TOKENS,),
        fp8=8,
    ),
    "eqx_zoo_moe": Case(
        package="eqx_zoo",
        build=zoo_moe,
        # `lax.ragged_dot`, which this model calls, has no rule for `vmap` over the weights' gradient.
        outputs=lambda model, tokens: model(tokens[0])[0],
        loss=lambda logits, tokens: cross_entropy(logits[:-1], tokens[0, 1:]),
        batch=(TOKENS,),
        fp8=9,
        only_read=tuple(f"model.layers.0.mlp.experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    ),
    "equimo_vit": Case(
        package="equimo",
        build=equimo_vit,
        outputs=lambda model, images, labels: jax.vmap(lambda x: model(x, inference=True))(images),
        loss=lambda logits, images, labels: cross_entropy(logits, labels),
        batch=(IMAGES, LABELS),
        fp8=5,
        left_alone={"patch_embed.proj": "convolution"},
    ),
    "pdequinox_mlp": Case(
        package="pdequinox",
        build=pdequinox_mlp,
        outputs=lambda model, fields: jax.vmap(model)(fields),
        loss=lambda outputs, fields: jnp.mean((outputs - fields) ** 2),
        batch=(IMAGES[..., 0],),
        fp8=3,
    ),
}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@each_case
def test_converts(case):
    plain = case.model()
    model = fp8_linear_layers(plain)
    rows = describe(model)
    assert rows.fp8_count == case.fp8
    left_alone = {row.path: row.reason for row in rows if not row.is_fp8}
    assert left_alone.keys() == case.left_alone.keys()
    assert all(part in left_alone[path] for path, part in case.left_alone.items())
    # No weight is touched, and the way back leads to the same tree.
    assert eqx.tree_equal(restore_linear_layers(model), plain)


@each_case
def test_amaxes_are_those_of_its_operands(case):
    model = fp8_linear_layers(case.model())
    assert_amaxes_are_those_observed(model, case.loss_fn, *case.batch, only_read=case.only_read)


@each_case
def test_outputs_are_those_of_the_plain_model_within_rounding(case):
    plain = case.model()
    model = calibrate(fp8_linear_layers(plain), case.loss_fn, [case.batch])
    outputs = eqx.filter_jit(case.outputs)
    expected, actual = (float64(outputs(m, *case.batch)) for m in (plain, model))
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    # Not less than a hundredth of one rounding either: products in float32 differ by 1e-6.
    assert fp8_error(1) / 100 < error < fp8_error(case.fp8)


@each_case
def test_trains(case):
    model = initial = fp8_linear_layers(case.model())
    step = TrainStep(case.loss_fn, optax.adam(1e-3))
    opt_state, losses = step.init(model), []
    for _ in range(STEPS):
        kernels = kernel_amaxes(model)
        model, opt_state, metrics = step(model, opt_state, *case.batch)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert_histories_hold(model, STEPS, kernels, only_read=case.only_read)
    for path in case.only_read:
        assert eqx.tree_equal(ops_of(model)[path], ops_of(initial)[path])
