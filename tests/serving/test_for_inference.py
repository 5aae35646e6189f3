"""Models for inference: which layers, in which form, under which transformations, and what they are made back into."""

import dataclasses
import functools

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import recipe_reference as reference
from haliax.state_dict import to_state_dict
from helpers import unchecked
from jax import export
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from haliax_fp8 import (
    Fp8Config,
    TrainStep,
    calibrate,
    cast_params,
    describe,
    fp8_linear_layers,
    restore_linear_layers,
    trainable,
)
from haliax_fp8._product.contraction import DotContraction
from haliax_fp8._product.dimensions import DotDimensions
from haliax_fp8.huggingface import export_model, import_model
from haliax_fp8.layers import AbstractQuantizedLayer, Kernel, LayerRule, default_rules
from haliax_fp8.layouts import Inputs, Layout
from haliax_fp8.recipes import E2M1, NVFP4Scaling, Quantization, by_name
from haliax_fp8.serving import (
    QuantizedEquinoxLinear,
    QuantizedKernel,
    dequantize,
    freeze,
    layouts,
    quantize_for_inference,
)
from haliax_fp8.serving.product import ROWS, ServedProduct, padded_product, quantized_input


In, Out, Vocab, Experts, Rows, Layers = hax.make_axes(inputs=64, outputs=32, vocab=48, experts=3, rows=6, layers=2)
MATRICES = (((1,), (0,)), ((), ()))
# The others differ from one of these in their folders alone.
LAYOUTS = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "W8A16")


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def equinox_linear(key=0):
    return eqx.nn.Linear(64, 32, key=jax.random.key(key))


def calibrated(model, x):
    return calibrate(fp8_linear_layers(model, recipe="static"), lambda m, x: jax.vmap(m)(x).sum(), [(x,)])


@pytest.mark.smoke
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_bytes(layout):
    """Against quantization in NumPy: data, scales, `data * scale`, the output; a byte for each weight, and no more."""
    layer, x = equinox_linear(), normal(1, 5, 64)
    model = calibrated(layer, x) if layout == "FP8" else layer
    served = quantize_for_inference(model, layout)
    kernel, weight = served.kernel, np.asarray(layer.weight, np.float64)
    data, scale = np.asarray(kernel.quantized.data).astype(np.float64), kernel.quantized.scale
    per_scale = {"FP8": (), "FP8_DYNAMIC": (32, 1), "FP8_BLOCK": (1, 1), "W8A16": (32, 1), "MXFP8": (32, 2)}[layout]
    assert kernel.quantized.data.dtype == jnp.float8_e4m3fn and kernel.stored.data.array.shape == (32, 64)
    assert scale.shape == per_scale and kernel.stored.scale.array.dtype == (
        jnp.uint8 if layout == "MXFP8" else jnp.uint32
    )
    leaves = [leaf for leaf in jax.tree.leaves(served) if leaf is not served.bias]
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) == kernel.bytes
    assert kernel.bytes == weight.size + kernel.stored.scale.array.nbytes + (4 if layout == "FP8" else 0)
    assert sum(leaf.size >= weight.size for leaf in leaves) == 1
    scale = np.asarray(scale, np.float64)
    spread = np.repeat(scale, 32, axis=1) if layout == "MXFP8" else np.broadcast_to(scale, (32, 64))
    plain = dequantize(served)
    np.testing.assert_array_equal(np.asarray(plain.weight), (data * spread).astype(np.float32))
    assert type(plain) is eqx.nn.Linear and plain.bias is layer.bias
    # Half a unit in the last place of E4M3, or half of its smallest subnormal.
    error = np.maximum(np.abs(weight) * 2.0**-4, spread * 2.0**-10)
    assert (np.abs(data * spread - weight) <= error * (1 + 1e-6)).all()
    out = np.asarray(jax.jit(jax.vmap(served))(x), np.float64)
    expected = np.asarray(x, np.float64) @ (data * spread).T + np.asarray(layer.bias, np.float64)
    of_inputs = 0.0 if layout == "W8A16" else np.abs(np.asarray(x)).max() * 2.0**-4
    bound = of_inputs * np.abs(data * spread).sum(1) + 1e-4
    assert (np.abs(out - expected) <= bound).all() and np.abs(out - expected).mean() < 0.2 * bound.mean()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_in_nvfp4_served_is_trained(dtype):
    """Bit for bit, whatever else is in the batch; the weight is that of NumPy, in half a byte and few scales."""
    rows = dataclasses.replace(by_name("nvfp4"), input=Quantization(E2M1, NVFP4Scaling(per_row=True)))
    layer = cast_params(equinox_linear(), dtype)
    trained, x = fp8_linear_layers(layer, recipe=rows), normal(1, 24, 64, dtype=dtype).at[20].multiply(1e4)
    served, call = quantize_for_inference(trained, "NVFP4_DYNAMIC"), eqx.filter_jit(lambda m, x: jax.vmap(m)(x))
    together = call(trained, x)
    for part in (slice(None), slice(0, 5), slice(3, 4), slice(18, 24)):
        np.testing.assert_array_equal(call(served, x[part]), together[part])
    kernel = served.kernel
    assert kernel.stored.data.array.shape == (32, 32) and kernel.stored.scale.array.shape == (2, 4)
    assert kernel.bytes == 32 * 64 // 2 + 2 * 4 + 4
    data, scale = reference.nvfp4(np.asarray(layer.weight, np.float32), rows=16)
    values = data.astype(np.float64) * reference.expand(scale, (32, 64), 16, 16)
    if dtype == jnp.float32:
        np.testing.assert_allclose(dequantize(served).weight, values, rtol=1e-6)
    # In bfloat16 the scale of the tensor has 7 bits, as in training. Half of the widest step is one scale.
    error = np.abs(np.asarray(dequantize(served).weight, np.float64) - np.asarray(layer.weight, np.float64))
    assert (error <= 1.1 * reference.expand(scale, (32, 64), 16, 16)).all()
    np.testing.assert_allclose(call(freeze(served), x), call(dequantize(served, dtype), x), rtol=1e-6, atol=1e-6)


