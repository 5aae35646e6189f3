r"""Levanter's models and its trainer run with our modules, without changes to either.

Skipped where Levanter is not installed. It needs JAX below 0.12 and over a gigabyte of other packages, so it gets an
environment of its own:

    uv run --isolated --no-project --with-editable . --with "marin-levanter>=0.2.227.dev0" \
        --with beartype --with hypothesis --with pytest --with pytest-xdist \
        pytest -m slow tests/peers/test_others_levanter.py
"""

import dataclasses
import pathlib
import re

import equinox as eqx
import haliax as hax
import haliax.state_dict as state_dicts
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
    is_state,
    kernel_amaxes,
    newest_amaxes,
    ops_of,
)

from haliax_fp8 import (
    Fp8Config,
    TrainStep,
    describe,
    fp8_linear_layers,
    restore_linear_layers,
)
from haliax_fp8.huggingface import check_folder, export_model, import_model, load
from haliax_fp8.models import Transformer, TransformerConfig


# The warnings are Levanter's. Each test compiles a model, some of them twice.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

STEPS = 4
KEY = jax.random.key(0)
Vocab, Batch = hax.Axis("vocab", 32), hax.Axis("batch", 8)
# Levanter's losses take the head's weight and multiply it themselves, in high precision.
HEAD = "lm_head"
DENSE_LLAMA = 7  # layers of a block: q, k, v, o, gate, up, down


@pytest.fixture(autouse=True)
def what_users_start_with():
    """Levanter promotes dtypes and ranks as JAX does by default."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def language_model(name="llama", **options):
    """A small model of Levanter, and sequences for it."""
    pytest.importorskip("levanter")
    from levanter.models import llama, mixtral  # noqa: F401 (they register themselves)
    from levanter.models.lm_model import LmConfig

    config = LmConfig.get_choice_class(name)(
        max_seq_len=16, hidden_dim=32, intermediate_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, **options
    )
    return config.build(Vocab, key=KEY), hax.random.randint(KEY, (Batch, config.max_Pos), 0, Vocab.size)


def examples(tokens):
    """Sequences as Levanter's losses take them."""
    from levanter.models.lm_model import LmExample

    return hax.vmap(LmExample.causal, tokens.resolve_axis("batch"))(tokens)


def loss_fn(model, example, key=None):
    return hax.mean(model.compute_next_token_loss(example, key=key)).scalar()


def trainer_for(folder, policy="f32", microbatches=1):
    """Levanter's trainer on all devices, parameters sharded, as its defaults have it."""
    from levanter.trainer import Trainer

    return Trainer(trainer_config(folder, policy, microbatches), optax.adam(1e-2), loss_fn, add_default_hooks=False)


def trainer_config(folder, policy="f32", microbatches=1):
    """For few steps, without a tracker."""
    import jmp
    from levanter.checkpoint import CheckpointerConfig
    from levanter.tracker import NoopConfig
    from levanter.trainer import TrainerConfig

    return TrainerConfig(
        id="test",
        tracker=NoopConfig(),
        mp=jmp.get_policy(policy),
        train_batch_size=Batch.size,
        per_device_parallelism=Batch.size // microbatches // jax.device_count(),
        num_train_steps=STEPS,
        require_accelerator=False,
        load_checkpoint=False,
        log_dir=pathlib.Path(folder),
        checkpointer=CheckpointerConfig(base_path=str(folder)),
        log_jaxprs=False,
        log_xla_hlo=False,
    )


@pytest.mark.parametrize(
    ("policy", "microbatches"), [("f32", 1), ("f32", 2), ("p=f32,c=bf16", 1)], ids=["f32", "microbatches", "bf16"]
)
def test_trainer_trains_a_llama(policy, microbatches, tmp_path):
    model, tokens = language_model()
    model = fp8_linear_layers(model)
    assert describe(model).fp8_count == DENSE_LLAMA + 1
    with trainer_for(tmp_path, policy, microbatches) as trainer:
        state, kernels = train(trainer, model, tokens)
        assert_histories_hold(state.model, STEPS, kernels, only_read=[HEAD])
        # State is kept in float32, whatever the policy computes in, and the optimizer saw parameters only.
        states = [node for node in jax.tree.leaves(state.model, is_leaf=is_state) if is_state(node)]
        assert {leaf.dtype for leaf in jax.tree.leaves(states)} == {jnp.dtype(jnp.float32)}
        moments = optax.tree.get(state.opt_state, "mu")
        assert not any(is_state(node) for node in jax.tree.leaves(moments, is_leaf=is_state))

        # Levanter writes the zero gradient of the head, which its loss never calls, over the head's state. The head
        # is usable all the same.
        example = examples(tokens)
        logits = eqx.filter_jit(lambda model: model(example.tokens, example.attn_mask))
        expected, actual = (float64(logits(m)) for m in (restore_linear_layers(state.model), state.model))
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert fp8_error(1) / 100 < error < fp8_error(2 * DENSE_LLAMA + 1)


