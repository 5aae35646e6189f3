"""export_model and serving_tensors: a model as the tensors that inference engines load."""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import DTypeLike
from rich.console import RenderableType

from .._printing import Printable, new_table
from ..layers.config import Fp8Config
from ..layers.model_argument import require_layers
from ..layers.own_state import require_own_state
from ..layers.patterns import Targets
from .check import check_folder
from .files import TensorSpec, new_folder, require_folder_name, write_tensors
from .layout import Layout, as_layout
from .model.folder_tensors import FolderTensors
from .model.plan import Choices, Fp8Kernel, Plan, plan
from .names import NameMap
from .scaled_matrix import ScaledMatrix


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
    config: Mapping[str, Any] | None = None,
    dtype: DTypeLike | None = "bfloat16",
    bf16_scales: bool = True,
    training_scales: bool = True,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    kv_cache_scales: bool = False,
    shard_bytes: int = 5 * 10**9,
    rules_of: Fp8Config | None = None,
) -> ExportReport:
    """Writes a model as inference engines load it: safetensors and `config.json`.

    Weights are `[out, in]`, one for each block of a stack and each expert. Those of layers that train in FP8 are
    quantized, or of a plain model those of all linear layers but heads, embeddings and routers; the rest is written in
    `dtype`. Tensors are made and written one at a time. The folder is read back and compared, and checked as by
    `check_folder`, before it takes its name: it is complete or absent.

    Whatever its class and name, a layer whose matrix is not quantized is listed in the configuration, so that engines
    leave it alone: embeddings, convolutions, routers and excluded linear layers.

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
    | `"BF16"` | not quantized | |

    Args:
        model: A converted model, a plain one, or one with frozen FP8 layers, whose data and scales stay as they are.
        directory: The folder; new or empty.
        layout: The layout or its name, see above.
        names: The `NameMap`, or a dict from the model's names to the checkpoint's: `names.LLAMA` for the demo's models.
        config: What `config.json` says of the architecture, such as `demo.hugging_face_config(model)`.
        dtype: The dtype in which the model computes: kernels are rounded to it before they are quantized, as a step
            does that casts its parameters. None keeps each array's own.
        bf16_scales: Round scales up to what bfloat16 holds, because engines that cast a model cast its scales too.
            Powers of two stay as they are. False writes the scales of training.
        training_scales: Quantize kernels with the scales that the next step of training would take, where the layout
            can hold them. False computes new ones, as fine as the layout's blocks.
        targets: The layers to quantize instead: patterns as in `fp8_linear_layers`, of the names in the state dict
            with `*` for the number of a block.
        exclude: Layers to leave in high precision; by default those called `head` or `lm_head`.
        kv_cache_scales: Write a scale for the keys and one for the values of each `attention.Fp8Attention`, those of
            its next step, for engines that keep both in FP8.
        shard_bytes: The most bytes of a file; larger models have several, and an index.
        rules_of: Only its `rules` matter; needed for layers of your own classes.

    Returns:
        What was written.

    Raises:
        ValueError: If the folder is not empty; if weights are not finite; if a static layout lacks the scale of an
            input; if two tensors get the same name; if what was written does not read back as it was; or if engines
            would read it wrongly, as `check_folder` finds out.

    Example:
        >>> import tempfile
        >>> model = eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(0))
        >>> report = export_model(model, tempfile.mkdtemp() + "/mlp")
        >>> report.quantized, report.dense, report.quantized_bytes
        (2, 2, 17152)
    """
    require_folder_name(directory, "export_model(model, directory)")
    require_layers(model, "export_model(model, directory)")
    require_own_state(model)
    chosen = as_layout(layout)
    writing = Choices(
        NameMap.of(names),
        None if dtype is None else np.dtype(dtype),
        bf16_scales,
        training_scales,
        targets,
        exclude,
        rules_of,
        kv_cache_scales,
    )
    todo = _plan(model, chosen, writing)
    origins: Counter[str] = Counter()
    digests: dict[str, str] = {}
    groups = []
    for kernel in todo.kernels:
        assert chosen is not None
        specs = [
            TensorSpec(f"{kernel.name}.{part}", dtype, shape)
            for part, (dtype, shape) in chosen.tensors(kernel.shape).items()
        ]
        groups.append((specs, _encoder(kernel, chosen, origins, digests)))
    quantized_bytes = sum(spec.bytes for specs, _ in groups for spec in specs)
    for tensor in todo.dense:
        read = lambda tensor=tensor: [_noted(digests, tensor.name, tensor.read())]
        groups.append(([TensorSpec(tensor.name, tensor.dtype, tensor.shape)], read))
    total = sum(spec.bytes for specs, _ in groups for spec in specs)
    with new_folder(directory) as folder:
        write_tensors(folder, groups, shard_bytes)
        described, files = ({}, {}) if chosen is None else chosen.config_files(todo.ignore, cached=kv_cache_scales)
        for name, content in {**files, "config.json": {**(config or {}), **described}}.items():
            (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
        _compare(folder, todo, digests)
        _require_sound(folder)
    label = layout if isinstance(layout, str) else type(layout).__name__
    counts = len(todo.kernels), quantized_bytes, len(todo.dense), total - quantized_bytes
    return ExportReport(pathlib.Path(directory), label, *counts, dict(origins), todo.ignore)


def serving_tensors(
    model: Any,
    layout: str | Layout = "FP8_DYNAMIC",
    *,
    names: Any = None,
    dtype: DTypeLike | None = "bfloat16",
    bf16_scales: bool = True,
    training_scales: bool = True,
    targets: Targets | None = None,
    exclude: Targets | None = None,
    kv_cache_scales: bool = False,
    rules_of: Fp8Config | None = None,
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
        kv_cache_scales: As in `export_model`.
        rules_of: As in `export_model`.

    Raises:
        ValueError: As in `export_model`.

    Example:
        >>> model = eqx.nn.Linear(64, 32, use_bias=False, key=jax.random.key(0))
        >>> [(name, array.dtype.name, array.shape) for name, array in serving_tensors({"up": model})]
        [('up.weight', 'float8_e4m3fn', (32, 64)), ('up.weight_scale', 'float32', (32, 1))]
    """
    require_layers(model, "serving_tensors(model, layout)")
    chosen = as_layout(layout)
    kind = None if dtype is None else np.dtype(dtype)
    writing = Choices(
        NameMap.of(names), kind, bf16_scales, training_scales, targets, exclude, rules_of, kv_cache_scales
    )
    return _tensors(_plan(model, chosen, writing), chosen)


def _tensors(todo: Plan, layout: Layout | None) -> Iterator[tuple[str, np.ndarray]]:
    for kernel in todo.kernels:
        assert layout is not None
        for part, array in layout.encode(kernel.quantize()).items():
            yield f"{kernel.name}.{part}", array
    for tensor in todo.dense:
        yield tensor.name, tensor.read()


def _plan(model: Any, layout: Layout | None, choices: Choices) -> Plan:
    if layout is None:
        return plan(model, choices, None, static=False)
    kinds = {"static": layout.is_static, "exponents": layout.exponents}
    return plan(model, choices, layout.block, **kinds, cache_names=layout.cache_scales)


def _encoder(
    kernel: Fp8Kernel, layout: Layout, origins: Counter[str], digests: dict[str, str]
) -> Callable[[], list[np.ndarray]]:
    def encode() -> list[np.ndarray]:
        matrix = kernel.quantize()
        origins[matrix.origin] += 1
        digests[kernel.name] = _digest(*_parts(matrix))
        return list(layout.encode(matrix).values())

    return encode


def _compare(folder: pathlib.Path, todo: Plan, digests: Mapping[str, str]) -> None:
    """Raises a ValueError unless a folder holds what was to be written, as an import reads it."""
    written = FolderTensors.open(folder)
    for kernel in todo.kernels:
        matrix = written.kernel(kernel.name)
        if matrix is None or _digest(*_parts(matrix)) != digests[kernel.name]:
            raise ValueError(f"{kernel.name} did not read back as it was written; nothing was exported: report this")
    for tensor in todo.dense:
        if _digest(written.array(tensor.name)) != digests[tensor.name]:
            raise ValueError(f"{tensor.name} did not read back as it was written; nothing was exported: report this")


def _require_sound(folder: pathlib.Path) -> None:
    """Raises a ValueError if engines would read a folder wrongly, whose tensors are as the model has them."""
    errors = check_folder(folder).errors
    if not errors:
        return
    first = str(errors[0])
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    raise ValueError(
        f"engines would read the checkpoint wrongly, so nothing was exported: {first}{more}. Give names=... if engines "
        "confuse the names of two layers, targets= or exclude= if a layer must not be in FP8, another config= if this "
        "one has other sizes; or change the model if its own numbers are not finite"
    )


def _parts(matrix: ScaledMatrix) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    inputs = np.float32(np.nan if matrix.input_scale is None else matrix.input_scale)
    return matrix.data, matrix.scale, np.asarray(inputs)


def _noted(digests: dict[str, str], name: str, array: np.ndarray) -> np.ndarray:
    digests[name] = _digest(array)
    return array


def _digest(*arrays: np.ndarray) -> str:
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