@pytest.mark.more
def test_layers_in_nvfp4_under_transformations():
    """Of ensembles, stacks and experts: the numbers of training, and of each layer alone."""
    rows = dataclasses.replace(by_name("nvfp4"), input=Quantization(E2M1, NVFP4Scaling(per_row=True)))
    serve = lambda model: quantize_for_inference(fp8_linear_layers(model, recipe=rows), "NVFP4_DYNAMIC")
    keys, x = jax.random.split(jax.random.key(0), 2), normal(1, 6, 64)
    ensemble = eqx.filter_vmap(lambda key: eqx.nn.Linear(64, 32, key=key))(keys)
    call = eqx.filter_jit(eqx.filter_vmap(lambda m, x: jax.vmap(m)(x), in_axes=(eqx.if_array(0), None)))
    each = [jax.jit(jax.vmap(serve(eqx.nn.Linear(64, 32, key=key))))(x) for key in keys]
    np.testing.assert_array_equal(call(serve(ensemble), x), jnp.stack(each))
    named, run = hax.named(x, (Rows, In)), eqx.filter_jit(lambda m, x: m(x).array)
    stack = hnn.Stacked.init(Layers, Same)(keys)
    fold = eqx.filter_jit(lambda m: m.fold(named).array)
    np.testing.assert_array_equal(fold(serve(stack)), fold(fp8_linear_layers(stack, recipe=rows)))
    experts, sizes = hnn.MoELinear.init(Experts, In, Out, key=keys[0]), hax.named(jnp.array([4, 0, 2]), Experts)
    of_groups = eqx.filter_jit(lambda m: m(named, sizes).array)
    np.testing.assert_array_equal(of_groups(serve(experts)), of_groups(fp8_linear_layers(experts, recipe=rows)))
    assert run(serve(hnn.Linear.init(In, (Out, Vocab), key=keys[0])), named).shape == (6, 32, 48)


@pytest.mark.more
def test_compute_dtype_of_the_layer():
    """Parameters in float32 that the layer's op rounds: kernels are quantized from what the product takes."""
    layer, x = equinox_linear(), normal(1, 5, 64)
    converted = fp8_linear_layers(layer, recipe="static", compute_dtype=jnp.bfloat16)
    trained = calibrate(converted, lambda m, x: jax.vmap(m)(x).sum(), [(x,)])
    call = eqx.filter_jit(lambda model: jax.vmap(model)(x))
    out = call(quantize_for_inference(trained, "FP8"))
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, call(trained))


