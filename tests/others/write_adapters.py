"""Writes what `read_adapters.py` loads into PEFT: adapters for an FP8 folder, its model, and both merged.

python tests/others/write_adapters.py FOLDER
"""

import dataclasses
import pathlib
import sys

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from haliax_fp8 import TrainStep
from haliax_fp8.huggingface import export_adapter, export_model, load
from haliax_fp8.models import Transformer, TransformerConfig, add_lora, merge_lora
from haliax_fp8.serving import dequantize


CONFIG = TransformerConfig(layers=2, hidden=128, heads=4, kv_heads=2, head_dim=64, mlp=384)


def main(folder: pathlib.Path) -> None:
    """A Llama with adapters on all layers, and a Qwen3 with some on two."""
    write(folder / "llama", CONFIG, targets=None)
    write(folder / "qwen3", dataclasses.replace(CONFIG, query_key_norm=True), targets=["query", "down"])


def write(folder: pathlib.Path, config: TransformerConfig, targets: list[str] | None) -> None:
    """Trains adapters for a few steps; writes folders, and the logits of the model with adapters."""
    export_model(Transformer.init(config, key=jax.random.key(0)), folder / "FP8_DYNAMIC", "FP8_DYNAMIC")
    base = load(folder / "FP8_DYNAMIC", weights="frozen", dtype=jnp.float32)
    model = add_lora(base, rank=4, alpha=12, targets=targets, key=jax.random.key(1))
    tokens = hax.named(jax.random.randint(jax.random.key(2), (2, 24), 0, config.vocab), ("batch", "position"))
    step = TrainStep(lambda model, tokens: jnp.square(model(tokens).array).mean(), optax.adam(0.01))
    opt_state = step.init(model)
    for _ in range(5):
        model, opt_state, _ = step(model, opt_state, tokens)
    export_adapter(model, folder / "adapter", base=folder / "base")
    export_model(dequantize(base), folder / "base", "BF16", dtype="float32")
    export_model(merge_lora(model), folder / "merged", "BF16", dtype="float32")
    with jax.default_matmul_precision("highest"):
        logits = {name: np.asarray(each(tokens).array) for name, each in (("base", base), ("adapter", model))}
    np.savez(folder / "expected.npz", tokens=np.asarray(tokens.array), **logits)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
