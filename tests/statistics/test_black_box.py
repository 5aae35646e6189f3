"""Black boxes: planted faults are named by layer, product, operand and element, also from a file on another machine."""

import json

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from folders import E4M3, file_of
from residual_stack import Embed, residual_stack

import haliax_fp8 as fp8
from haliax_fp8._cli.main import main
from haliax_fp8._cli.replay import _as_json
from haliax_fp8.recipes import CurrentScaling, HighPrecision, Quantization, Rounding
from haliax_fp8.statistics import BlackBox, black_box, replay
from haliax_fp8.statistics.kept.recipe_json import recipe_from_json, recipe_to_json


X = jax.random.normal(jax.random.key(1), (8, 64))


@jax.custom_vjp
def spoiled(x):
    return x


spoiled.defvjp(lambda x: (x, None), lambda _, g: (g.at[3, 7].set(jnp.inf),))


def converted(model, recipe="delayed"):
    return fp8.fp8_linear_layers(model, fp8.Fp8Config(recipe=recipe))


def mlp():
    return eqx.nn.MLP(64, 8, 32, 2, key=jax.random.key(0))


def hidden(model, x):
    """What comes out of the layer before the last."""
    return jax.vmap(model.layers[1])(jax.nn.relu(jax.vmap(model.layers[0])(x)))


def loss(model, x):
    return jnp.mean(jax.vmap(model.layers[2])(jax.nn.relu(hidden(model, x))) ** 2)


def with_an_infinite_gradient(model, x):
    return jnp.mean(jax.vmap(model.layers[2])(jax.nn.relu(spoiled(hidden(model, x)))) ** 2)


@pytest.mark.more
def test_an_infinite_gradient_is_traced_to_its_element(tmp_path, capsys):
    model = fp8.calibrate(converted(mlp()), loss, [(X,)])
    box = black_box(model, with_an_infinite_gradient, X, step=17)
    assert (box.layer, box.operand, box.product, box.step) == ("layers.1", "output_grad", "dgrad", 17)
    # Operands are those of the step, bit for bit.
    first = jax.nn.relu(jax.vmap(model.layers[0])(X))
    np.testing.assert_array_equal(box.input, first)
    np.testing.assert_array_equal(box.kernel, model.layers[1].weight)
    zeros = jnp.zeros((8, 32))
    after = lambda probe: jnp.mean(
        jax.vmap(model.layers[2])(jax.nn.relu(jax.vmap(model.layers[1])(first) + probe)) ** 2
    )
    expected = np.array(jax.grad(after)(zeros))
    expected[3, 7] = np.inf
    np.testing.assert_allclose(box.output_grad, expected, rtol=1e-5, atol=1e-9)

    file = tmp_path / "box.safetensors"
    box.save(file)
    same = BlackBox.load(file)
    assert same.recipe == box.recipe and same.contraction == box.contraction and same.bytes == box.bytes
    found = replay(file, ["current", "rowwise"])
    assert (found.culprit.operand, found.culprit.product, found.culprit.index) == ("output_grad", "dgrad", (3, 7))
    assert found.culprit.where == "output_grad[3, 7]" and "inf, the only one" in found.culprit.seen
    # One scale for the tensor spreads NaN over it, one for each row keeps it to the row of 8.
    assert found.of("current", "dgrad").nonfinite == 8 * 32 and found.of("rowwise", "dgrad").nonfinite == 32
    assert (
        found.best == "rowwise" or found.of("as trained", "wgrad").nonfinite <= found.of("rowwise", "wgrad").nonfinite
    )
    # fprop's operands are healthy, and its product is the one of the step.
    assert all(found.of(name, "fprop").nonfinite == 0 for name in ("as trained", "current", "rowwise"))
    exact = np.asarray(first, np.float64) @ np.asarray(model.layers[1].weight, np.float64).T
    product = np.asarray(jax.vmap(model.layers[1])(first) - model.layers[1].bias[None], np.float64)
    sqnr = 10 * np.log10((exact**2).sum() / ((product - exact) ** 2).sum())
    np.testing.assert_allclose(found.of("as trained", "fprop").sqnr, sqnr, rtol=1e-3)
    assert max(map(len, f"{box}\n{found}".splitlines())) <= 80
    said = " ".join(str(found).split())
    assert "Clipped and flushed to zero: of its worse operand." in said
    worst = min(found.of(found.best, product).sqnr for product in ("fprop", "dgrad", "wgrad"))
    assert said.endswith(f"best here: {found.best}, with {worst:.1f} dB in its worst product")
    assert "1 element is infinite or NaN" in box.reason

    as_json = json.loads(json.dumps(_as_json(found), allow_nan=False))
    assert as_json["culprit"]["index"] == [3, 7] and len(as_json["products"]) == 9
    assert main(["replay", str(file), "--recipe", "curent"]) == 2
    assert "'current'" in capsys.readouterr().err
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"nothing")
    assert main(["replay", str(other)]) == 2
    assert "is not a safetensors file" in capsys.readouterr().err


