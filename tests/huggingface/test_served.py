"""Models for inference: exported and imported with every byte, and what they compute then."""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from folders import checkpoint, write
from helpers import unchecked
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from haliax_fp8 import calibrate, fp8_linear_layers
from haliax_fp8.experimental.attention import Fp8Attention
from haliax_fp8.folders.layout import written
from haliax_fp8.huggingface import export_model, import_model, names, serving_tensors
from haliax_fp8.layouts import PLAIN, named
from haliax_fp8.models import Transformer, TransformerConfig
from haliax_fp8.serving import QuantizedKernel, dequantize, layouts, quantize_for_inference


In, Head, Dim, Layers, Rows = hax.make_axes(inputs=128, heads=2, dim=128, layers=2, rows=6)
Experts, Mlp = hax.make_axes(experts=3, mlp=64)


class Block(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(key):
        keys = jax.random.split(key)
        return Block(
            hnn.Linear.init(In, (Head, Dim), key=keys[0]),
            hnn.Linear.init((Head, Dim), In.alias("again"), key=keys[1], use_bias=False),
        )

    def __call__(self, x):
        return x + self.down(self.up(x)).rename({"again": "inputs"})


class Model(eqx.Module):
    blocks: hnn.Stacked
    last: eqx.nn.Linear

    @staticmethod
    def init():
        keys = jax.random.split(jax.random.key(1), Layers.size)
        return Model(
            hnn.Stacked.init(Layers, Block)(keys), eqx.nn.Linear(128, 96, key=jax.random.key(2), dtype=jnp.float32)
        )

    def __call__(self, x):
        return jax.vmap(self.last)(self.blocks.fold(x).array)


@pytest.fixture(scope="module")
def x():
    return hax.random.normal(jax.random.key(0), (Rows, In))


@pytest.fixture(scope="module")
def trained(x):
    model = fp8_linear_layers(Model.init(), recipe="static")
    return calibrate(model, lambda model, x: jnp.sum(model(x)), [(x,)])


def kernels(model):
    is_kernel = lambda node: isinstance(node, QuantizedKernel)
    return [node for node in jax.tree.leaves(model, is_leaf=is_kernel) if is_kernel(node)]


def bytes_of(kernel):
    arrays = (kernel.stored.data, kernel.stored.scale, *([] if kernel.input_scale is None else [kernel.input_scale]))
    return [np.asarray(x.array).tobytes() for x in arrays]


@pytest.mark.more
@pytest.mark.parametrize("layout", [name for name in layouts if name in written])
def test_every_byte_comes_back(trained, x, layout, tmp_path):
    """Data and scales, of stacked layers, several axes and Equinox's; and the same tensors when exported again."""
    model = quantize_for_inference(trained if layouts[layout].is_static else Model.init(), layout)
    report = export_model(model, tmp_path / "out", layout, dtype=None, bf16_scales=False)
    assert report.origins == {"FP8 in the model": 5} and not report.ignore
    back = import_model(tmp_path / "out", eqx.filter_eval_shape(Model.init), weights="served")
    assert [bytes_of(kernel) for kernel in kernels(back)] == [bytes_of(kernel) for kernel in kernels(model)]
    assert {kernel.layout for kernel in kernels(back)} == {layouts[layout]}
    first, again = (dict(serving_tensors(m, layout, dtype=None, bf16_scales=False)) for m in (model, back))
    assert first.keys() == again.keys()
    assert all(first[name].tobytes() == array.tobytes() for name, array in again.items())
    # The plain model, with `data * scale`.
    plain, expected = dequantize(back), dequantize(model)
    np.testing.assert_array_equal(plain.last.weight, expected.last.weight)
    weights = (m.blocks.blocks[1].up.weight.rearrange((Head, Dim, In)).array for m in (plain, expected))
    np.testing.assert_array_equal(*weights)
    if layout in ("FP8", "MXFP8"):
        call = eqx.filter_jit(lambda model, x: model(x))
        np.testing.assert_array_equal(call(back, x), call(model, x))


def plain_experts():
    return {"up": hnn.MoELinear.init(Experts, In, Mlp, key=jax.random.key(0))}


def moe(**options):
    layer = plain_experts()["up"]
    # Experts of different sizes, so that their scales differ.
    weight = layer.weight * hax.named(jnp.array([1.0, 3.0, 0.2]), Experts)
    return fp8_linear_layers({"up": eqx.tree_at(lambda layer: layer.weight, layer, weight)}, **options)


SIZES = hax.named(jnp.array([2, 1, 2]), Experts)


@pytest.mark.more
@pytest.mark.parametrize("per_expert", [False, True])
def test_experts_with_scales_of_training(x, per_expert, tmp_path):
    """One scale for all or one for each, as in training, bit for bit; under `vmap` over rows too; and on disk."""
    grow = hax.named(jnp.array([1.0, 1.0, 9.0, 0.1, 0.1, 1.0]), Rows)
    converted = moe(recipe="static", scale_per_expert=per_expert)
    trained = calibrate(converted, lambda m, x: hax.sum(m["up"](x, SIZES)).scalar(), [(x * grow,)])
    call = eqx.filter_jit(lambda model, x, sizes: model["up"](x, sizes).array)
    served = quantize_for_inference(trained, "FP8")
    (kernel,) = kernels(served)
    assert kernel.stored.scale.array.shape == kernel.input_scale.array.shape == ((3,) if per_expert else ())
    expected = call(trained, x * grow, SIZES)
    np.testing.assert_array_equal(call(served, x * grow, SIZES), expected)
    plain = dequantize(served)["up"].weight.rearrange((Experts, In, Mlp)).array
    weight = converted["up"].weight.rearrange((Experts, In, Mlp)).array
    error = np.abs(plain - weight).max((1, 2)) / np.abs(weight).max((1, 2))
    assert (error < 2.0**-4).all()
    # Each example has its own groups; sizes that do not fit make its numbers NaN.
    batch = np.stack([np.asarray((x * grow).array), -2 * np.asarray(x.array), np.asarray(x.array)])
    sizes = np.array([[2, 1, 2], [0, 6, 0], [3, 3, 3]])
    one = lambda x, sizes: call(served, hax.named(x, (Rows, In)), hax.named(sizes, Experts))
    together = jax.jit(jax.vmap(one))(jnp.asarray(batch), jnp.asarray(sizes))
    for output, x_, sizes_ in zip(together, batch, sizes, strict=True):
        np.testing.assert_array_equal(output, one(jnp.asarray(x_), jnp.asarray(sizes_)))
    assert np.isnan(together[2]).all() and not np.isnan(together[:2]).any()
    for layout in ("FP8", "modelopt"):
        export_model(served, tmp_path / layout, layout, dtype=None, bf16_scales=False)
        back = import_model(tmp_path / layout, plain_experts(), weights="served")
        assert [bytes_of(kernel) for kernel in kernels(back)] == [bytes_of(kernel)]
        np.testing.assert_array_equal(call(back, x * grow, SIZES), expected)


@pytest.mark.more
def test_experts_with_scales_of_their_own(x, tmp_path):
    """Scales of rows, to which a state for each expert does not matter; one of two stored scales is refused."""
    model = moe(recipe="rowwise")
    served = quantize_for_inference(model, "FP8_DYNAMIC")
    export_model(served, tmp_path / "out", "FP8_DYNAMIC", dtype=None)
    back = import_model(tmp_path / "out", {"up": dequantize(served)["up"]}, weights="served")
    assert [bytes_of(kernel) for kernel in kernels(back)] == [bytes_of(kernel) for kernel in kernels(served)]
    call = eqx.filter_jit(lambda model: model["up"](x, SIZES).array)
    np.testing.assert_array_equal(call(back), call(served))
    np.testing.assert_array_equal(call(served)[:5], call(model)[:5])
    per_expert = moe(recipe="static", scale_per_expert=True)
    assert kernels(quantize_for_inference(per_expert, "FP8_DYNAMIC"))[0].layout == served["up"].kernel.layout


@pytest.mark.parametrize("layout", ["HF_FP8", "modelopt", "FP8_TENSOR"])
def test_folders_of_others(layout, tmp_path):
    """Written without the package; inputs are quantized as engines do, by scales that are not powers of two."""
    tensors, config = checkpoint(layout)
    sizes = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "mlp": 384, "vocab": 64}
    model = eqx.filter_eval_shape(lambda: Transformer.init(TransformerConfig(**sizes), key=jax.random.key(0)))
    served = import_model(write(tmp_path / "in", tensors, config), model, names=names.LLAMA, weights="served")
    again = dict(serving_tensors(served, layout, names=names.LLAMA))
    assert tensors.keys() == again.keys()
    for name, array in tensors.items():
        assert array.dtype == again[name].dtype and array.tobytes() == again[name].tobytes(), name
    down = served.blocks.blocks[0].mlp.down
    if layout != "HF_FP8":
        return
    # `x / scale` in blocks of 128 of a row, and `data * scale`, in float64.
    layer = "model.layers.0.mlp.down_proj"
    scale = np.repeat(np.repeat(tensors[f"{layer}.weight_scale_inv"].astype(np.float64), 128, 0), 128, 1)
    weight = tensors[f"{layer}.weight"].astype(np.float64) * scale
    x = np.random.default_rng(0).standard_normal((3, 384)).astype(np.float32)
    blocks = x.astype(np.float64).reshape(3, 3, 128)
    of_input = np.abs(blocks).max(-1, keepdims=True) / 448
    rounded = (blocks / of_input).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * of_input
    out = eqx.filter_jit(down)(hax.named(x, ("rows", "mlp"))).array
    # A quotient that lies between two numbers of FP8 may be rounded to either.
    np.testing.assert_allclose(out, rounded.reshape(3, 384) @ weight.T, rtol=2e-3, atol=2e-3)


