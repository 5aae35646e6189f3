"""The gate: steps that are not finite are refused, before the model is replaced and before a file is written."""

import functools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import haliax_fp8 as fp8
from haliax_fp8.checkpoints import load_into, save
from haliax_fp8.statistics import where_not_finite
from haliax_fp8.training import NonFiniteStep, require_finite_step


@pytest.mark.more
def test_a_poisoned_batch_is_refused_and_the_old_model_goes_on(tmp_path):
    model = fp8.fp8_linear_layers(eqx.nn.MLP(16, 4, 16, 1, key=jax.random.key(0)), fp8.Fp8Config(recipe="current"))
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    step = fp8.TrainStep(loss, optax.sgd(0.1, momentum=0.9))
    opt_state, x = step.init(model), jax.random.normal(jax.random.key(1), (8, 16))
    file, batches = tmp_path / "model.safetensors", [x, x.at[2, 3].set(jnp.nan), x]
    refused = []
    for i, batch in enumerate(batches):
        new_model, new_state, metrics = step(model, opt_state, batch)
        try:
            require_finite_step(metrics, step=i, where=functools.partial(where_not_finite, model, loss, batch))
        except NonFiniteStep as error:
            refused.append((error.step, str(error)))
            with pytest.raises(ValueError, match=r"layers.0.weight has \d+ elements that are"):
                save(file, (new_model, new_state))
            save(tmp_path / "poisoned.safetensors", new_model, allow_nonfinite=True)
            continue
        model, opt_state = new_model, new_state
        save(file, (model, opt_state))
    assert [i for i, _ in refused] == [1]
    assert (
        "step 1 is not finite: " in refused[0][1]
        and "loss is nan" in refused[0][1]
        and "skip this batch" in refused[0][1]
    )
    assert "The first in layers.0: input, which fprop reads; 1 element is infinite or NaN" in refused[0][1]
    (loaded, _), _ = load_into((model, opt_state), file)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(eqx.filter(loaded, eqx.is_inexact_array)))
    poisoned, _ = load_into(model, tmp_path / "poisoned.safetensors")
    assert bool(jnp.isnan(poisoned.layers[0].weight).any())


def test_what_is_read_and_what_is_not():
    require_finite_step({"loss": jnp.float32(3.0), "grad_norm": 2.0})
    with pytest.raises(NonFiniteStep, match="the step is not finite: grad_norm is inf"):
        require_finite_step({"loss": jnp.float32(3.0), "grad_norm": jnp.float32(jnp.inf)})
    # Of an operand that nothing reads, and of one that loses nothing.
    measured = {"fp8/layers.0/input/amax": np.float32(np.nan), "fp8/layers.0/input/sqnr": np.float32(np.inf)}
    require_finite_step({"loss": 3.0, "grad_norm": 2.0, "aux": {"name": "text"}, **measured})
    with pytest.raises(NonFiniteStep, match="loss is nan"):
        require_finite_step({"loss": jnp.float32(jnp.nan), **measured})
    with pytest.raises(ValueError, match="metrics is empty"):
        require_finite_step({})
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda loss: require_finite_step({"loss": loss}))(1.0)


def test_what_a_file_may_hold(tmp_path):
    """An infinite number without axes, as the best loss so far; state; any format. But no infinite moment."""
    layer = fp8.fp8_linear_layers(eqx.nn.Linear(16, 16, key=jax.random.key(0)))
    state = layer.dot_general.state
    spiked = eqx.tree_at(lambda layer: layer.dot_general.state.table.array, layer, state.array.at[0, 1].set(-jnp.inf))
    fine = (spiked, {"best": jnp.float32(jnp.inf)}, jnp.ones(3, jnp.float8_e4m3fn), np.arange(3), 1.5)
    save(tmp_path / "fine.safetensors", fine)
    for bad, named in (
        ({"mu": np.array([0.0, -np.inf])}, r"mu has an element that is infinite or NaN, at \[1\]"),
        ({"best": jnp.float32(jnp.nan)}, r"best is NaN"),
        (hax.named(jnp.array([1.0, jnp.nan], jnp.bfloat16), "x"), r"an element that is infinite or NaN, at \[1\]"),
        (jnp.array([1.0, jnp.nan]).astype(jnp.float8_e4m3fn), r"an element that is infinite or NaN, at \[1\]"),
    ):
        with pytest.raises(ValueError, match=named):
            save(tmp_path / "bad.safetensors", bad)
        assert not (tmp_path / "bad.safetensors").exists()
