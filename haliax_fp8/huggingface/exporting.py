"""export_model and serving_tensors: a model as the tensors that inference engines load."""

import dataclasses
import functools
import hashlib
import os
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import DTypeLike
from rich.console import RenderableType

from .._arguments import require_bool
from .._printing import Printable, new_table
from .._printing.progress import Watcher, progress_of
from .._tensor_names import is_embedding, is_head, is_router
from ..folders.beside import copy_others, left_alone, write_config
from ..folders.check import check_folder
from ..folders.folder import TensorFolder, new_folder, require_folder_name, write_tensors
from ..folders.scaled_matrix import (
    ScaledMatrix,
    largest,
)
from ..folders.tensors import Tensor, fused_with, tensors_in
from ..layers import LayerRule, default_rules
from ..layers.checks import check_not_modified, require_layers, require_merged
from ..layers.walk import Targets, as_patterns
from ..layouts import PLAIN, Layout, as_layout
from .architecture import names_of
from .description import description_of
from .model import tensors_of, without_sharing
from .names import NameMap
from .quantized_weight import quantized, require_exportable


@dataclasses.dataclass(frozen=True, repr=False)
class ExportReport(Printable):
    """What an export wrote.

    Args:
        directory: The folder.
        layout: The layout.
        quantized: The number of weights in FP8.
        quantized_bytes: The bytes that they take, scales included.
        dense: The number of other tensors.
        dense_bytes: The bytes that they take.
        origins: Where the scales come from, with the number of weights for each.
        ignore: The layers whose matrices are in high precision: what the configuration tells engines to leave alone.
    """

    directory: pathlib.Path
    layout: str
    quantized: int
    quantized_bytes: int
    dense: int
    dense_bytes: int
    origins: Mapping[str, int]
    ignore: tuple[str, ...]

    def __rich__(self) -> RenderableType:
        """A row for FP8 weights and one for the rest."""
        more = f" and {len(self.ignore) - 5} more" if len(self.ignore) > 5 else ""
        left = f"matrices in high precision: {', '.join(self.ignore[:5])}{more}"
        table = new_table(f"{self.directory}: {self.layout}, read back and compared", left if self.ignore else "")
        for column in ("tensors", "number", "bytes", "scales"):
            table.add_column(column)
        scales = ", ".join(f"{origin}: {count}" for origin, count in self.origins.items())
        table.add_row("weights in FP8", str(self.quantized), f"{self.quantized_bytes:,}", scales)
        table.add_row("others", str(self.dense), f"{self.dense_bytes:,}", "")
        return table


