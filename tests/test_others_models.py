"""Models that others wrote convert with the one line and train. `docs/models.md` has the list that these tests hold.

Each test is skipped where its package is not installed. The Equinox packages are a dependency group:

    uv run --group others pytest tests/test_others_models.py

Levanter needs JAX below 0.12 and over a gigabyte of dependencies, so it gets an environment of its own:

    uv venv levanter && source levanter/bin/activate
    uv pip install --editable . "marin-levanter>=0.2.227.dev0" beartype hypothesis pytest
    python -m pytest tests/test_others_models.py
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import EPS, float64

from haliax_fp8 import (
    Fp8Config,
    Fp8DotGeneral,
    TrainStep,
    calibrate,
    describe,
    filter_grad,
    fp8_linear_layers,
    fp8_states,
    restore_linear_layers,
)


# The warnings of these packages are theirs. Each test compiles a model several times.
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


# --- What is checked of any model -------------------------------------------------------------------------------------


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


def ops_of(model) -> dict[str, Fp8DotGeneral]:
    """The ops of a model by the path of their layer."""
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_op)
    return {jax.tree_util.keystr(path[:-1], simple=True, separator="."): op for path, op in leaves if is_op(op)}


def is_op(node) -> bool:
    return isinstance(node, Fp8DotGeneral)


def newest_amaxes(op) -> np.ndarray:
    """Of input, kernel and output gradient, `[*stack, operand]`."""
    return np.stack([float64(op.amax_history(name))[..., 0] for name in ("input", "kernel", "output_grad")], axis=-1)


def kernel_amaxes(model) -> dict[str, np.ndarray]:
    """The largest magnitude in each converted layer's weight, over all axes but those of stacks, in float64."""
    is_layer = lambda node: is_op(getattr(node, "dot_general", None))
    found = {}
    for path, layer in jax.tree_util.tree_leaves_with_path(model, is_leaf=is_layer):
        if is_layer(layer):
            weight, stack = float64(layer.weight), layer.dot_general.scale("kernel").shape
            magnitudes = np.abs(weight).reshape(*weight.shape[: len(stack)], -1)
            found[jax.tree_util.keystr(path, simple=True, separator=".")] = magnitudes.max(-1)
    return found


def fp8_error(layers: int) -> float:
    """How far, in norm, the outputs of so many FP8 products one after the other may be from those in float32.

    Rounding to E4M3, with 3 bits of mantissa, moves an element by 2**-4 of itself at most. A product has two rounded
    operands, whose errors add up to under `2**-4` in the root mean square; those of several products are independent.
    """
    return 2.0**-4 * np.sqrt(layers)


class Observer:
    """Records what goes into and comes back to every op of a model, beside the op's own amaxes.

    The maxima leave the compiled function through a callback. A maximum is exact in any dtype.
    """

    def __init__(self):
        self.operands: dict[tuple[str, str], float] = {}

    def attached_to(self, model):
        """The model with every op observed."""
        paths = iter(ops_of(model))
        return jax.tree.map(
            lambda node: ObservedOp(node, self, next(paths)) if is_op(node) else node, model, is_leaf=is_op
        )

    def see(self, path: str, operand: str, x: jax.Array) -> jax.Array:
        """`x`; its amax is recorded where it is computed."""

        def record(amax):
            seen = float(np.max(np.asarray(amax, np.float64), initial=0.0))
            self.operands[path, operand] = max(seen, self.operands.get((path, operand), 0.0))
            return np.asarray(amax)

        amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
        seen = jax.pure_callback(record, jax.ShapeDtypeStruct((), jnp.float32), amax, vmap_method="broadcast_all")
        return x + (0.0 * seen).astype(x.dtype)

    def of(self, path: str) -> np.ndarray:
        """The amaxes of both operands, smaller first (`einsum` may swap them), and of the output gradient."""
        operands = sorted(self.operands[path, name] for name in ("lhs", "rhs"))
        return np.asarray([*operands, self.operands[path, "output_grad"]])


class ObservedOp(eqx.Module):
    op: Fp8DotGeneral
    observer: Observer = eqx.field(static=True)
    path: str = eqx.field(static=True)

    def __call__(self, lhs, rhs, *args, **kwargs):
        see = functools.partial(self.observer.see, self.path)
        out = self.op(
            observed(functools.partial(see, "lhs"), as_it_is, lhs),
            observed(functools.partial(see, "rhs"), as_it_is, rhs),
            *args,
            **kwargs,
        )
        return observed(as_it_is, functools.partial(see, "output_grad"), out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def observed(on_value, on_gradient, x):
    return on_value(x)


observed.defvjp(
    lambda on_value, on_gradient, x: (on_value(x), None), lambda on_value, on_gradient, _, grad: (on_gradient(grad),)
)


def as_it_is(x):
    return x


def assert_amaxes_are_those_observed(model, loss_fn, *batch, only_read=()):
    """The state's gradient holds the maxima that a callback sees; layers that are never called hold nothing."""
    observer = Observer()
    gradients = eqx.filter_jit(filter_grad(lambda model, batch: loss_fn(model, *batch)))
    gradients = gradients(observer.attached_to(model), batch)
    called = {path for path, _ in observer.operands}
    paths = {path.removesuffix(".dot_general"): op for path, op in ops_of(gradients).items()}
    assert called == paths.keys() - set(only_read)
    for path in called:
        amaxes = newest_amaxes(paths[path])
        amaxes = amaxes.reshape(-1, 3).max(0)
        actual = np.asarray([*sorted(amaxes[:2]), amaxes[2]])
        # Not exactly: the compiler may compute an operand twice, fused in two ways.
        np.testing.assert_allclose(actual, observer.of(path), rtol=8 * EPS)


# --- Equinox packages -------------------------------------------------------------------------------------------------


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


def jaxonmodels_vit():
    from jaxonmodels.models.vit import VisionTransformer

    return VisionTransformer(
        input_resolution=16, patch_size=4, width=32, layers=1, heads=4, output_dim=8, key=KEY
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
    "jaxonmodels_vit": Case(
        package="jaxonmodels",
        build=jaxonmodels_vit,
        outputs=lambda model, images, labels: jax.vmap(lambda x: model(x)[0])(images),
        loss=lambda logits, images, labels: cross_entropy(logits, labels),
        batch=(IMAGES, LABELS),
        fp8=3,
        left_alone={"conv1": "convolution"},
        only_read=("transformer.resblocks.0.attn.out_proj",),
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
    model = fp8_linear_layers(case.model())
    step = TrainStep(case.loss_fn, optax.adam(1e-3))
    opt_state, losses = step.init(model), []
    for _ in range(STEPS):
        before = model
        model, opt_state, metrics = step(model, opt_state, *case.batch)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all() and losses[-1] < losses[0]

    kernels = kernel_amaxes(before)
    for path, op in ops_of(model).items():
        path = path.removesuffix(".dot_general")
        if path in case.only_read:
            assert eqx.tree_equal(op, Fp8DotGeneral.init())
            continue
        for operand in ("input", "kernel", "output_grad"):
            history = float64(op.amax_history(operand))
            recorded = [0, *range(1 - STEPS, 0)]
            assert np.isfinite(history).all()
            assert (history[..., recorded] > 0).all() and np.count_nonzero(history[..., 1 : 1 - STEPS]) == 0
        np.testing.assert_array_equal(op.amax_history("kernel")[..., 0], kernels[path])