def test_what_is_no_file_is_said_to_be_missing(tmp_path, capsys):
    remedy = "give a file that black_box(...).save(path) wrote"
    for path, what in ((tmp_path / "absent.safetensors", "does not exist"), (tmp_path, "is a folder")):
        assert main(["replay", str(path)]) == 2
        assert capsys.readouterr().err == f"error: {path} {what}; {remedy}\n"


def test_a_file_of_weights_in_fp8_is_said_to_be_no_black_box(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(file_of({"a.weight": np.ones((4, 4), E4M3)}))
    assert main(["replay", str(tmp_path / "model.safetensors")]) == 2
    path, remedy = tmp_path / "model.safetensors", "give a file that black_box(...).save(path) wrote"
    assert capsys.readouterr().err == f"error: {path} is not a black box; {remedy}\n"


def test_a_damaged_box_is_one_line(tmp_path, capsys):
    layer = converted(eqx.nn.Linear(64, 32, key=jax.random.key(0)), "current")
    box = black_box(layer, lambda layer, x: jnp.mean(jax.vmap(layer)(x) ** 2), X)
    with pytest.raises(ValueError, match="path='.*box.safetensors' cannot be written: .*; give a file in a folder"):
        box.save(tmp_path / "absent" / "box.safetensors")
    box.save(tmp_path / "box.safetensors")
    content = (tmp_path / "box.safetensors").read_bytes()
    for old, new in ((b"lhs_batch", b"lhs_botch"), (b'"output_grad":{', b'"output_grat":{'), (b"float32", b"floqt32")):
        assert old in content
        (tmp_path / "bad.safetensors").write_bytes(content.replace(old, new))
        assert main(["replay", str(tmp_path / "bad.safetensors")]) == 2
        err = capsys.readouterr().err
        assert "bad.safetensors is damaged, or of another version: " in err and err.count("\n") == 1


@pytest.mark.more
def test_an_outlier_channel_is_named_and_blocks_are_better(tmp_path, capsys):
    """A channel 2**22 times as large, which small weights make up for: one scale flushes all the others."""
    x = jax.random.normal(jax.random.key(1), (8, 256))
    factor = jnp.where(jnp.arange(256) == 5, 2.0**22, 1.0)[None]
    layer = eqx.nn.Linear(256, 16, key=jax.random.key(0))
    layer = converted(eqx.tree_at(lambda layer: layer.weight, layer, layer.weight / factor), "current")
    box = black_box(layer, lambda layer, x: jnp.mean(jax.vmap(layer)(x) ** 2), x * factor)
    assert (box.layer, box.operand, box.product) == ("", "input", "fprop")
    found = replay(box, ["mxfp8", CurrentScaling()])
    assert found.culprit.where == "input[:, 5]" and "an outlier" in found.culprit.seen
    # MXFP8 loses the block of 32 with the channel, the tensor's scale everything else: an eighth, and all.
    assert found.of("mxfp8", "fprop").sqnr > found.of("as trained", "fprop").sqnr + 6.0
    flushed = [found.of(name, "fprop").underflow["input"] for name in ("as trained", "mxfp8")]
    assert flushed[0] > 0.9 and flushed[1] < 0.13
    assert found.best == "mxfp8"
    # A scaling without a name is tried as well; this one is that of the box.
    unnamed = found.products[6]
    assert unnamed.recipe.startswith("CurrentScaling") and unnamed.sqnr == found.of("as trained", "fprop").sqnr
    box.save(tmp_path / "box.safetensors")
    assert main(["replay", str(tmp_path / "box.safetensors"), "--recipe", "mxfp8"]) == 0
    printed = capsys.readouterr().out
    assert "Black box of model" in printed and "culprit: input[:, 5], which fprop reads first" in printed


@pytest.mark.more
def test_a_layer_of_a_stack_in_bfloat16():
    stack = residual_stack()
    stack = fp8.cast_params(converted(stack), jnp.bfloat16)
    x = hax.random.normal(jax.random.key(2), (hax.Axis("batch", 4), Embed)).astype(jnp.bfloat16)
    box = black_box(stack, lambda m, x: hax.mean(m.fold(x) ** 2), x, layer="stacked.up", index=(1,), step=3)
    first, second = stack.unstacked()
    assert box.where == "stacked.up[1]" and box.input.dtype == jnp.bfloat16
    np.testing.assert_array_equal(box.input, first(x).array)
    np.testing.assert_array_equal(box.kernel, second.up.weight.array)
    assert box.state.shape == stack.stacked.up.dot_general.state.table.array.shape[1:]
    found = replay(box, ["nvfp4"])
    assert found.of("as trained", "fprop").size == 4 * 32
    assert found.of("as trained", "fprop").sqnr > 20.0 > found.of("nvfp4", "fprop").sqnr > 10.0


@pytest.mark.more
def test_an_ensemble_mapped_over_a_batch():
    members = eqx.filter_vmap(lambda key: eqx.nn.Linear(64, 16, key=key))(jax.random.split(jax.random.key(0), 3))
    model = converted(members)
    result = lambda m, x: jnp.mean(eqx.filter_vmap(lambda member: jax.vmap(member)(x))(m) ** 2)
    box = black_box(model, result, X, layer="", index=(2,))
    np.testing.assert_array_equal(box.kernel, members.weight[2])
    np.testing.assert_array_equal(box.input, X)
    assert box.output_grad.shape == (8, 16)
    outs = eqx.filter_vmap(lambda member: jax.vmap(member)(X))(model)
    np.testing.assert_allclose(box.output_grad, 2 * outs[2] / outs.size, rtol=1e-5)


def test_errors_say_what_to_do():
    model = converted(mlp(), "current")
    with pytest.raises(ValueError, match="has no FP8 product; there are"):
        black_box(model, loss, X, layer="layers.9")
    with pytest.raises(ValueError, match="more than limit=1,000; give a smaller batch"):
        black_box(model, loss, X, layer="layers.0", limit=1000)
    with pytest.raises(ValueError, match="does not depend on layers.2"):
        black_box(model, lambda m, x: jnp.mean(hidden(m, x)), X, layer="layers.2")
    with pytest.raises(ValueError, match=r"index=\(1,\) does not name a layer"):
        black_box(model, loss, X, layer="layers.0", index=(1,))
    square = converted(eqx.nn.Linear(64, 64, key=jax.random.key(0)), "current")
    twice = lambda m, x: jnp.mean(jax.vmap(m)(jax.vmap(m)(x)) ** 2)
    with pytest.raises(ValueError, match="the loss uses model 2 times"):
        black_box(square, twice, X, layer="")
    with pytest.raises(ValueError, match="no FP8 product to keep"):
        black_box(mlp(), loss, X)


def test_one_recipe_needs_no_list():
    """A name is not a sequence of letters."""
    box = black_box(converted(mlp(), "current"), loss, X, layer="layers.0")
    for recipe in ("rowwise", CurrentScaling()):
        assert len({product.recipe for product in replay(box, recipe).products}) == 2


def test_roundings_have_the_names_of_the_first_files():
    """Which a file keeps, whatever the members of the enum are called."""
    quantized = {"class": "Quantization", "format": {"format": "E4M3"}, "scaling": {"class": "HighPrecision"}}
    for name, rounding in (("ToNearest", Rounding.TO_NEAREST), ("Stochastic", Rounding.STOCHASTIC)):
        quantization = Quantization(fp8.recipes.E4M3, HighPrecision(), rounding)
        as_json = quantized | {"rounding": {"class": name}}
        assert recipe_to_json(quantization) == as_json and recipe_from_json(as_json) == quantization
    for name, recipe in fp8.recipes.named.items():
        assert recipe_from_json(json.loads(json.dumps(recipe_to_json(recipe)))) == recipe, name
    with pytest.raises(ValueError, match="class='ToZero' is not one of .*'Stochastic', 'ToNearest'"):
        recipe_from_json({"class": "ToZero"})


@pytest.mark.more
def test_a_recipe_with_state_is_replayed_on_tiny_gradients():
    """Their amax over the largest value would be flushed to zero."""
    tiny = lambda model, x: jnp.sum(jax.vmap(model.layers[0])(x) * 1e-36)
    box = black_box(converted(mlp(), "current"), tiny, X, layer="layers.0")
    assert not any(replay(box, "delayed").of("delayed", name).nonfinite for name in ("fprop", "dgrad", "wgrad"))
