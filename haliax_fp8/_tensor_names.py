"""What a tensor is, by its name: the names in models of Hugging Face, and in those of this package."""

import re
from collections.abc import Iterable


_EMBEDDINGS = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe|shared)$")
_NORMS = re.compile(r"(^|\.)(\w*norm\w*|ln_\w+)$")
# What models of Hugging Face call tables of embeddings, and nothing else.
_TABLES = re.compile(
    r"(^|\.)(embed_tokens|embed_positions|tok_embeddings|(word|position)_embeddings|wte|wpe)$|^shared$"
)
# Blocks have outputs too, so the last names are a head's only where no block is.
_HEADS = re.compile(
    r"(^|\.)(lm_head|head|score|classifier|embed_out|unembed|logits|to_logits)$|^(\w+\.)?out(put)?_layer$|^output$"
)
_ROUTERS = re.compile(r"(^|\.)(\w*router|shared_expert_gate)(\.|$)")

WEIGHT = ".weight"

SAME_INPUT: tuple[tuple[str, ...], ...] = (
    ("query", "key", "value"),
    ("q_proj", "k_proj", "v_proj"),
    ("query_proj", "key_proj", "value_proj"),
    ("gate", "up"),
    ("gate_proj", "up_proj"),
)
"""Names of layers that share an input in Hugging Face's, Haliax's, Levanter's and Equinox's modules: q/k/v and gate/up.

Engines make one layer of each.
"""

JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layers that some checkpoints hold as one, their outputs one after the other."""


def is_embedding(layer: str) -> bool:
    """Whether a layer is a table of vectors, or of positions."""
    return bool(_EMBEDDINGS.search(layer)) and not is_head(layer)


def is_table(layer: str) -> bool:
    """Whether a layer is surely an embedding: no linear layer has such a name."""
    return bool(_TABLES.search(layer))


def is_norm(layer: str) -> bool:
    """Whether a layer scales its input."""
    return bool(_NORMS.search(layer))


def is_head(layer: str) -> bool:
    """Whether a layer makes logits."""
    return bool(_HEADS.search(layer))


def is_router(layer: str, names: Iterable[str]) -> bool:
    """Whether a layer chooses experts; one called `gate` does if experts are beside it, else it is that of a unit.

    Args:
        layer: Its name.
        names: The names of all layers, or of all tensors.
    """
    parent, _, last = layer.rpartition(".")
    beside = f"{parent}.experts".removeprefix(".")
    return bool(_ROUTERS.search(layer)) or (last == "gate" and any(name.startswith(beside) for name in names))


def is_linear(layer: str, axes: int) -> bool:
    """Whether a weight may be that of linear layers: a matrix, or one for each expert.

    Args:
        layer: The layer's name.
        axes: The axes of its weight.
    """
    return axes in (2, 3) and not is_embedding(layer) and not is_norm(layer)
