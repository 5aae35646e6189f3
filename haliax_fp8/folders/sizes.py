"""Whether the sizes in `config.json` are those of the tensors."""

import re
from collections.abc import Iterator
from typing import Any

from .._tensor_names import WEIGHT
from .folder import CONFIG, TensorFolder
from .layout import FLOATS


_SIZES = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size"),
)
# Model types whose layers have the shapes below.
_LLAMA_LIKE = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
_BLOCK = re.compile(r"^(.*\blayers)\.(\d+)\.")

# What models are stored and computed in.
_DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float", "float64", "double")

# What a block needs, each in one of several ways.
_ATTENTION = ((("q_proj", "k_proj", "v_proj"), ("qkv_proj",)), (("o_proj",),))
_MLP = ((("gate_proj", "up_proj"), ("gate_up_proj",)), (("down_proj",),))


def size_faults(folder: TensorFolder, *, plain_only: bool = False) -> Iterator[tuple[str, str, str, str]]:
    """File, tensor, problem and remedy, for tensors that are missing or have another shape than config.json says.

    Args:
        folder: The folder.
        plain_only: Whether only tensors in high precision are looked at; others may have any names and shapes.
    """
    config = folder.config
    wrong = [name for name in _SIZES if config.get(name) is not None and not _is_size(config[name])]
    for name in wrong:
        problem = f"it is {config[name]!r:.40}, but must be a positive whole number"
        yield CONFIG, name, problem, "write the model's size"
    for name in ("dtype", "torch_dtype"):
        value = config.get(name)
        if value is not None and not (isinstance(value, str) and value.removeprefix("torch.") in _DTYPES):
            yield CONFIG, name, f"it is {value!r:.40}, which is not a dtype of models", "write 'bfloat16', for example"
    if not wrong:
        yield from _blocks(folder)
        if multiplies_by_norms(folder):
            yield from _shapes(folder, plain_only)
            yield from () if plain_only else _missing(folder)


def multiplies_by_norms(folder: TensorFolder) -> bool:
    """Whether a model is like Llama: its layers have the usual names and shapes, and a norm's weight multiplies."""
    return folder.config.get("model_type") in _LLAMA_LIKE


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**63


def _blocks(folder: TensorFolder) -> Iterator[tuple[str, str, str, str]]:
    """The numbers of blocks: all from 0 on, as many as the configuration says."""
    key, found = "num_hidden_layers", {}
    for match in filter(None, map(_BLOCK.match, folder.tensors)):
        found.setdefault(match[1], set()).add(int(match[2]))
    count, more = folder.config.get(key), folder.config.get("num_nextn_predict_layers")
    if count is None or len(found) != 1:
        return  # An encoder beside a decoder has its own number.
    ((prefix, numbers),) = found.items()
    remedy = f"set it to {len(numbers)}, or copy all files of the folder"
    if missing := sorted(set(range(min(count, 100_000))) - numbers):
        yield CONFIG, key, f"it is {count}, but no tensor is named {prefix}.{missing[0]}", remedy
    last = count + (more if _is_size(more) else 0)
    if surplus := sorted(number for number in numbers if number >= last):
        yield CONFIG, key, f"it is {count}, and there are tensors of {prefix}.{surplus[0]}", remedy


def _shapes(folder: TensorFolder, plain_only: bool) -> Iterator[tuple[str, str, str, str]]:
    for name, stored in folder.tensors.items():
        expected = None if plain_only and stored.dtype not in FLOATS else _shape(name, folder.config)
        if expected is not None and stored.shape != expected:
            is_transposed = stored.shape == expected[::-1]
            hint = "; it is transposed: weights are [out, in]" if is_transposed else ""
            remedy = "transpose it" if is_transposed else "correct the sizes in config.json, or copy the right weights"
            problem = f"it has shape {stored.shape}, and config.json says {expected}{hint}"
            yield stored.file.name, stored.name, problem, remedy


def _missing(folder: TensorFolder) -> Iterator[tuple[str, str, str, str]]:
    config, tensors = folder.config, folder.tensors
    for block in sorted({match[0] for match in map(_BLOCK.match, tensors) if match}):
        mlp = f"{block}mlp.", f"{block}block_sparse_moe."
        has_experts = any(".experts." in name for name in tensors if name.startswith(mlp))
        for parent, parts in ((f"{block}self_attn.", _ATTENTION), (mlp[0], () if has_experts else _MLP)):
            for ways in parts:
                absent = [[n for name in way if (n := f"{parent}{name}{WEIGHT}") not in tensors] for way in ways]
                if all(absent):
                    problem = "no file has it, and a model of this type needs it"
                    yield CONFIG, absent[0][0], problem, "copy all files of the folder, or export the model again"
    is_causal = any("CausalLM" in str(name) for name in config.get("architectures") or [])
    has_embedding = any(name.endswith("embed_tokens.weight") for name in tensors)
    tied = "tie_word_embeddings"
    if has_embedding and is_causal and not config.get(tied) and "lm_head.weight" not in tensors:
        yield CONFIG, tied, "it is not true, but lm_head.weight is missing", "set it to true, or add the head"


def _shape(name: str, config: dict[str, Any]) -> tuple[int, ...] | None:
    """The shape of a tensor; None if the configuration does not say it."""
    hidden, heads, vocabulary = (config.get(key) for key in ("hidden_size", "num_attention_heads", "vocab_size"))
    if not hidden or not heads or not name.endswith(WEIGHT) or "shared_expert" in name:
        return None
    head = config.get("head_dim") or hidden // heads
    query, key = heads * head, (config.get("num_key_value_heads") or heads) * head
    inner = config.get("intermediate_size")
    inner = (config.get("moe_intermediate_size") or inner) if ".experts." in name else inner
    shapes = {
        **{"q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, query)},
        **{"qkv_proj": (query + 2 * key, hidden), "gate_proj": (inner, hidden), "up_proj": (inner, hidden)},
        **{"gate_up_proj": (2 * (inner or 0), hidden), "down_proj": (hidden, inner)},
        **{"embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden)},
        **{"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)},
    }
    shape = shapes.get(name.removesuffix(WEIGHT).rpartition(".")[2], (None,))
    return shape if all(shape) else None