def test_the_layouts_of_folders_are_those_of_serving():
    """One table of names; one in which no layer multiplies is refused by its name, with the reason."""
    refused = {PLAIN: "it quantizes nothing"}
    refused |= dict.fromkeys(("MXFP4", "MXFP4A16", "NVFP4", "NVFP4A16"), "no product .* in four bits")
    assert layouts == {name: layout for name, layout in named.items() if name not in refused}
    for name, why in refused.items():
        with pytest.raises(ValueError, match=f"layout='{name}' is not served: {why}.*Use one of 'FP8.*export_model"):
            quantize_for_inference(eqx.nn.Linear(64, 96, key=jax.random.key(0)), name)


def test_what_cannot_be_served(tmp_path):
    """Named, with what to do instead."""
    layer = {"up": eqx.nn.Linear(64, 96, use_bias=False, key=jax.random.key(0))}
    export_model(layer, tmp_path / "a", "FP8_DYNAMIC")
    served = import_model(tmp_path / "a", layer, weights="served")
    with pytest.raises(ValueError, match="has a layer in FP8 at up; pass the plain model"):
        import_model(tmp_path / "a", served, weights="served")
    with pytest.raises(ValueError, match="'dequantized', 'frozen', 'served'"):
        import_model(tmp_path / "a", layer, weights="cold")
    with pytest.raises(ValueError, match="up is in FP8 in the model and would be written in high precision"):
        export_model(served, tmp_path / "no", "BF16")
    with pytest.raises(ValueError, match=r"up is in FP8 in blocks of \(1, 64\), which"):
        export_model(served, tmp_path / "no", "FP8_BLOCK")
    with pytest.raises(ValueError, match="has no scale for its input"):
        export_model(served, tmp_path / "no", "FP8")
    export_model(plain_experts(), tmp_path / "b", "W8A16")
    with pytest.raises(ValueError, match="no such product of an input in high precision.*or weights=.frozen."):
        import_model(tmp_path / "b", plain_experts(), weights="served")
    assert not (tmp_path / "no").exists()


