"""Whether the sizes in `config.json` are those of the tensors."""

import re
from collections.abc import Iterator
from typing import Any

from .._tensor_names import JOINED, WEIGHT
from .families import FAMILIES, Family
from .folder import CONFIG, TensorFolder
from .layout import FLOATS


_SIZES = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size"),
)
_BLOCK = re.compile(r"^(.*\blayers)\.(\d+)\.")

# What models are stored and computed in.
_DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float", "float64", "double")


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
        if (family := FAMILIES.get(str(folder.config.get("model_type")))) is not None:
            yield from _shapes(folder, family, plain_only)
            yield from () if plain_only else _missing(folder, family)


def multiplies_by_norms(folder: TensorFolder) -> bool:
    """Whether a model is known, and a norm's weight multiplies."""
    family = FAMILIES.get(str(folder.config.get("model_type")))
    return family is not None and family.norms_multiply


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**63


def _blocks(folder: TensorFolder) -> Iterator[tuple[str, str, str, str]]:
    """The numbers of blocks: all from 0 on, as many as the configuration says."""
    key, by_prefix = "num_hidden_layers", {}
    for match in filter(None, map(_BLOCK.match, folder.tensors)):
        by_prefix.setdefault(match[1], set()).add(int(match[2]))
    count, more = folder.config.get(key), folder.config.get("num_nextn_predict_layers")
    if count is None or len(by_prefix) != 1:
        return  # An encoder beside a decoder has its own number.
    ((prefix, numbers),) = by_prefix.items()
    remedy = f"set it to {len(numbers)}, or copy all files of the folder"
    if missing := sorted(set(range(min(count, 100_000))) - numbers):
        yield CONFIG, key, f"it is {count}, but no tensor is named {prefix}.{missing[0]}", remedy
    last = count + (more if _is_size(more) else 0)
    if surplus := sorted(number for number in numbers if number >= last):
        yield CONFIG, key, f"it is {count}, and there are tensors of {prefix}.{surplus[0]}", remedy


def _shapes(folder: TensorFolder, family: Family, plain_only: bool) -> Iterator[tuple[str, str, str, str]]:
    for name, stored in folder.tensors.items():
        is_looked_at = name.endswith(WEIGHT) and not (plain_only and stored.dtype not in FLOATS)
        expected = family.shape(name.removesuffix(WEIGHT), folder.config) if is_looked_at else None
        if expected is not None and stored.shape != expected:
            is_transposed = stored.shape == expected[::-1]
            hint = "; it is transposed: weights are [out, in]" if is_transposed else ""
            remedy = "transpose it" if is_transposed else "correct the sizes in config.json, or copy the right weights"
            problem = f"it has shape {stored.shape}, and config.json says {expected}{hint}"
            yield stored.file.name, stored.name, problem, remedy


def _missing(folder: TensorFolder, family: Family) -> Iterator[tuple[str, str, str, str]]:
    config, tensors = folder.config, folder.tensors
    joined = {part: whole for whole, parts in JOINED.items() for part in parts}
    for block in sorted({match[0] for match in map(_BLOCK.match, tensors) if match}):
        for name in family.layers_of_block:
            parent, _, last = name.rpartition(".")
            wholes = [f"{block}{parent}.{joined[last]}"] if last in joined else []
            if not any(f"{layer}{WEIGHT}" in tensors for layer in (f"{block}{name}", *wholes)):
                problem = "no file has it, and a model of this type needs it"
                yield (CONFIG, f"{block}{name}{WEIGHT}", problem, "copy all files of the folder, or export it again")
    is_causal = any("CausalLM" in str(name) for name in config.get("architectures") or [])
    has_embedding = any(name.endswith("embed_tokens.weight") for name in tensors)
    tied = "tie_word_embeddings"
    if has_embedding and is_causal and not config.get(tied) and "lm_head.weight" not in tensors:
        yield CONFIG, tied, "it is not true, but lm_head.weight is missing", "set it to true, or add the head"
