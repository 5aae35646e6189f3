"""export_adapter: the adapters of a model as PEFT loads them."""

import json
import os
from typing import Any

import jax

from ..folders.folder import SINGLE, TensorSpec, new_folder, require_folder_name, write_tensors
from ..folders.tensors import Tensor
from ..layers.config import default_rules
from ..models.adapters import AdaptedModel, LoraLinear, require_adapters
from ..models.transformer import Transformer
from .architecture import names_of
from .frozen import is_frozen
from .model import tensors_of


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
    is_adapter = lambda node: isinstance(node, LoraLinear)
    first = next(filter(is_adapter, jax.tree.leaves(model.adapted, is_leaf=is_adapter)))

    def tensors(half: str) -> list[Tensor]:
        # In place of its layer, so that it has that layer's name.
        place = lambda node: getattr(node, half) if is_adapter(node) else None
        is_layer = lambda node: is_adapter(node) or is_frozen(node)
        return list(tensors_of(jax.tree.map(place, model.adapted, is_leaf=is_layer), default_rules))

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
            spec = TensorSpec(f"base_model.model.{layer}.lora_{half}.weight", tensor.dtype, tensor.shape)
            groups.append(([spec], lambda tensor=tensor: [tensor.read()]))
    with new_folder(directory) as folder:
        write_tensors(folder, groups, limit=sum(spec.bytes for (spec,), _ in groups))
        (folder / SINGLE).rename(folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