def export_model(
    model: Any,
    directory: str | os.PathLike[str],
    layout: str | Layout = "FP8_DYNAMIC",
    *,
    names: Any = None,
    like: str | os.PathLike[str] | None = None,
    hf_config: Mapping[str, Any] | None = None,
    dtype: DTypeLike | None = "bfloat16",
    bf16_scales: bool = True,
    training_scales: bool = True,
    targets: Targets | None = None,
    exclude: Targets = (),
    shard_bytes: int = 5 * 10**9,
    rules: tuple[LayerRule, ...] = default_rules,
    follow_links: bool = False,
    progress: Watcher | None = None,
) -> ExportReport:
    """Writes a model as inference engines load it: safetensors and `config.json`.

    Weights are `[out, in]`, one for each block of a stack and each expert. Those of layers that train in FP8 are
    quantized, or of a plain model those of all linear layers but heads, embeddings and routers; the rest is written in
    `dtype`. Tensors are made and written one at a time. The folder is read back and compared, and checked as by
    `check_folder`, before it takes its name: it is complete or absent. Each file holds a checksum of its header, one
    of each tensor, and one of the index if there are several files, in its metadata. `check_folder`, `convert_folder`
    and `import_model` compare them.

    Whatever its class and name, a layer whose matrix is not quantized is listed in the configuration, so that engines
    leave it alone: embeddings, convolutions, routers and excluded linear layers. A head that shares the embedding's
    matrix by `eqx.nn.Shared` is not written, and `config.json` says `tie_word_embeddings`; unless it trains in FP8.

    | layout | weights | inputs |
    |---|---|---|
    | `"FP8_DYNAMIC"` | a scale for each output | quantized by the engine, each token |
    | `"HF_FP8"` | blocks of 128x128, by Hugging Face's names | by the engine, 128 of a token |
    | `"FP8_BLOCK"` | the same by the names of compressed-tensors | the same |
    | `"MXFP8"` | 32 inputs, E8M0 | the same, by the engine |
    | `"FP8"` | a scale for each output; those of training are equal | one scale, from training |
    | `"FP8_TENSOR"` | one scale | one scale, from training |
    | `"W8A16"` | a scale for each output | high precision |
    | `"modelopt"` | one scale | one scale, from training |
    | `"MXFP4"` | four bits; 32 inputs, E8M0 | the same, by the engine |
    | `"MXFP4A16"` | the same | high precision |
    | `"NVFP4"` | four bits; 16 inputs, E4M3, and one scale | 16 inputs, by the engine, and one scale, from training |
    | `"NVFP4A16"` | the same | high precision |
    | `"BF16"` | not quantized | |

    Args:
        model: A converted model, a plain one, or one with frozen FP8 layers, whose data and scales stay as they are.
        directory: The folder; new or empty.
        layout: The layout or its name, see above.
        names: The `NameMap`, or a dict from the model's names to the checkpoint's. By default a `models.Transformer`
            has the names of its architecture, and any other model those of Haliax's state dict, as with `{}`.
        like: The folder that the model was loaded from, or another of the same architecture. Its `config.json` is
            kept, but for dtype and quantization, and its other files are copied: tokenizer, chat template,
            `generation_config.json`.
        hf_config: What `config.json` says of the architecture; by default that of `like`, or
            `hugging_face_config(model)` for a `models.Transformer`, and else nothing.
        dtype: The dtype in which the model computes: kernels are rounded to it before they are quantized, as a step
            does that casts its parameters. None keeps each array's own.
        bf16_scales: Round scales up to what bfloat16 holds, because engines that cast a model cast its scales too.
            Powers of two stay as they are. False writes the scales of training.
        training_scales: Quantize kernels with the scales that the next step of training would take, where the layout
            can hold them. False computes new ones, as fine as the layout's blocks.
        targets: The layers to quantize instead: patterns as in `fp8_linear_layers`, of the names in the state dict
            with `*` for the number of a block.
        exclude: Layers to leave in high precision, besides heads, which only `targets` can name.
        shard_bytes: The most bytes of a file; larger models have several, and an index.
        rules: The rules of the layer classes, as in `Fp8Config`.
        follow_links: As in `check_folder`, for files of `like`.
        progress: Called as `progress(name, done, total)` with each tensor, in bytes; `done` starts anew for each of the
            three passes that write, compare and check. By default there is a bar if the standard error is a terminal.

    Returns:
        What was written.

    Raises:
        ValueError: If the folder is not empty; if `like` has another architecture; if weights are not finite; if a
            static layout lacks the scale of an input; if two tensors get the same name; if what was written does not
            read back as it was; or if engines would read it wrongly, as `check_folder` finds out.

    Example:
        >>> import tempfile
        >>> model = eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(0))
        >>> report = export_model(model, tempfile.mkdtemp() + "/mlp")
        >>> report.quantized, report.dense, report.quantized_bytes
        (2, 2, 17152)
    """
    require_folder_name(directory, "export_model(model, directory)")
    require_layers(model, "export_model(model, directory)")
    require_merged(model)
    if not isinstance(shard_bytes, int) or isinstance(shard_bytes, bool) or shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes!r} must be a positive integer; 5 * 10**9 is usual")
    check_not_modified(model)
    chosen = as_layout(layout)
    how = _How(names_of(model, names), dtype, bf16_scales, training_scales, targets, exclude, rules)
    tensors, tied = _to_write(model, chosen, how)
    origins: Counter[str] = Counter()
    digests: dict[str, str] = {}

    def made(tensor: Tensor) -> list[np.ndarray]:
        values = tensor.read()
        digests[tensor.name] = _digest(values)
        if isinstance(values, ScaledMatrix):
            origins[values.origin] += 1
        return tensor.encoded(values)

    description = description_of(model, tensors, bool(tied), hf_config=hf_config, like=like, follow_links=follow_links)
    plain = (*_in_high_precision(tensors), *tied)
    ignore = left_alone(description, plain, [*(tensor.path for tensor in tensors if tensor.is_weight), *tied])
    with new_folder(directory) as folder:
        if like is not None:
            copy_others(like, folder, follow_links=follow_links)
        groups = [(tensor.specs, lambda tensor=tensor: made(tensor)) for tensor in tensors]
        write_tensors(folder, groups, shard_bytes, progress)
        write_config(folder, description, chosen, ignore)
        _compare(folder, tensors, digests, progress)
        _require_sound(folder, progress)
    of_kernels, of_rest = (
        [sum(spec.bytes for spec in tensor.specs) for tensor in tensors if (tensor.layout is None) == is_rest]
        for is_rest in (False, True)
    )
    counts = len(of_kernels), sum(of_kernels), len(of_rest), sum(of_rest)
    name = PLAIN if chosen is None else chosen.name
    return ExportReport(pathlib.Path(directory), name, *counts, dict(origins), ignore)


