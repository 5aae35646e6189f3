"""check_folder: everything that can be said of a folder without running an engine."""

import fnmatch
import os
import pathlib
from collections.abc import Iterator

from ...layers.tensor_names import WEIGHT, is_head, is_linear, is_router
from ..files import BrokenCheckpoint, TensorFolder
from ..layouts.ignore import REGEX, matched
from ..layouts.quantization import CONFIG, CheckpointQuantization, read_quantization
from .report import CheckReport, Fault
from .sizes import size_faults
from .values import not_finite
from .weights import cache_faults, fused_faults, is_fp8, weight_faults


def check_folder(directory: str | os.PathLike[str], *, follow_links: bool = False) -> CheckReport:
    """Checks a checkpoint against its own configuration: names, shapes, dtypes and all values.

    Engines accept a checkpoint without scales, with a NaN among them or with an FP8 head, and compute garbage without
    a word. Each tensor is read once, in parts; nothing is executed, and neither PyTorch nor an accelerator is needed.

    Args:
        directory: The folder: `config.json` beside `model.safetensors`, or beside the files of an index.
        follow_links: Whether files may be links that lead out of the folder, as in the cache of Hugging Face's hub.

    Returns:
        What is wrong, by file and tensor. A folder that cannot be read has one fault.
    """
    path = pathlib.Path(directory)
    try:
        folder, quantization = open_checkpoint(path, follow_links=follow_links)
        ignored = ignored_layers(folder, quantization) if quantization is not None else set()
    except BrokenCheckpoint as broken:
        return CheckReport(path, "", 0, 0, (Fault(broken.file, broken.tensor, broken.problem),))
    faults = [*weight_faults(folder, quantization, ignored), *size_faults(folder), *_other_values(folder)]
    faults += cache_faults(folder, quantization)
    if quantization is not None:
        faults += [*_not_quantized(folder, quantization, ignored), *fused_faults(folder, quantization)]
        faults += _entries(folder, quantization)
        if quantization.method == "compressed-tensors" and quantization.status not in ("compressed", "frozen"):
            problem = (
                f"quantization_status is {quantization.status}; without 'compressed', Transformers quantizes the "
                "weights again and computes other numbers"
            )
            faults.append(Fault(CONFIG, "quantization_config", problem))
    quantized = sum(map(is_fp8, folder.tensors.values()))
    if quantization is not None and not quantized:
        faults.append(Fault(CONFIG, "quantization_config", "it is there, but no tensor is in FP8"))
    unique = sorted(dict.fromkeys(faults), key=lambda fault: not fault.is_error)
    name = "not quantized" if quantization is None else quantization.name
    return CheckReport(path, name, quantized, len(folder.tensors), tuple(unique))


def open_checkpoint(path: pathlib.Path, *, follow_links: bool) -> tuple[TensorFolder, CheckpointQuantization | None]:
    """A folder's tensors and what its configuration says of them.

    Args:
        path: The folder.
        follow_links: Whether links may lead out of it.

    Raises:
        BrokenCheckpoint: If a file is not what it has to be.
    """
    folder = TensorFolder.open(path, follow_links=follow_links)
    return folder, read_quantization(folder)


def ignored_layers(folder: TensorFolder, quantization: CheckpointQuantization) -> set[str]:
    """The layers that a configuration leaves alone.

    Args:
        folder: The folder.
        quantization: What its configuration says.

    Raises:
        BrokenCheckpoint: If an entry is not a regular expression, or takes too long.
    """
    layers = [name.removesuffix(WEIGHT) for name in folder.tensors if name.endswith(WEIGHT)]
    return {layer for entry in quantization.ignore for layer in _matched(entry, layers, quantization)}


def _matched(entry: str, layers: list[str], quantization: CheckpointQuantization) -> set[str]:
    if quantization.method == "modelopt" and "*" in entry:
        return set(fnmatch.filter(layers, entry))
    parents = quantization.method != "compressed-tensors"
    return matched(entry, layers, file=CONFIG, key="ignore", parents=parents)


def _not_quantized(folder: TensorFolder, quantization: CheckpointQuantization, ignored: set[str]) -> Iterator[Fault]:
    """Layers that the configuration means and that are not in FP8."""
    strict = quantization.method == "compressed-tensors"
    by_class = {"Linear"} & set(quantization.targets)
    layers = [name.removesuffix(WEIGHT) for name in folder.tensors if name.endswith(WEIGHT)]
    meant = {layer for entry in quantization.targets for layer in _matched(entry, layers, quantization)}
    for layer in layers:
        stored = folder.tensors[layer + WEIGHT]
        if is_fp8(stored) or layer in ignored or not is_linear(layer, len(stored.shape)):
            continue
        kind = "head" if is_head(layer) else "router" if is_router(layer, folder.tensors) else "linear layer"
        # Other methods' engines leave heads and routers alone by themselves.
        if (by_class or layer in meant) and (strict or kind == "linear layer"):
            problem = (
                f"this {kind} is in {stored.shown}, and `ignore` does not list {layer}: engines look for its scale"
            )
            yield Fault(stored.file.name, layer + WEIGHT, problem)


def _entries(folder: TensorFolder, quantization: CheckpointQuantization) -> Iterator[Fault]:
    """Entries of `ignore` that mean nothing."""
    layers = [name.removesuffix(WEIGHT) for name in folder.tensors if name.endswith(WEIGHT)]
    tied = bool(folder.config.get("tie_word_embeddings"))
    for entry in quantization.ignore:
        if _matched(entry, layers, quantization) or (tied and is_head(entry)):
            continue
        kind = "matches" if entry.startswith(REGEX) else "is the name of"
        yield Fault(CONFIG, "ignore", f"{entry!r:.80} {kind} no layer of the checkpoint", is_error=False)


def _other_values(folder: TensorFolder) -> Iterator[Fault]:
    for name, stored in folder.tensors.items():
        if (problem := stored.unreadable) is not None:
            yield Fault(stored.file.name, name, problem)
        elif not is_fp8(stored) and "scale" not in name.rpartition(".")[2] and (count := not_finite(folder[name])):
            yield Fault(stored.file.name, name, f"{count} of its elements are infinite or NaN")