def test_the_state_of_attention_is_not_exported():
    model = {"attend": Fp8Attention.init(), "up": eqx.nn.Linear(8, 8, use_bias=False, key=jax.random.key(0))}
    assert [name for name, _ in serving_tensors(model)] == ["up.weight", "up.weight_scale"]


def test_a_scale_that_no_finite_step_has_made_is_not_exported():
    """A step with infinite inputs leaves a scale of 1, and no amax."""
    layer = fp8_linear_layers(eqx.nn.Linear(8, 8, key=jax.random.key(0)))
    spoiled = eqx.filter_grad(lambda layer: layer(jnp.full(8, jnp.inf)).sum())(layer).dot_general
    layer = eqx.tree_at(lambda layer: layer.dot_general.state, layer, spoiled.state)
    with pytest.raises(ValueError, match="has no scale of its input yet"):
        list(serving_tensors({"up": layer}, "FP8"))


@pytest.mark.parametrize("name", ["bf16_scales", "training_scales"])
def test_choices_of_an_export_are_booleans(name):
    with unchecked(), pytest.raises(ValueError, match=f"{name}='no' of an export must be True or False"):
        serving_tensors({"up": eqx.nn.Linear(8, 8, key=jax.random.key(0))}, **{name: "no"})


# --- On several devices -----------------------------------------------------------------------------------------------

