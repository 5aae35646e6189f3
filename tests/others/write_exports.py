"""Writes what `read_exports.py` compares: a small Llama in every layout, and what this library computes of it.

python tests/others/write_exports.py FOLDER
"""

import dataclasses
import json
import pathlib
import sys
from functools import partial

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from examples.byte_tokenizer import write_byte_tokenizer
from examples.generate import generate
from haliax_fp8 import calibrate, cast_params, fp8_linear_layers, restore_linear_layers
from haliax_fp8.huggingface import (
    convert_folder,
    export_model,
    hugging_face_config,
    import_model,
    load,
    names,
    serving_tensors,
)
from haliax_fp8.layouts import named
from haliax_fp8.models import MixtureOfExperts, Transformer, TransformerConfig
from haliax_fp8.recipes import E4M3, quantize


CONFIG = TransformerConfig(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=64, mlp=384)


def main(folder: pathlib.Path) -> None:
    """Exports, logits in float32 of the plain model, and the weights as this library dequantizes them."""
    plain = Transformer.init(CONFIG, key=jax.random.key(0))
    text = np.frombuffer(b"The statement to the sequence is the sequence.", np.uint8).astype(np.int32)
    tokens = hax.named(jnp.asarray(text)[None], ("batch", "position"))
    model = fp8_linear_layers(plain, exclude="head")
    loss = lambda m, t: jnp.mean(jnp.square(cast_params(m, jnp.bfloat16)(t).array.astype(jnp.float32)))
    model = calibrate(model, loss, [tokens])
    expected = {"tokens": text[None], "logits": np.asarray(eqx.filter_jit(lambda m, t: m(t).array)(plain, tokens))}
    for layout in (*named, "FP32"):
        quantized = layout != "FP32"
        dtype = "bfloat16" if quantized else "float32"
        options = {"names": names.LLAMA, "hf_config": hugging_face_config(plain, dtype=dtype), "dtype": dtype}
        export_model(model, folder / layout, layout if quantized else "BF16", **options)
        write_byte_tokenizer(folder / layout, max_length=CONFIG.max_length)
        if quantized:
            loaded = import_model(folder / layout, plain, names=names.LLAMA)
            for part in ("gate", "down"):
                weight = getattr(loaded.blocks.stacked.mlp, part).weight.array[1]
                expected[f"{layout}/model.layers.1.mlp.{part}_proj.weight"] = np.asarray(weight)
            query = loaded.blocks.stacked.attention.query.weight.array[0].reshape(-1, CONFIG.hidden)
            expected[f"{layout}/model.layers.0.self_attn.q_proj.weight"] = np.asarray(query)
    expected |= log_probabilities(folder / "FP8_DYNAMIC", model, tokens)
    write_stream(folder)
    write_experts(folder / "experts", tokens, expected)
    write_tied(folder / "tied", tokens, expected)
    write_layer(folder / "FP8_DYNAMIC", plain, expected)
    x = jax.random.normal(jax.random.key(1), (64, CONFIG.hidden), jnp.bfloat16)
    expected |= product(folder / "FP8", plain, x)
    export_model(model, folder / "sharded", shard_bytes=200_000)
    write_byte_tokenizer(folder / "sharded", max_length=CONFIG.max_length)
    np.savez(folder / "expected.npz", **expected)


def log_probabilities(folder: pathlib.Path, model: Transformer, tokens: hax.NamedArray) -> dict[str, np.ndarray]:
    """In bfloat16: of the export as served, of training, of the plain model; and of training rounded otherwise."""

    def log_p(model: Transformer, *, rounded: bool = False) -> np.ndarray:
        call = jax.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens).array.astype(jnp.float32)))
        options = {"xla_allow_excess_precision": False} if rounded else {}
        return np.asarray(call.lower(model, tokens).compile(options)(model, tokens)[0])

    trained = cast_params(model, jnp.bfloat16)
    abstract = eqx.filter_eval_shape(lambda: cast_params(restore_linear_layers(model), jnp.bfloat16))
    served = import_model(folder, abstract, names=names.LLAMA, weights="served")
    return {
        "log_p/served": log_p(served),
        "log_p/training": log_p(trained),
        "log_p/plain": log_p(restore_linear_layers(trained)),
        "log_p/training, rounded otherwise": log_p(trained, rounded=True),
    }


def write_stream(folder: pathlib.Path) -> None:
    """Another model, as a folder and as what `serving_tensors` yields."""
    other = Transformer.init(CONFIG, key=jax.random.key(7))
    export_model(other, folder / "other", names=names.LLAMA, hf_config=hugging_face_config(other))
    write_byte_tokenizer(folder / "other", max_length=CONFIG.max_length)
    arrays = dict(serving_tensors(other, "FP8_DYNAMIC", names=names.LLAMA))
    bits = {f"bits/{name}": x.view(f"uint{8 * x.dtype.itemsize}") for name, x in arrays.items()}
    np.savez(folder / "stream.npz", names=list(arrays), dtypes=[x.dtype.name for x in arrays.values()], **bits)


