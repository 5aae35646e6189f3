"""What `config.json` says of a model that is exported: as the folder that it came from, if that still describes it."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax

from ..folders.beside import TIED, with_dtype
from ..folders.folder import TensorFolder
from ..folders.layout import FLOATS
from ..folders.tensors import Tensor
from ..models.transformer import Transformer
from .architecture import config_of, hugging_face_config, transformer_of


def description_of(
    model: Any,
    tensors: Sequence[Tensor],
    is_tied: bool,
    *,
    hf_config: Mapping[str, Any] | None,
    like: str | os.PathLike[str] | None,
    follow_links: bool,
) -> dict[str, Any]:
    """The content of `config.json` but for the layout of the weights.

    Args:
        model: The model.
        tensors: What is written of it.
        is_tied: Whether its head is left out, because it is the embedding.
        hf_config: As in `export_model`.
        like: As in `export_model`.
        follow_links: As in `export_model`.

    Raises:
        ValueError: If `hf_config` is not JSON, or `like` not a folder of a model of the same architecture; names the
            first key that differs.
    """
    tie = {TIED: True} if is_tied else {}
    if hf_config is not None:
        try:
            json.dumps(dict(hf_config), allow_nan=False, default=str)
        except ValueError as error:
            raise ValueError(f"hf_config={hf_config!r} cannot be written as JSON: {error}") from error
        return {**hf_config, **tie}
    config = {**(config_of(model) if like is None else _config_like(model, like, follow_links)), **tie}
    plain = [tensor for tensor in tensors if tensor.layout is None and tensor.dtype in FLOATS]
    # That of most numbers.
    largest = max(plain, key=lambda tensor: math.prod(tensor.shape), default=None)
    return config if largest is None else with_dtype(config, largest.dtype.name)


def _config_like(model: Any, like: str | os.PathLike[str], follow_links: bool) -> dict[str, Any]:
    """The configuration of a folder. Only of a `models.Transformer` is the architecture known, and compared."""
    argument = f"like={os.fspath(like)!r}"
    try:
        folder = TensorFolder.open(like, follow_links=follow_links)
        if not isinstance(model, Transformer):
            return folder.config
        # Keys that load does not know were named to it.
        config, _ = transformer_of(folder, without_effect=tuple(folder.config))
        theirs = eqx.filter_eval_shape(lambda: Transformer.init(config, key=jax.random.key(0)))
        expected, ours = hugging_face_config(theirs), hugging_face_config(model)
    except ValueError as error:
        raise ValueError(f"{argument} does not describe model: {error}") from error
    for key in {**expected, **ours}:
        if expected.get(key) != ours.get(key):
            raise ValueError(
                f"{argument} has a model with {key}={expected.get(key)!r}, and model has {ours.get(key)!r}. Give the "
                "folder that model was loaded from; or describe model with hf_config=..., and like=... gives only its "
                "tokenizer"
            )
    return folder.config
