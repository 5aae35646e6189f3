"""Whether the sizes in `config.json` are those of the tensors."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ...layers.tensor_names import WEIGHT
from ..files import TensorFolder
from .report import Fault


CONFIG = "config.json"

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
# Model types whose layers have the shapes below.
_LLAMA_LIKE = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
_BLOCK = re.compile(r"^(.*\blayers)\.(\d+)\.")


def size_faults(folder: TensorFolder) -> Iterator[Fault]:
    """Tensors that are missing, or have another shape than the configuration says.

    Args:
        folder: The folder.
    """
    config = folder.config
    wrong = [name for name in _SIZES if config.get(name) is not None and not _is_size(config[name])]
    if wrong:
        for name in wrong:
            yield Fault(CONFIG, name, f"it is {config[name]!r:.40}, but must be a positive whole number")
        return
    yield from _blocks(folder)
    if config.get("model_type") in _LLAMA_LIKE:
        yield from _llama_like(folder)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**63


def _blocks(folder: TensorFolder) -> Iterator[Fault]:
    """The numbers of blocks: all from 0 on, as many as the configuration says."""
    count = folder.config.get("num_hidden_layers")
    found: dict[str, set[int]] = {}
    for name in folder.tensors:
        if match := _BLOCK.match(name):
            found.setdefault(match[1], set()).add(int(match[2]))
    if count is None or len(found) != 1:
        return  # An encoder beside a decoder has its own number.
    ((prefix, numbers),) = found.items()
    more = folder.config.get("num_nextn_predict_layers")
    last = count + (more if _is_size(more) else 0)
    if missing := sorted(set(range(min(count, 100_000))) - numbers):
        yield Fault(CONFIG, "num_hidden_layers", f"it is {count}, but no tensor is named {prefix}.{missing[0]}")
    if surplus := sorted(number for number in numbers if number >= last):
        yield Fault(CONFIG, "num_hidden_layers", f"it is {count}, and there are tensors of {prefix}.{surplus[0]}")


def _llama_like(folder: TensorFolder) -> Iterator[Fault]:
    config = folder.config
    for name, stored in folder.tensors.items():
        expected = _shape(name, config)
        if expected is None or stored.shape == expected:
            continue
        hint = "; it is transposed: weights are [out, in]" if stored.shape == expected[::-1] else ""
        yield Fault(stored.file.name, name, f"it has shape {stored.shape}, and config.json says {expected}{hint}")
    tensors = folder.tensors
    layers = {match[0] for name in tensors if (match := _BLOCK.match(name))}
    for layer in sorted(layers):
        attention = (f"{layer}self_attn.",)
        mlp = (f"{layer}mlp.", f"{layer}block_sparse_moe.")
        for part, options in (
            (attention, (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))),
            (attention, (("o_proj",),)),
        ):
            yield from _required(folder, part[0], options)
        if not any(".experts." in name for name in tensors if name.startswith(mlp)):
            yield from _required(folder, mlp[0], (("gate_proj", "up_proj"), ("gate_up_proj",)))
            yield from _required(folder, mlp[0], (("down_proj",),))
    embedding = any(name.endswith("embed_tokens.weight") for name in tensors)
    is_causal = any("CausalLM" in str(name) for name in config.get("architectures") or [])
    if embedding and is_causal and not config.get("tie_word_embeddings") and "lm_head.weight" not in tensors:
        yield Fault(CONFIG, "tie_word_embeddings", "it is not true, but lm_head.weight is missing")


def _required(folder: TensorFolder, parent: str, options: tuple[tuple[str, ...], ...]) -> Iterator[Fault]:
    """One of several ways to hold the same layers has to be there in full."""
    if any(all(f"{parent}{name}{WEIGHT}" in folder.tensors for name in names) for names in options):
        return
    missing = next(name for name in options[0] if f"{parent}{name}{WEIGHT}" not in folder.tensors)
    yield Fault(CONFIG, f"{parent}{missing}{WEIGHT}", "no file has it, and a model of this type needs it")


def _shape(name: str, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The shape of a tensor; None if the configuration does not say it."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not hidden or not heads or not name.endswith(WEIGHT):
        return None
    head = config.get("head_dim") or hidden // heads
    query, key = heads * head, (config.get("num_key_value_heads") or heads) * head
    is_expert = ".experts." in name
    inner = config.get("moe_intermediate_size") if is_expert else config.get("intermediate_size")
    inner = inner or config.get("intermediate_size")
    vocabulary = config.get("vocab_size")
    if "shared_expert" in name:
        return None
    match name.removesuffix(WEIGHT).rpartition(".")[2]:
        case "q_proj":
            return query, hidden
        case "k_proj" | "v_proj":
            return key, hidden
        case "o_proj":
            return hidden, query
        case "qkv_proj":
            return query + 2 * key, hidden
        case "gate_proj" | "up_proj" if inner:
            return inner, hidden
        case "gate_up_proj" if inner:
            return 2 * inner, hidden
        case "down_proj" if inner:
            return hidden, inner
        case "embed_tokens" | "lm_head" if vocabulary:
            return vocabulary, hidden
        case "input_layernorm" | "post_attention_layernorm":
            return (hidden,)
    return None