def write_experts(folder: pathlib.Path, tokens: hax.NamedArray, expected: dict[str, np.ndarray]) -> None:
    """A Mixtral, unquantized and in two layouts, its logits, and experts as this library dequantizes them."""
    config = dataclasses.replace(CONFIG, feed_forward=partial(MixtureOfExperts.init, experts=4, chosen=2))
    model = Transformer.init(config, key=jax.random.key(0))
    expected["experts/logits"] = np.asarray(eqx.filter_jit(lambda m, t: m(t).array)(model, tokens))
    for layout, dtype in (("BF16", "float32"), ("FP8_DYNAMIC", "bfloat16"), ("HF_FP8", "bfloat16")):
        described = hugging_face_config(model, dtype=dtype)
        export_model(model, folder / layout, layout, names=names.MIXTRAL, hf_config=described, dtype=dtype)
        if layout != "BF16":
            loaded = import_model(folder / layout, model, names=names.MIXTRAL)
            weight = loaded.blocks.stacked.mlp.down.weight.array[1]
            expected[f"experts/{layout}"] = np.asarray(jnp.swapaxes(weight, 1, 2))


def write_tied(folder: pathlib.Path, tokens: hax.NamedArray, expected: dict[str, np.ndarray]) -> None:
    """A tied Qwen3: exported in every layout, and converted; its logits, as dequantized; and text with its end."""
    config = dataclasses.replace(CONFIG, tied_head=True, query_key_norm=True)
    trained = Transformer.init(config, key=jax.random.key(2))
    loss = lambda m, t: jnp.mean(jnp.square(cast_params(m, jnp.bfloat16)(t).array.astype(jnp.float32)))
    model = calibrate(fp8_linear_layers(trained), loss, [tokens])
    source = folder / "source"
    export_model(trained, source, "BF16")
    write_byte_tokenizer(source, max_length=CONFIG.max_length)
    prompt = tokens.array[0]
    text = generate(load(source, dtype="float32"), prompt, count=24)
    # The first token that the text does not begin with ends it.
    end = int(text[np.argmax(text != text[0])])
    described = json.loads((source / "config.json").read_text()) | {"eos_token_id": end}
    (source / "config.json").write_text(json.dumps(described))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [end], "do_sample": False}))
    for layout in named:
        export_model(model, folder / layout, layout, like=source)
    for layout in ("FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "W8A16", "HF_FP8"):
        convert_folder(source, folder / f"converted-{layout}", layout)
    export_model(load(source, dtype="float32"), folder / "BF16", "BF16", like=source, dtype="float32")
    call = eqx.filter_jit(lambda m, t: m(t).array.astype(jnp.float32))
    for path in sorted(path for path in folder.iterdir() if path != source):
        loaded = load(path, dtype="float32")
        expected[f"tied/{path.name}"] = np.asarray(call(loaded, tokens))
        expected[f"tied text/{path.name}"] = generate(loaded, prompt, count=24, stop=[end])


def write_layer(folder: pathlib.Path, plain: Transformer, expected: dict[str, np.ndarray]) -> None:
    """The output of one served layer in float32, where nothing but the formats of FP8 is rounded."""
    abstract = eqx.filter_eval_shape(lambda: plain)
    layer = import_model(folder, abstract, names=names.LLAMA, weights="served").blocks.blocks[1].mlp.down
    x = hax.random.normal(jax.random.key(3), (hax.Axis("batch", 1), hax.Axis("position", 64), CONFIG.Mlp))
    expected |= {"layer/x": np.asarray(x.array), "layer/y": np.asarray(eqx.filter_jit(layer)(x).array)}


def product(folder: pathlib.Path, plain: Transformer, x: jax.Array) -> dict[str, np.ndarray]:
    """Input bytes and output bits of one layer: the products that this library multiplies, of the exported numbers."""
    frozen = import_model(folder, plain, names=names.LLAMA, weights="frozen").blocks.stacked.mlp.gate.kernel
    assert isinstance(frozen.input_scale, hax.NamedArray)
    words = (a.array[1] for a in (frozen.data, frozen.scale, frozen.input_scale) if isinstance(a, hax.NamedArray))
    data, scale, input_scale = words
    weight = lax.bitcast_convert_type(data, jnp.float8_e4m3fn)
    scales = [lax.bitcast_convert_type(s, jnp.float32) for s in (input_scale, scale[0, 0])]
    q = quantize(x, scales[0], E4M3).data
    out = lax.dot_general(q, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    out = (out * (scales[0] * scales[1])).astype(jnp.bfloat16)
    bits = {"product/x": (x, jnp.uint16), "product/input": (q, jnp.uint8), "product/out": (out, jnp.uint16)}
    return {name: np.asarray(lax.bitcast_convert_type(array, kind)) for name, (array, kind) in bits.items()}


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
