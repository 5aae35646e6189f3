"""Folders of low-rank adapters as PEFT writes them: `adapter_config.json` beside `adapter_model.safetensors`."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from .codes import looked_through
from .header import Stored, read_header
from .layout import FLOATS
from .strict_json import BrokenCheckpoint, json_file


ADAPTER_CONFIG, ADAPTER_TENSORS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."

# Options that change what is computed, and the values with which they do not.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_rslora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "bias": ("none",),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "target_parameters": ([],),
}


def is_adapter(directory: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an adapter, and no model."""
    folder = pathlib.Path(directory)
    return (folder / ADAPTER_CONFIG).exists() and not os.path.lexists(folder / "config.json")


@dataclasses.dataclass(frozen=True)
class AdapterFolder:
    """The adapters of a folder.

    Args:
        base: The name of the model that they belong to; empty if it is not said.
        rank: Their rank.
        alpha: Divided by the rank, what their output is multiplied by.
        dropout: The share of inputs that are dropped in training.
        halves: `A` of shape `[rank, in]` and `B` of shape `[out, rank]`, by the name of the layer in the base.
    """

    base: str
    rank: int
    alpha: float | int
    dropout: float
    halves: dict[str, tuple[Stored, Stored]]

    @staticmethod
    def open(directory: str | os.PathLike[str]) -> "AdapterFolder":
        """Reads the configuration and the header.

        Raises:
            BrokenCheckpoint: If one of them is missing or not what PEFT writes, or an option changes what is computed
                in a way that is not supported here.
        """
        folder = pathlib.Path(directory)
        config = json_file(folder / ADAPTER_CONFIG)
        wrong = lambda problem, key: BrokenCheckpoint(ADAPTER_CONFIG, problem, key)
        if config.get("peft_type") != "LORA":
            raise wrong(f"it is {config.get('peft_type')!r:.40}; 'LORA' alone is supported", "peft_type")
        for key, values in _WITHOUT_EFFECT.items():
            if config.get(key) is not None and config[key] not in values:
                remedy = "merge the adapter with PEFT, and load the merged model"
                raise wrong(f"it is {config[key]!r:.40}, which is not supported here; {remedy}", key)
        rank, alpha, dropout = config.get("r"), config.get("lora_alpha", 8), config.get("lora_dropout") or 0.0
        if type(rank) is not int or rank < 1:
            raise wrong(f"it is {rank!r:.40}, but must be a positive whole number", "r")
        for key, number, top in (("lora_alpha", alpha, math.inf), ("lora_dropout", dropout, 1)):
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < top:
                raise wrong(f"it is {number!r:.40}, but must be a number of at least 0 and less than {top}", key)
        halves = _halves(read_header(folder / ADAPTER_TENSORS), rank)
        return AdapterFolder(str(config.get("base_model_name_or_path") or ""), rank, alpha, dropout, halves)

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"adapter of {self.base or 'a model without a name'}, rank {self.rank}"

    def faults(self) -> Iterator[tuple[str, str, str, str]]:
        """File, tensor, problem and remedy, for numbers that are not finite."""
        for stored in (half for halves in self.halves.values() for half in halves):
            if count := looked_through(stored.array())[0]:
                problem = f"{count} of its elements are infinite or NaN"
                yield stored.file.name, stored.name, problem, "take an adapter from before the training diverged"


def _halves(tensors: dict[str, Stored], rank: int) -> dict[str, tuple[Stored, Stored]]:
    by_layer: dict[str, dict[str, Stored]] = {}
    for name, stored in tensors.items():
        layer, dot, half = name.removesuffix(".weight").rpartition(".lora_")
        if not (dot and half in ("A", "B") and name.startswith(PREFIX) and name.endswith(".weight")):
            expected = f"{PREFIX}LAYER.lora_A.weight or .lora_B.weight"
            raise BrokenCheckpoint(stored.file.name, f"its name is not {expected}; only these are read", name)
        if stored.dtype not in FLOATS:
            raise BrokenCheckpoint(stored.file.name, f"it is in {stored.shown}; adapters are floating-point", name)
        axis = 0 if half == "A" else 1
        if len(stored.shape) != 2 or stored.shape[axis] != rank:
            shape = f"[{rank}, in]" if half == "A" else f"[out, {rank}]"
            problem = f"it has shape {stored.shape}, and {ADAPTER_CONFIG} says r={rank}: it must be {shape}"
            raise BrokenCheckpoint(stored.file.name, f"{problem}; copy both files again", name)
        by_layer.setdefault(layer.removeprefix(PREFIX), {})[half] = stored
    for layer, halves in by_layer.items():
        if len(halves) < 2:
            missing = f"{PREFIX}{layer}.lora_{'B' if 'A' in halves else 'A'}.weight"
            raise BrokenCheckpoint(ADAPTER_TENSORS, "it is missing; copy the file again", missing)
    if not by_layer:
        raise BrokenCheckpoint(ADAPTER_TENSORS, "it holds no adapter; copy the file again")
    return {layer: (halves["A"], halves["B"]) for layer, halves in by_layer.items()}