class Model(eqx.Module):
    """One layer of each kind."""

    embedding: hnn.Embedding
    blocks: hnn.Stacked
    experts: hnn.MoELinear
    router: hnn.Linear
    head: hnn.Linear
    last: eqx.nn.Linear

    @staticmethod
    def init():
        keys = jax.random.split(jax.random.key(0), 6)
        return Model(
            hnn.Embedding.init(Vocab, In, key=keys[0]),
            hnn.Stacked.init(Layers, Same)(jax.random.split(keys[1], 2)),
            hnn.MoELinear.init(Experts, In, Out, key=keys[2]),
            hnn.Linear.init(In, Experts, key=keys[3]),
            hnn.Linear.init(In, Vocab, key=keys[4]),
            eqx.nn.Linear(64, 32, key=keys[5]),
        )


class Same(eqx.Module):
    linear: hnn.Linear

    @staticmethod
    def init(key):
        return Same(hnn.Linear.init(In, In.alias("again"), key=key))

    def __call__(self, x):
        return self.linear(x).rename({"again": "inputs"})


@pytest.mark.more
def test_which_layers():
    """All that are linear in a plain model, or that trained in FP8; others if they are named."""
    model = Model.init()
    served = quantize_for_inference(model, "FP8_DYNAMIC")
    described = {layer.path: layer for layer in describe(served)}
    in_fp8 = {path for path, layer in described.items() if layer.is_fp8}
    assert in_fp8 == {"blocks.blocks.0.linear", "blocks.blocks.1.linear", "experts", "last"}
    assert described["last"].recipe == "for inference: FP8_DYNAMIC, scales computed"
    assert described["head"].reason == "not converted"
    assert served.head.weight.array is model.head.weight.array
    shared = {"a": equinox_linear(), "b": None}
    both = quantize_for_inference({**shared, "b": shared["a"]}, "FP8_DYNAMIC")
    assert both["a"] is both["b"]
    by_name = quantize_for_inference(model, "FP8_DYNAMIC", targets=("head", "embedding", "router"))
    assert {layer.path for layer in describe(by_name) if layer.is_fp8} == {"head", "embedding", "router"}
    # What trains in FP8, heads too; what is excluded is plain again.
    converted = fp8_linear_layers(model, recipe="rowwise", targets=("head", "last"))
    of_training = quantize_for_inference(converted, "FP8_DYNAMIC", exclude="last")
    assert [layer.path for layer in describe(of_training) if layer.is_fp8] == ["head"]
    assert type(of_training.last) is eqx.nn.Linear
    # Served layers stay, and are not converted to train.
    assert (
        quantize_for_inference(quantize_for_inference(model, "FP8_DYNAMIC", targets="last"), "FP8_DYNAMIC").last
        is not None
    )
    with pytest.raises(ValueError, match="in FP8 for inference"):
        fp8_linear_layers(served, targets="experts")
    assert describe(quantize_for_inference(equinox_linear(), "W8A16")).summary.endswith("inputs in high precision")
    # The same keys as the plain model, and its values.
    keys = to_state_dict(dataclasses.replace(served, experts=None, last=None))
    assert keys.keys() == to_state_dict(dataclasses.replace(model, experts=None, last=None)).keys()


