"""Adapters of a model as PEFT has them: written, and read."""

import json
import os
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._arguments import nearest
from ..folders.adapter import ADAPTER_CONFIG, ADAPTER_TENSORS, PREFIX, AdapterFolder
from ..folders.folder import SINGLE, TensorSpec, new_folder, require_folder_name, write_tensors
from ..folders.strict_json import BrokenCheckpoint
from ..folders.tensors import Tensor
from ..layers import default_rules, is_quantized_layer
from ..layers.checks import require_layers, require_merged
from ..layers.walk import find_layers
from ..models.adapters import AdaptedModel, LoraLinear, add_lora, require_adapters
from ..models.transformer import Transformer
from .architecture import names_of
from .model import leaves, sites, tensors_of


def export_adapter(
    model: AdaptedModel, directory: str | os.PathLike[str], *, names: Any = None, base: str | os.PathLike[str] = ""
) -> None:
    """Writes adapters alone, as PEFT and engines load them: `adapter_model.safetensors` and `adapter_config.json`.

    Args:
        model: What `models.add_lora` returned, trained.
        directory: The folder; new or empty.
        names: As in `export_model`.
        base: The folder of the model that they were trained on, or its name in the hub, for `adapter_config.json`.

    Raises:
        ValueError: If `model` has no adapters, the folder is not empty, or `base` is not a name.

    Example:
        >>> import tempfile
        >>> from haliax_fp8.models import Transformer, TransformerConfig, add_lora
        >>> model = Transformer.init(TransformerConfig(layers=1), key=jax.random.key(0))
        >>> model = add_lora(model, rank=8, targets=["query", "value"], key=jax.random.key(1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_adapter(model, f"{folder}/adapter")
        ...     sorted(os.listdir(f"{folder}/adapter"))
        ['adapter_config.json', 'adapter_model.safetensors']
    """
    call = "export_adapter(model, directory)"
    require_folder_name(directory, call)
    require_adapters(model, call)
    if not isinstance(base, str | os.PathLike):
        raise ValueError(f"base={base!r} is not the name of a folder or of a model in the hub; leave it out for none")
    names = names_of(model.adapted, names)
    first = next(filter(_is_lora, jax.tree.leaves(model.adapted, is_leaf=_is_lora)))

    def tensors(half: str) -> list[Tensor]:
        return list(tensors_of(_halves(model.adapted, half), default_rules))

    layers = [names.to_checkpoint(tensor.name).removesuffix(".weight") for tensor in tensors("A")]
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if isinstance(model.adapted, Transformer) else None,
        "base_model_name_or_path": os.fspath(base),
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout.p,
        "target_modules": layers,
        "bias": "none",
        "inference_mode": True,
    }
    groups = []
    for half in ("A", "B"):
        for layer, tensor in zip(layers, tensors(half), strict=True):
            spec = TensorSpec(f"{PREFIX}{layer}.lora_{half}.weight", tensor.dtype, tensor.shape)
            groups.append(([spec], lambda tensor=tensor: [tensor.read()]))
    with new_folder(directory) as folder:
        write_tensors(folder, groups, limit=sum(spec.bytes for (spec,), _ in groups))
        (folder / SINGLE).rename(folder / ADAPTER_TENSORS)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2), encoding="utf-8")


def import_adapter(directory: str | os.PathLike[str], base: Any, *, names: Any = None) -> AdaptedModel:
    """Reads adapters that `export_adapter` or PEFT wrote, to go on training them, or to merge them.

    Args:
        directory: The folder, with `adapter_config.json`.
        base: The model that they were trained on, as `add_lora` takes it.
        names: As in `export_model`.

    Returns:
        What `add_lora` returned, with the weights, rank, alpha and dropout of the folder.

    Raises:
        ValueError: If the folder is broken, has options that are not supported here, or has adapters for layers that
            `base` lacks or that have other sizes; each names the tensor or the key.

    Example:
        >>> import tempfile
        >>> from haliax_fp8.models import Transformer, TransformerConfig, add_lora
        >>> base = Transformer.init(TransformerConfig(layers=1), key=jax.random.key(0))
        >>> model = add_lora(base, rank=8, key=jax.random.key(1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_adapter(model, f"{folder}/adapter")
        ...     bool(eqx.tree_equal(import_adapter(f"{folder}/adapter", base), model))
        True
    """
    call = "import_adapter(directory, base)"
    require_folder_name(directory, call)
    require_layers(base, call, "base")
    require_merged(base)
    folder, name_map = AdapterFolder.open(directory), names_of(base, names)
    paths = {id(layer): path for path, (layer, _) in find_layers(base, default_rules).items()}
    layers: dict[str, str] = {}
    for site in sites(base, default_rules):
        for name, _ in leaves(site)[0].tensors() if id(site.node) in paths else ():
            layers[name_map.to_checkpoint(name).removesuffix(".weight")] = paths[id(site.node)]
    if unknown := [layer for layer in folder.halves if layer not in layers]:
        near = ", ".join(nearest(unknown[0], [*layers], 3)) or "none"
        raise ValueError(
            f"{os.fspath(directory)} has an adapter for {unknown[0]}, which base lacks; the nearest are {near}. Give "
            f"the model that it was trained on{f', {folder.base}' if folder.base else ''}, or map its names with names="
        )
    chosen = {layers[layer] for layer in folder.halves}
    if missing := [layer for layer, path in layers.items() if path in chosen and layer not in folder.halves]:
        raise ValueError(
            f"{os.fspath(directory)} has no adapter for {missing[0]}, but for other blocks of the same stack in base; "
            "merge it with PEFT, and load the merged model"
        )
    options: dict[str, Any] = {"alpha": folder.alpha, "dropout": folder.dropout, "key": jax.random.key(0)}
    model = add_lora(base, rank=folder.rank, targets=lambda path, layer: path in chosen, **options)

    def halves(half: str) -> list[Any]:
        def read(name: str, shape: tuple[int, ...]) -> np.ndarray:
            stored = folder.halves[name_map.to_checkpoint(name).removesuffix(".weight")]["AB".index(half)]
            if stored.shape != shape:
                problem = f"it has shape {stored.shape}, and base needs {shape}; give the model that it was trained on"
                raise BrokenCheckpoint(stored.file.name, problem, stored.name)
            return stored.array()

        alone = sites(_halves(model.adapted, half), default_rules)
        fill = lambda leaf: leaf.filled(lambda name: read(name, leaf.shape))
        return [eqx.tree_at(lambda x: x.weight, site.node, fill(leaf)) for site in alone for leaf in leaves(site)]

    read_halves = [half for pair in zip(halves("A"), halves("B"), strict=True) for half in pair]
    adapters = lambda tree: [node for node in jax.tree.leaves(tree, is_leaf=_is_lora) if _is_lora(node)]
    return eqx.tree_at(lambda tree: [x for node in adapters(tree) for x in (node.A, node.B)], model, read_halves)


def _is_lora(node: Any) -> bool:
    return isinstance(node, LoraLinear)


def _halves(adapted: Any, half: str) -> Any:
    """One half of each adapter alone, in place of its layer, so that it has that layer's name."""
    place = lambda node: getattr(node, half) if _is_lora(node) else None
    return jax.tree.map(place, adapted, is_leaf=lambda node: _is_lora(node) or is_quantized_layer(node))