def serving_tensors(
    model: Any,
    layout: str | Layout = "FP8_DYNAMIC",
    *,
    names: Any = None,
    dtype: DTypeLike | None = "bfloat16",
    bf16_scales: bool = True,
    training_scales: bool = True,
    targets: Targets | None = None,
    exclude: Targets = (),
    rules: tuple[LayerRule, ...] = default_rules,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields names and arrays one at a time, for an engine that takes weights while it runs.

    The tensors that `export_model` writes, with the very values that the step multiplies: kernels rounded to the dtype
    of the step, with its scales where the layout can hold them.

    Args:
        model: As in `export_model`.
        layout: As in `export_model`.
        names: As in `export_model`.
        dtype: As in `export_model`.
        bf16_scales: As in `export_model`.
        training_scales: As in `export_model`.
        targets: As in `export_model`.
        exclude: As in `export_model`.
        rules: As in `export_model`.

    Raises:
        ValueError: As in `export_model`.

    Example:
        >>> model = eqx.nn.Linear(64, 32, use_bias=False, key=jax.random.key(0))
        >>> [(name, array.dtype.name, array.shape) for name, array in serving_tensors({"up": model})]
        [('up.weight', 'float8_e4m3fn', (32, 64)), ('up.weight_scale', 'float32', (32, 1))]
    """
    require_layers(model, "serving_tensors(model, layout)")
    require_merged(model)
    how = _How(names_of(model, names), dtype, bf16_scales, training_scales, targets, exclude, rules)
    tensors, _ = _to_write(model, as_layout(layout), how)
    pairs = (zip(tensor.specs, tensor.encoded(tensor.read()), strict=True) for tensor in tensors)
    return ((spec.name, array) for pair in pairs for spec, array in pair)


# --- What is written --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _How:
    """The arguments of an export that say what the tensors of a model become."""

    names: NameMap
    dtype: DTypeLike | None
    bf16_scales: bool
    training_scales: bool
    targets: Targets | None
    exclude: Targets
    rules: tuple[LayerRule, ...]

    def __post_init__(self) -> None:
        require_bool("bf16_scales", self.bf16_scales, of="an export")
        require_bool("training_scales", self.training_scales, of="an export")


def _to_write(model: Any, layout: Layout | None, how: _How) -> tuple[list[Tensor], tuple[str, ...]]:
    """The tensors that a checkpoint of a model has, by its names, and the head if it is the embedding.

    Raises:
        ValueError: If two tensors get the same name, nothing is left to quantize, a scale is missing, or a layer of the
            model is in another format of FP8 than layouts have.
    """
    names, rules = how.names, how.rules
    patterns: dict[str, Any] = {
        "dtype": None if how.dtype is None else np.dtype(how.dtype),
        "targets": None if how.targets is None else as_patterns("targets", how.targets),
        "exclude": as_patterns("exclude", how.exclude),
    }
    unshared = list(tensors_of(model, rules, **patterns))
    whole = without_sharing(model)
    of_model = unshared if whole is model else list(tensors_of(whole, rules, **patterns))
    if how.targets is None:
        of_model = _without_roles(of_model, names)
    tied = [] if whole is model else _tied_heads(of_model, {tensor.name for tensor in unshared}, names)
    tensors, by_name = [], {tensor.name: tensor for tensor in of_model}
    to_ours = {names.to_checkpoint(name): name for name in by_name}

    def alike(tensor: Tensor) -> tuple[Tensor, ...]:
        """Those that engines make one with a tensor, by their names in the model or in the checkpoint."""
        ours = fused_with(tensor.name, by_name)
        theirs = tuple(to_ours[name] for name in fused_with(names.to_checkpoint(tensor.name), to_ours))
        return tuple(by_name[name] for name in max(ours, theirs, key=len) if by_name[name].is_chosen)

    amax = functools.cache(lambda names: max(largest(by_name[name].read()) for name in names))
    for tensor in of_model:
        if any(tensor is head for head in tied):
            continue
        named = dataclasses.replace(tensor, name=names.to_checkpoint(tensor.name))
        if layout is not None and tensor.is_chosen:
            require_exportable(tensor, layout)
            fused = alike(tensor) if layout.has_units else (tensor,)
            of_all = functools.partial(amax, tuple(other.name for other in fused))
            scales = {"training_scales": how.training_scales, "bf16_scales": how.bf16_scales}
            read = functools.partial(quantized, tensor, layout, fused, of_all, **scales)
            named = dataclasses.replace(named, read=read, layout=layout)
        elif tensor.layer is not None:
            raise ValueError(
                f"{tensor.path} is in FP8 in the model and would be written in high precision; export "
                "serving.dequantize(model), or choose a layout that has it in FP8"
            )
        tensors.append(named)
    all_names = Counter(tensor.name for tensor in tensors)
    if twice := sorted(name for name, n in all_names.items() if n > 1):
        raise ValueError(f"names gives {twice[0]!r} to two tensors of the model; each needs a name of its own")
    if layout is not None and all(tensor.layout is None for tensor in tensors):
        raise ValueError("model has no layer to quantize; give targets=..., or the layout 'BF16' for a plain export")
    return tensors, tuple(names.to_checkpoint(tensor.path) for tensor in tied)


def _without_roles(tensors: list[Tensor], names: NameMap) -> list[Tensor]:
    """The tensors; those of heads and routers by the checkpoint's names, as engines know them, are not chosen."""
    theirs = [names.to_checkpoint(tensor.name) for tensor in tensors]

    def stays(tensor: Tensor, name: str) -> bool:
        layer = name.rpartition(".")[0]
        return tensor.layer is None and (is_head(layer) or (tensor.op is None and is_router(layer, theirs)))

    pairs = zip(tensors, theirs, strict=True)
    return [dataclasses.replace(t, is_chosen=False) if t.is_chosen and stays(t, name) else t for t, name in pairs]


def _tied_heads(tensors: list[Tensor], unshared: set[str], names: NameMap) -> list[Tensor]:
    """Heads that share the matrix of an embedding, which engines do without: `tie_word_embeddings`."""
    heads = [t for t in tensors if t.name not in unshared and is_head(names.to_checkpoint(t.path))]
    tables = [t for t in tensors if t.name in unshared and is_embedding(names.to_checkpoint(t.path))]
    is_plain = lambda tensor, shape: tensor.layer is None and not tensor.is_chosen and tensor.shape == shape
    same = lambda a, b: is_plain(a, b.shape) and is_plain(b, a.shape) and np.array_equal(a.read(), b.read())
    return [head for head in heads if any(same(head, table) for table in tables)]


def _in_high_precision(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """The layers of matrices that are not quantized, whatever their class and name.

    Engines and checks know a checkpoint's layers by their names alone. Listed, an embedding called `emb` or a
    convolution is not taken for a linear layer that lost its scales.
    """
    return tuple(t.path for t in tensors if t.layout is None and t.is_weight and len(t.shape) > 1)


# --- Read back --------------------------------------------------------------------------------------------------------


def _compare(
    folder: pathlib.Path, tensors: Sequence[Tensor], digests: Mapping[str, str], progress: Watcher | None
) -> None:
    """Raises a ValueError unless a folder holds what was to be written, as an import reads it."""
    written = tensors_in(TensorFolder.open(folder))
    sizes = {tensor.name: sum(spec.bytes for spec in tensor.specs) for tensor in tensors}
    with progress_of("comparing", sum(sizes.values()), progress) as advance:
        for tensor in tensors:
            if _digest(written[tensor.name].read()) != digests[tensor.name]:
                name = tensor.name if tensor.layout is None else tensor.path
                raise ValueError(f"{name} did not read back as it was written; nothing was exported: report this")
            advance(tensor.name, sizes[tensor.name])


def _require_sound(folder: pathlib.Path, progress: Watcher | None) -> None:
    """Raises a ValueError if engines would read a folder wrongly, whose tensors are as the model has them."""
    errors = check_folder(folder, progress=progress).errors
    if not errors:
        return
    first = str(errors[0])
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    raise ValueError(
        f"engines would read the checkpoint wrongly, so nothing was exported: {first}{more}. Give names=... if engines "
        "confuse the names of two layers, targets= or exclude= if a layer must not be in FP8, another hf_config= if "
        "this one has other sizes; or change the model if its own numbers are not finite"
    )


def _digest(values: np.ndarray | ScaledMatrix) -> str:
    digest = hashlib.blake2b(digest_size=16)
    arrays: list[Any] = [values]
    if isinstance(values, ScaledMatrix):
        arrays = [values.data, values.scale, np.float32(np.nan if values.input_scale is None else values.input_scale)]
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