def test_a_mixture_of_experts_trains(one_device):
    # By `TrainStep`: in Levanter's trainer this model fails with or without FP8, by a callback inside its gradient.
    model, tokens = language_model("mixtral", n_routed_experts=4, num_experts_per_tok=2)
    model, example = fp8_linear_layers(model, Fp8Config(exclude=HEAD)), examples(tokens)
    assert describe(model)["transformer.layers.stacked.block_sparse_moe.experts.w1"].is_fp8
    step = TrainStep(loss_fn, optax.adam(1e-2))
    opt_state, losses = step.init(model), []
    for _ in range(STEPS):
        kernels = kernel_amaxes(model)
        model, opt_state, metrics = step(model, opt_state, example)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert_histories_hold(model, STEPS, kernels)


def train(trainer, model, tokens):
    """The trainer's state after some steps, and the amaxes of the kernels before the last."""
    state, losses, example = trainer.initial_state(jax.random.key(1), model=model), [], examples(tokens)
    for _ in range(STEPS):
        kernels = kernel_amaxes(trainer.mp.cast_to_compute(state.model))
        info = trainer.train_step(state, example)
        state = info.state
        losses.append(info.loss)
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    return state, kernels


@pytest.fixture
def one_device():
    """A mesh on which Levanter's functions run outside its trainer."""
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    mapping = {"batch": "data"}
    with hax.partitioning.set_mesh(mesh), hax.axis_mapping(mapping):
        yield mapping


def test_amaxes_are_those_of_its_operands(one_device):
    model, tokens = language_model()
    assert_amaxes_are_those_observed(fp8_linear_layers(model), loss_fn, examples(tokens), only_read=[HEAD])


def test_microbatches_take_the_maximum(one_device):
    model, tokens = language_model()
    from levanter.grad_accum import microbatched

    model, size = fp8_linear_layers(model, Fp8Config(exclude=HEAD)), Batch.size // 4
    gradients = eqx.filter_value_and_grad(lambda model, example: (loss_fn(model, example), {}), has_aux=True)
    accumulating = microbatched(
        lambda example: gradients(model, example), Batch, size, accum_axis_mapping={}, compute_axis_mapping=one_device
    )
    together = ops_of(eqx.filter_jit(accumulating)(examples(tokens))[1])
    parts = [examples(tokens.slice("batch", start=i, length=size)) for i in range(0, Batch.size, size)]
    alone = [ops_of(eqx.filter_jit(gradients)(model, part)[1]) for part in parts]
    for path, op in together.items():
        each = np.stack([newest_amaxes(ops[path]) for ops in alone])
        largest = each.max(0)
        # Inputs and gradients differ among the parts: neither the last part nor a mean would pass.
        assert (largest[..., [0, 2]] > 1.01 * each.mean(0)[..., [0, 2]]).all()
        # Not exactly: in a loop the compiler fuses otherwise, and an element may round to the next FP8 number.
        np.testing.assert_allclose(newest_amaxes(op), largest, rtol=1e-3)
    assert any((newest_amaxes(op) > 1.01 * newest_amaxes(alone[-1][path])).any() for path, op in together.items())


def test_checkpoints_hold_the_state(one_device, tmp_path):
    model, _ = language_model()
    from levanter.checkpoint import load_checkpoint, save_checkpoint

    model = fp8_linear_layers(model)
    # State that is not what a new model has.
    model = jax.tree.map(lambda x: x + 1.0 if eqx.is_inexact_array(x) else x, model)
    save_checkpoint({"model": model}, 1, str(tmp_path / "checkpoint"), is_temporary=False)
    loaded = load_checkpoint({"model": eqx.filter_eval_shape(lambda: model)}, str(tmp_path / "checkpoint"))["model"]
    assert eqx.tree_equal(loaded, model)


def test_exports_are_those_of_the_plain_model():
    model, _ = language_model()
    plain, converted = (state_dicts.to_torch_compatible_state_dict(m) for m in (model, fp8_linear_layers(model)))
    assert plain.keys() == converted.keys()
    assert all(np.array_equal(plain[key], converted[key]) for key in plain)