@pytest.mark.more
def test_haliax_layers():
    """Experts, an embedding and its transpose, against products of `data * scale`, with inputs that FP8 holds."""
    model = Model.init()
    model = quantize_for_inference(model, "FP8_DYNAMIC", targets=("experts", "embedding"))
    plain = dequantize(model)
    # Powers of two, of which E4M3 holds these: only kernels are rounded.
    x = hax.named(2.0 ** jax.random.randint(jax.random.key(2), (6, 64), -2, 3).astype(jnp.float32), (Rows, In))
    sizes = hax.named(jnp.array([2, 0, 3]), Experts)
    ours, theirs = model.experts(x, sizes), plain.experts(x, sizes)
    assert ours.axes == theirs.axes
    np.testing.assert_allclose(ours.array[:5], theirs.array[:5], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(model.embedding.unembed(x).array, plain.embedding.unembed(x).array, rtol=1e-5, atol=1e-3)
    tokens = hax.named(jnp.array([0, 47, 5]), "position")
    np.testing.assert_array_equal(model.embedding.embed(tokens).array, plain.embedding.embed(tokens).array)
    with pytest.raises(ValueError, match="is not supported for FP8 kernels"):
        quantize_for_inference(Model.init(), "W8A16", targets="experts")
    mapped = jax.vmap(lambda x: model.experts(hax.named(x, (Rows, In)), sizes).array)(jnp.stack([x.array, x.array]))
    np.testing.assert_array_equal(mapped, jnp.stack([ours.array, ours.array]))


@pytest.mark.more
@pytest.mark.parametrize("layout", ["FP8", "FP8_DYNAMIC", "MXFP8"])
def test_transformations(layout):
    """`jit`, `vmap` of examples at once and nested, ensembles, and a mesh: the numbers of one product."""
    x = normal(1, 4, 2, 64)
    model = calibrated(equinox_linear(), x[:, 0]) if layout == "FP8" else equinox_linear()
    served = quantize_for_inference(model, layout)
    once = jax.vmap(jax.vmap(served))(x)
    np.testing.assert_array_equal(jax.jit(jax.vmap(jax.vmap(served), in_axes=1, out_axes=1))(x), once)
    # An ensemble: each member as if it were alone.
    members = [equinox_linear(key) for key in range(3)]
    if layout == "FP8":
        members = [calibrated(layer, (1 + i) * x[:, 0]) for i, layer in enumerate(members)]
    ensemble = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    together = quantize_for_inference(ensemble, layout)
    alone = jnp.stack([jax.vmap(quantize_for_inference(member, layout))(x[:, 0]) for member in members])
    call = lambda layer, x: jax.vmap(layer)(x)
    np.testing.assert_array_equal(eqx.filter_vmap(call, in_axes=(eqx.if_array(0), None))(together, x[:, 0]), alone)
    swapped = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(eqx.if_array(0), None))
    np.testing.assert_array_equal(jax.vmap(lambda x: swapped(together, x))(x[:, 0]), alone.swapaxes(0, 1))
    assert jax.tree.map(jnp.shape, dequantize(together)).weight == (3, 32, 64)
    # Weights over two devices, rows over two others.
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    divided = eqx.tree_at(lambda l: l.weight, model, put(model.weight, "model"))
    with jax.set_mesh(mesh):
        on_devices = quantize_for_inference(divided, layout)
        assert on_devices.kernel.stored.data.array.sharding.spec[:1] == ("model",)
        outputs = jax.jit(jax.vmap(on_devices))(put(x[:, 0], "data"))
    np.testing.assert_array_equal(outputs, once[:, 0])


@pytest.mark.parametrize("layout", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "NVFP4_DYNAMIC"])
def test_row_alone_is_row_in_batch(layout):
    """Whatever else is in the batch: a row's FP8 data and its result, bit for bit, with a row that is far larger."""
    x = normal(1, 20, 64).at[3].mul(1000.0)
    model = calibrated(equinox_linear(), x) if layout == "FP8" else equinox_linear()
    call = jax.jit(jax.vmap(quantize_for_inference(model, layout)))
    together = call(x)
    for rows in (slice(0, 1), slice(3, 4), slice(5, 18)):
        np.testing.assert_array_equal(call(x[rows]), together[rows])


def test_a_layer_at_two_paths_stays_one():
    layer = equinox_linear()
    first, second = quantize_for_inference([layer, layer], "FP8_DYNAMIC")
    assert first is second


def test_rows_of_one_scale_are_not_independent():
    """So that the test above can fail."""
    layout = Layout("channel", Inputs("tensor"))
    x = normal(1, 20, 64).at[3].mul(1000.0)
    call = jax.jit(jax.vmap(quantize_for_inference(equinox_linear(), layout)))
    assert not np.array_equal(call(x[:1]), call(x)[:1])