MESH = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
# Axes of each weight by name, or by position: experts and heads over one mesh axis, inputs and others over another.
DIVIDED = {"heads": "a", "experts": "a", "inputs": "b", "again": "b"}


def divided_template(init):
    """Shapes with shardings."""

    def with_sharding(x):
        if isinstance(x, hax.NamedArray):
            spec = P(*(DIVIDED.get(axis.name) for axis in x.axes))
            return hax.NamedArray(jax.ShapeDtypeStruct(x.array.shape, x.dtype, sharding=at(spec)), x.axes)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at(P("b", "a") if x.ndim == 2 else P()))

    at = lambda spec: NamedSharding(MESH, spec)
    is_leaf = lambda x: isinstance(x, hax.NamedArray)
    arrays, rest = eqx.partition(eqx.filter_eval_shape(init), lambda x: isinstance(x, jax.ShapeDtypeStruct))
    return eqx.combine(jax.tree.map(with_sharding, arrays, is_leaf=is_leaf), rest)


@pytest.mark.more
@pytest.mark.parametrize("weights", ["served", "frozen"])
@pytest.mark.parametrize("layout", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8"])
def test_kernels_are_divided_as_the_weights_are(trained, x, layout, weights, tmp_path):
    """Each device has a quarter of their bytes: heads are divided, which are the first axis of a matrix's own."""
    export_model(trained if layout == "FP8" else Model.init(), tmp_path / "out", layout, dtype=None)
    template = divided_template(Model.init)
    divided = import_model(tmp_path / "out", template, weights=weights)
    whole = import_model(tmp_path / "out", eqx.filter_eval_shape(Model.init), weights=weights)
    jax.tree.map(np.testing.assert_array_equal, *(eqx.filter(m, eqx.is_array) for m in (divided, whole)))
    data = [x for x in jax.tree.leaves(eqx.filter(divided, eqx.is_array)) if x.dtype == jnp.uint8 and x.ndim > 1]
    of_data = sorted({x.shape[-2:] for x in data if x.size >= 96 * 128})
    assert of_data == [(96, 128), (128, 256), (256, 128)]
    for array in data:
        if array.shape[-2:] in of_data:
            assert array.addressable_shards[0].data.size * 4 == array.size
    call = eqx.filter_jit(lambda model, x: model(x))
    np.testing.assert_allclose(call(divided, x), call(whole, x), rtol=1e-3, atol=1e-3)


@pytest.mark.more
def test_experts_are_divided_as_their_weights_are(x, tmp_path):
    axes = hax.make_axes(experts=4, mlp=64)
    init = lambda: {"up": hnn.MoELinear.init(axes[0], In, axes[1], key=jax.random.key(0))}
    export_model(init(), tmp_path / "out", "FP8_BLOCK", dtype=None)
    divided, whole = (
        import_model(tmp_path / "out", template, weights="served")["up"]
        for template in (divided_template(init), eqx.filter_eval_shape(init))
    )
    jax.tree.map(np.testing.assert_array_equal, *(eqx.filter(m, eqx.is_array) for m in (divided, whole)))
    assert divided.kernel.stored.data.array.sharding.spec == P("a", None, "b")
    sizes = hax.named(jnp.array([2, 1, 0, 3]), axes[0])
    np.testing.assert_allclose(divided(x, sizes).array, whole(x, sizes).array, rtol=1e-5, atol=1e-5)