def test_layer_whose_output_axes_are_on_no_mesh_axis(one_device):
    # Needs Haliax only. It passes a sharding that asks for nothing then, as for the routers of mixtures of experts.
    In, Out, Token = hax.make_axes(input=8, output=4, token=2)
    layer = fp8_linear_layers(hax.nn.Linear.init(In, Out, key=KEY))
    assert eqx.filter_jit(layer)(hax.ones((Token, In))).axes == (Token, Out)


# --- Folders ----------------------------------------------------------------------------------------------------------

# Of Hugging Face's Llama, with the sizes of `language_model`.
SIZES = TransformerConfig(
    layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, mlp=64, vocab=32, max_length=16, unroll=1
)


def published(folder, layout, **sizes):
    """A folder, and Levanter's model for it: its configuration, and the model without weights."""
    transformers = pytest.importorskip("transformers")
    LlamaConfig = pytest.importorskip("levanter.models.llama").LlamaConfig

    model = Transformer.init(dataclasses.replace(SIZES, **sizes), key=jax.random.key(7))
    export_model(model, folder, layout)
    config = LlamaConfig.from_hf_config(transformers.AutoConfig.from_pretrained(folder))
    return config, eqx.filter_eval_shape(lambda: config.build(Vocab, key=KEY))


def logits_of(model, tokens):
    """Of Levanter's Llama, or of ours."""
    from levanter.layers.attention import AttentionMask

    masks = () if isinstance(model, Transformer) else (AttentionMask.causal(),)
    return float64(eqx.filter_jit(lambda model, tokens: model(tokens, *masks))(model, tokens))


@pytest.mark.parametrize(
    ("layout", "weights"),
    [("BF16", "dequantized"), ("HF_FP8", "dequantized")]
    + [("FP8_DYNAMIC", weights) for weights in ("dequantized", "frozen", "served")],
)
def test_a_folder_becomes_its_llama_by_its_own_names(layout, weights, one_device, tmp_path):
    _, abstract = published(tmp_path / "folder", layout)
    tokens = hax.random.randint(KEY, (Batch, hax.Axis("position", 16)), 0, Vocab.size)
    expected = logits_of(load(tmp_path / "folder", weights=weights, dtype="float32"), tokens)
    actual = logits_of(import_model(tmp_path / "folder", abstract, weights=weights), tokens)
    # In float32; both add up in other orders.
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("layout", ["BF16", "FP8_DYNAMIC", "FP8"])
def test_an_imported_llama_trains_and_is_exported(layout, tmp_path):
    config, abstract = published(tmp_path / "folder", "FP8_DYNAMIC")
    model = import_model(tmp_path / "folder", abstract)
    _, tokens = language_model()
    with trainer_for(tmp_path / "runs") as trainer:
        state, _ = train(trainer, fp8_linear_layers(model, exclude=HEAD), tokens)
        trained = state.model
        described = config.to_hf_config(Vocab.size).to_dict()
        report = export_model(trained, tmp_path / "trained", layout, hf_config=described)
        assert check_folder(tmp_path / "trained").is_sound
        if layout != "BF16":
            assert report.origins == {"state of training": 2 * DENSE_LLAMA}
        expected = logits_of(restore_linear_layers(trained), tokens)
    actual = logits_of(load(tmp_path / "trained", dtype="float32"), tokens)
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    # Exports round to bfloat16, and kernels then to FP8.
    assert error < (2.0**-7 if layout == "BF16" else fp8_error(2 * DENSE_LLAMA))
    assert error > 0.0


def test_the_page_runs(tmp_path, monkeypatch):
    page = pathlib.Path(__file__).parents[2] / "docs" / "migration" / "levanter.md"
    program = "".join(re.findall(r"```py\n(.*?)```", page.read_text(), re.DOTALL))
    published(tmp_path / "llama", "HF_FP8")
    monkeypatch.chdir(tmp_path)
    _, tokens = language_model()
    given = {"trainer_config": trainer_config(tmp_path / "runs"), "examples": STEPS * [examples(tokens)]}
    exec(compile(program, str(page), "exec"), given)
    assert given["report"].origins == {"state of training": 2 * DENSE_LLAMA}
    assert check_folder(tmp_path / "trained").is_sound
    assert load(tmp_path / "trained").config.hidden == SIZES.hidden


@pytest.mark.parametrize(
    ("key", "value", "tensor"),
    [("head_dim", 16, "q_proj"), ("biases", ("query", "key", "value", "output"), r"proj\.bias")],
)
def test_what_its_configuration_leaves_out_is_an_error(key, value, tensor, tmp_path):
    _, empty = published(tmp_path / "folder", "BF16", **{key: value})
    with pytest.raises(ValueError, match=tensor):
        import_model(tmp_path / "folder", empty)