@pytest.mark.parametrize("layout", [*LAYOUTS, "NVFP4_DYNAMIC"])
def test_exported_for_any_number_of_rows(layout):
    """One exported program serves all batch sizes, with the bits of the program for each."""
    call = jax.jit(jax.vmap(quantize_for_inference(calibrated(equinox_linear(), normal(2, 20, 64)), layout)))
    (rows,) = export.symbolic_shape("rows")
    with unchecked():  # jaxtyping takes sizes for numbers
        exported = export.export(call)(jax.ShapeDtypeStruct((rows, 64), jnp.float32))
    for size in (1, 20):
        x = normal(1, size, 64)
        np.testing.assert_array_equal(exported.call(x), call(x))


@pytest.mark.parametrize("kernel_first", [False, True])
@pytest.mark.parametrize("layout", ["FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "NVFP4_DYNAMIC"])
@pytest.mark.parametrize("shape", [(2, 5, 64), (64,)], ids=str)
def test_padded_rows_change_nothing(layout, shape, kernel_first):
    """What NVIDIA's GPUs multiply for few rows: exact sums of small numbers, so that no order of them matters."""
    shapes = (shape, (32, 64))
    numbers = (((len(shape) - 1,), (1,)), ((), ()))
    if kernel_first:  # `einsum` may swap the operands
        numbers = (((1,), (len(shape) - 1,)), ((), ()))
    dims = DotDimensions.of(numbers, *(reversed(shapes) if kernel_first else shapes))
    contraction = DotContraction(dims, kernel_first=kernel_first)
    made = quantize_for_inference(eqx.nn.Linear(64, 32, key=jax.random.key(1)), layout).kernel
    spec = ServedProduct(made.input, contraction, None, np.dtype(np.float32), 24)
    x = 2.0 ** jax.random.randint(jax.random.key(0), shape, -2, 3).astype(jnp.float32)
    kernel, quantized = made.quantized, quantized_input(x, None, None, spec)
    filled = padded_product(quantized, kernel, None, spec, np.dtype(np.float32))
    expected = contraction.product("fprop", (quantized, kernel), None, spec.precision, np.dtype(np.float32), None)
    np.testing.assert_allclose(filled, expected, rtol=1e-6, atol=1e-6)
    jaxpr = jax.make_jaxpr(lambda x: padded_product(x, kernel, None, spec, np.dtype(np.float32)))(quantized)
    (pad, *_) = [equation for equation in jaxpr.jaxpr.eqns if equation.primitive.name == "pad"]
    assert np.prod(pad.outvars[0].aval.shape[:-1]) >= ROWS


class Dense(eqx.Module):
    weight: jax.Array
    op: object = None

    def __call__(self, x):
        multiply = jax.lax.dot_general if self.op is None else self.op
        return multiply(x, self.weight, MATRICES)


class QuantizedDense(AbstractQuantizedLayer):
    kernel: QuantizedKernel

    def __call__(self, x):
        return self.kernel.dot_general(x, MATRICES)

    @property
    def described(self):
        return Kernel(None, 64, 32)

    def dequantized(self, dtype):
        return Dense(self.kernel.values(dtype))


@dataclasses.dataclass(frozen=True)
class DenseRule(LayerRule):
    layer_type = Dense

    def refusal(self, layer):
        return None

    def kernel(self, layer):
        return Kernel(layer.weight, *layer.weight.shape[-2:], contracted=(0,))

    def op(self, layer):
        return layer.op

    def with_op(self, layer, op):
        return Dense(layer.weight, op)


def test_a_class_of_ones_own():
    """By a function; without one, or with one that does something else, the error says what is missing."""
    config = Fp8Config(recipe="rowwise", rules=(DenseRule(), *default_rules))
    quantized_layers = {Dense: lambda layer, kernel: QuantizedDense(kernel)}
    layer, x = Dense(normal(0, 64, 32)), normal(1, 5, 64)
    trained = fp8_linear_layers(layer, config)
    served = quantize_for_inference(trained, "FP8_DYNAMIC", rules=config.rules, quantized_layers=quantized_layers)
    np.testing.assert_array_equal(eqx.filter_jit(served)(x), eqx.filter_jit(trained)(x))
    # Stored with what is summed over last.
    assert served.kernel.stored.data.array.shape == (32, 64) and dequantize(served).weight.shape == (64, 32)
    with pytest.raises(ValueError, match=r"up is a Dense, which.*exclude the layer"):
        quantize_for_inference({"up": layer}, "FP8_DYNAMIC", rules=config.rules)
    with pytest.raises(ValueError, match=r"quantized_layers\[Dense\] does not.*lambda"):
        quantize_for_inference(layer, "FP8_DYNAMIC", rules=config.rules, quantized_layers={Dense: QuantizedDense})
    with pytest.raises(ValueError, match=r"quantized_layers\[Dense\]\(layer, kernel\) returned None"):
        quantize_for_inference(layer, "FP8_DYNAMIC", rules=config.rules, quantized_layers={Dense: lambda *_: None})
    with pytest.raises(ValueError, match=r"quantized_layers names Dense, but.*rules="):
        quantize_for_inference([layer, equinox_linear()], "FP8_DYNAMIC", quantized_layers=quantized_layers)
    for wrong in ({"Dense": QuantizedDense}, {Dense: None}, QuantizedDense):
        with (
            unchecked(),
            pytest.raises(ValueError, match=r"quantized_layers=.*must be a mapping from"),
        ):
            quantize_for_inference(layer, "FP8_DYNAMIC", rules=config.rules, quantized_layers=wrong)
    with pytest.raises(ValueError, match=r"made for a sum over \(0,\)"):
        served.kernel.dot_general(normal(1, 5, 32), (((1,), (1,)), ((), ())))


@pytest.mark.parametrize("layout", ["FP8_DYNAMIC", "MXFP8"])
def test_a_class_of_ones_own_from_a_folder(layout, tmp_path):
    """Its kernel has the axes of its weight, `[in, out]`, while folders have `[out, in]`."""
    rules = (DenseRule(), *default_rules)
    how = {"rules": rules, "quantized_layers": {Dense: lambda layer, kernel: QuantizedDense(kernel)}}
    layer, x, g = {"up": Dense(normal(0, 64, 32))}, normal(1, 5, 64), normal(2, 5, 32)
    export_model(layer, tmp_path / "out", layout, rules=rules)
    plain, frozen, served = (
        import_model(tmp_path / "out", layer, weights=weights, **how)["up"]
        for weights in ("dequantized", "frozen", "served")
    )
    np.testing.assert_array_equal(dequantize(frozen).weight, plain.weight)
    (out, pullback), (expected, of_plain) = jax.vjp(frozen, x), jax.vjp(plain, x)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pullback(g)[0], of_plain(g)[0], rtol=1e-5, atol=1e-5)
    linear = {"up": eqx.nn.Linear(64, 32, use_bias=False, key=jax.random.key(0))}
    linear = import_model(tmp_path / "out", linear, weights="served")["up"]
    np.testing.assert_array_equal(served(x), jax.vmap(linear)(x))
    with pytest.raises(ValueError, match=r"up is a Dense, which has no.*quantized_layers.*weights='dequantized'"):
        import_model(tmp_path / "out", layer, weights="frozen", rules=rules)


@pytest.mark.parametrize("kind", ["linear", "experts", "embedding", "own"])
def test_frozen_layers_compute_what_plain_ones_do(kind):
    """With their gradients to inputs, also where layers for inference have none."""
    x, sizes = hax.named(normal(1, 6, 64), (Rows, In)), hax.named(jnp.array([2, 0, 4]), Experts)
    how = {
        "rules": (DenseRule(), *default_rules),
        "quantized_layers": {Dense: lambda layer, kernel: QuantizedDense(kernel)},
    }
    layer, call = {
        "linear": (hnn.Linear.init(In, Out, key=jax.random.key(0)), lambda layer, x: layer(x).array),
        "experts": (hnn.MoELinear.init(Experts, In, Out, key=jax.random.key(0)), lambda m, x: m(x, sizes).array),
        "embedding": (hnn.Embedding.init(Out, In, key=jax.random.key(0)), lambda m, x: m.unembed(x).array),
        "own": (Dense(normal(0, 64, 32)), lambda layer, x: layer(x.array)),
    }[kind]
    served = quantize_for_inference({"up": layer}, "FP8_DYNAMIC", targets="up", **how)
    frozen, plain = freeze(served)["up"], dequantize(served)["up"]
    (out, pullback), (expected, of_plain) = (jax.vjp(functools.partial(call, m), x) for m in (frozen, plain))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    g = normal(2, *out.shape)
    np.testing.assert_allclose(pullback(g)[0].array, of_plain(g)[0].array, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="no quantized layer.*quantize_for_inference"):
        freeze(plain)


class Doubled(eqx.nn.Linear):
    """Multiplies otherwise than the class that it extends."""

    def __call__(self, x, *, key=None):
        return 2 * super().__call__(x)


class QuantizedDoubled(QuantizedEquinoxLinear):
    def __call__(self, x, *, key=None):
        return 2 * super().__call__(x)


@dataclasses.dataclass(frozen=True)
class DoubledRule(DenseRule):
    layer_type = Doubled

    def kernel(self, layer):
        return Kernel(layer.weight, layer.in_features, layer.out_features, contracted=(1,))

    def op(self, layer):
        return None


def test_the_class_that_a_built_in_one_is_extended_to():
    """What a rule of its own is for is not served as the class that it extends; and a user's function comes first."""
    layer, x = equinox_linear(), normal(1, 5, 64)
    doubled = Doubled(64, 32, key=jax.random.key(0))
    doubled = eqx.tree_at(lambda x: (x.weight, x.bias), doubled, (layer.weight, layer.bias))
    quantized = lambda layer, **how: quantize_for_inference(layer, "FP8_DYNAMIC", **how)
    rules = (DoubledRule(), *default_rules)
    with pytest.raises(ValueError, match="the model itself is a Doubled, which has no"):
        quantized(doubled, rules=rules)
    served = quantized(doubled, rules=rules, quantized_layers={Doubled: QuantizedDoubled})
    plain = quantized(layer)
    np.testing.assert_array_equal(jax.vmap(served)(x), 2 * jax.vmap(plain)(x))
    # The nearest class decides, and a user's function comes before the built-in one.
    both = {eqx.nn.Linear: QuantizedDoubled, Doubled: QuantizedEquinoxLinear}
    twice, once = quantized([layer, doubled], rules=rules, quantized_layers=both)
    assert (type(twice), type(once)) == (QuantizedDoubled, QuantizedEquinoxLinear)


def test_a_served_model_is_neither_converted_nor_restored_nor_trained():
    """Before a step is compiled, nor a part that has weights; the model that the errors lead to is the plain one."""
    plain = eqx.nn.MLP(64, 64, 64, 4, key=jax.random.key(0))
    served = quantize_for_inference(plain, "W8A16", exclude="layers.1")
    layers = "made by quantize_for_inference: .*the weight of layers.0, layers.2, layers.3 and 1 more"
    with pytest.raises(ValueError, match=f"module was {layers}. Convert the.*serving.dequantize.model."):
        fp8_linear_layers(served)
    others = ("layers.0", "layers.2", "layers.3", "layers.4")
    assert fp8_linear_layers(served, exclude=others).layers[0] is served.layers[0]
    with pytest.raises(ValueError, match=f"model was {layers}. Restore the.*serving.dequantize.model."):
        restore_linear_layers(served)
    with pytest.raises(ValueError, match=f"model was {layers}. Train the.*serving.dequantize.model."):
        TrainStep(lambda model, x: jax.vmap(model)(x).sum(), optax.sgd(0.1)).init(served)
    with pytest.raises(ValueError, match="the weight of the model itself. Restore"):
        restore_linear_layers(served.layers[0])
    assert jax.tree.structure(restore_linear_layers(dequantize(served))) == jax.tree.structure(plain)


def test_errors():
    """Each says what to do instead."""
    layer, x = equinox_linear(), normal(1, 5, 64)
    served = quantize_for_inference(layer, "FP8_DYNAMIC")
    with pytest.raises(ValueError, match=r"was differentiated, but it keeps nothing for gradients"):
        jax.grad(lambda x: jax.vmap(served)(x).sum())(x)
    # Neither parameters, nor cast with them.
    np.testing.assert_array_equal(eqx.filter_grad(lambda model: jax.vmap(model)(x).sum())(served).bias, 5.0)
    assert jax.tree.leaves(trainable(served)) == [served.bias]
    assert cast_params(served, jnp.bfloat16).kernel.stored.scale.array is served.kernel.stored.scale.array
    with pytest.raises(ValueError, match="without its FP8 state.*give the model itself, quantize_for_inference"):
        quantize_for_inference(trainable(fp8_linear_layers(layer)), "FP8")
    with pytest.raises(ValueError, match="layout='FP8_DYNAMICS' is unknown; the nearest are 'FP8_DYNAMIC'"):
        quantize_for_inference(layer, "FP8_DYNAMICS")
    with pytest.raises(ValueError, match="exclude='up' selects no layer"):
        quantize_for_inference({"down": layer}, "FP8_DYNAMIC", exclude="up")
    with pytest.raises(ValueError, match="holds an infinity or NaN"):
        quantize_for_inference(
            eqx.tree_at(lambda l: l.weight, layer, layer.weight.at[0, 0].set(jnp.nan)), "FP8_DYNAMIC"
        )
    with pytest.raises(ValueError, match="extra axes of a stack or an ensemble; call"):
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), layer)
        quantize_for_inference(stacked, "FP8_DYNAMIC")(x[0])
    with pytest.raises(ValueError, match="quantized for products in float32, whose scales differ"):
        calibrated_layer = quantize_for_inference(calibrated(layer, x), "FP8")
        calibrated_layer.kernel.dot_general(x[0].astype(jnp.bfloat16), (((0,), (1,)), ((), ())), jnp.bfloat16)
    with pytest.raises(ValueError, match="quantized for products in float32, whose scales differ"):
        in_four = quantize_for_inference(layer, "NVFP4_DYNAMIC").kernel
        in_four.dot_general(x[0].astype(jnp.bfloat16), (((0,), (1,)), ((), ())), jnp.bfloat16)
    with pytest.raises(ValueError, match="odd number of inputs, 63, and layout='NVFP4_DYNAMIC' has two in each byte"):
        quantize_for_inference(eqx.nn.Linear(63, 32, key=jax.random.key(0)), "NVFP4_DYNAMIC")
    linear = hnn.Linear.init(In, Out, key=jax.random.key(0))
    with pytest.raises(ValueError, match="but lack \\['inputs'\\], which the layer sums over"):
        quantize_for_inference(linear, "FP8_DYNAMIC")(hax.ones(Out))
    for layout, message in (
        (dataclasses.replace(layouts["MXFP8"], inputs=None), "dequantized copy"),
        (dataclasses.replace(layouts["MXFP8"], inputs=Inputs("token")), "no hardware multiplies blocks"),
        (dataclasses.replace(layouts["FP8_BLOCK"], size=(1, 128)), r"scales for blocks of \(1, 128\)"),
        (Layout("channel", Inputs("token", size=16)), "two levels of scales, by weights in FP8"),
        (dataclasses.replace(layouts["NVFP4_DYNAMIC"], inputs=Inputs("token")), "those of NVFP4_DYNAMIC"),
        (Layout("channel", Inputs("token", bound=1200.0)), "activation_scale_ub=1200"),
        (Layout("channel", ignore=("lm_head",)), "take layout.of_one_layer, and exclude"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_for_inference(linear, layout)
    with pytest.raises(ValueError, match="strategy='row' of Layout is unknown; use one of 'tensor'"):
        Layout("row")
    with pytest.raises(ValueError, match="strategy='channel' of Inputs is unknown; use one of 'tensor'"):
        Inputs("channel")
    with pytest.raises(ValueError, match="size=None of Layout: a block needs"):
        Layout("block", Inputs("token"))
    with pytest.raises(ValueError, match="size=0 of Inputs: a group needs"):
        Inputs("group")


def test_rows_of_no_expert_do_not_enter_the_scale_of_the_others():
    """As in training: what a buffer holds beyond the last expert's rows is in no product."""
    axes = hax.make_axes(experts=3, inputs=64, outputs=32)
    layer = {"up": hnn.MoELinear.init(*axes, key=jax.random.key(0))}
    x = hax.random.normal(jax.random.key(1), (hax.Axis("rows", 20), axes[1]))
    x = hax.named(x.array.at[15:].set(1e8), x.axes)
    sizes = hax.named(jnp.array([7, 0, 8]), axes[0])
    trained = fp8_linear_layers(layer, recipe="current")
    served = quantize_for_inference(trained, Layout("tensor", Inputs("tensor")))
    np.testing.assert_array_equal(served["up"](x, sizes).array[:15], trained["up"](x, sizes).array[:15])
