"""What a folder holds beside its tensors: its configuration, and the files that make a model speak and stop."""

import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._tensor_names import is_head
from ..layouts import Layout
from .folder import CONFIG, file_inside
from .layout import KEY, MODELOPT, config_files


HEAD, EMBEDDING, TIED = "lm_head", "embed_tokens.weight", "tie_word_embeddings"

# Weights, and what is true of weights alone.
_OF_WEIGHTS = re.compile(
    rf"{re.escape(CONFIG)}|{re.escape(MODELOPT)}|adapter_config\.json|.*\.index\.json"
    r"|.*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx)"
)


def is_language_model(config: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a model that writes text."""
    names = config.get("architectures") or []
    return any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration")) for name in names)


def has_tied_head(config: Mapping[str, Any], layers: Iterable[str]) -> bool:
    """Whether engines build a head that no tensor is for, and give it the embedding.

    Where the configuration does not say, a language model without a head has such a one.

    Args:
        config: What `config.json` holds.
        layers: The names of all layers that have a weight.
    """
    said = config.get(TIED)
    return bool(is_language_model(config) if said is None else said) and not any(map(is_head, layers))


def left_alone(config: Mapping[str, Any], plain: Sequence[str], layers: Iterable[str]) -> tuple[str, ...]:
    """The layers that a configuration has to list as not quantized.

    Transformers builds a tied head as a linear layer, and would take its scales from memory that nothing wrote.

    Args:
        config: What `config.json` holds.
        plain: The layers whose matrices are in high precision.
        layers: As in `has_tied_head`.
    """
    return (*plain, HEAD) if has_tied_head(config, layers) else tuple(plain)


def with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A configuration that says in which dtype its weights are, by the key that it has: engines cast them to that.

    Args:
        config: What `config.json` holds; if that is nothing, nothing is added.
        dtype: The dtype's name.
    """
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    return {**config, **dict.fromkeys(keys, dtype)} if config else {}


def write_config(folder: pathlib.Path, config: Mapping[str, Any], layout: Layout | None, ignore: Sequence[str]) -> None:
    """Writes `config.json`, and what a layout has beside it.

    Args:
        folder: Where to.
        config: What it says of the model. What it says of another layout is left out.
        layout: The layout; None if nothing is quantized.
        ignore: What `left_alone` returned.
    """
    of_layout, files = ({}, {}) if layout is None else config_files(layout, ignore)
    of_model = {name: value for name, value in config.items() if name not in (KEY, "compression_config")}
    for name, content in {**files, CONFIG: {**of_model, **of_layout}}.items():
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def copy_others(old: str | os.PathLike[str], new: pathlib.Path, *, follow_links: bool) -> None:
    """Copies a folder's files, such as the tokenizer's, but for weights and what describes those.

    Args:
        old: The folder.
        new: Where to.
        follow_links: Whether files may be links that lead out of the folder.

    Raises:
        BrokenCheckpoint: If one is a link out of the folder, and may not be.
    """
    for path in sorted(pathlib.Path(old).iterdir()):
        if path.is_file() and not _OF_WEIGHTS.fullmatch(path.name):
            shutil.copyfile(file_inside(pathlib.Path(old), path.name, "", follow_links), new / path.name)
