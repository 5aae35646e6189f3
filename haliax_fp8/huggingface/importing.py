"""Checkpoints in any of the layouts, made by anyone: into a model of Haliax or Equinox, or as a model of `models`."""

import dataclasses
import enum
import functools
import itertools
import math
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._arguments import nearest
from .._printing.progress import Watcher, progress_of
from .._tensor_names import JOINED
from ..folders.beside import EMBEDDING, HEAD, TIED
from ..folders.checked import Checked, Fault
from ..folders.fits import require_fits
from ..folders.folder import TensorFolder, require_folder_name
from ..folders.layout import CACHE_SCALES, INPUT_BOUND, SCALES
from ..folders.scaled_matrix import ScaledMatrix
from ..folders.tensors import Tensor, Values, tensors_in, with_each_expert
from ..folders.whole_folder import faults_of_folder
from ..layers import Kernel, LayerRule, default_rules, rebuilt
from ..layers.checks import floating_dtype, require_layers, require_merged
from ..layouts import Layout
from ..models.transformer import Transformer
from ..serving import unstacked
from ..serving.constructors import OF_MATRICES, Constructor, constructors_with
from .architecture import names_of, transformer_of
from .fp8_layers import frozen_layer, served_layer
from .model import Leaf, Site, leaves, map_sites, plain, sites, tensors_of, without_sharing
from .names import NameMap


class Weights(enum.Enum):
    """What becomes of weights that a checkpoint holds in FP8 or in four bits."""

    DEQUANTIZED = "dequantized"
    """`data * scale`, in the dtype of the model's parameters: to train them."""

    FROZEN = "frozen"
    """Data and scales as they are, in FP8 or four bits, which never change: a base for adapters."""

    SERVED = "served"
    """FP8 data and scales as they are, multiplied in FP8: for inference."""


def import_model[M](
    directory: str | os.PathLike[str],
    model: M,
    *,
    names: Any = None,
    weights: Weights | str = Weights.DEQUANTIZED,
    strict: bool = True,
    rules: tuple[LayerRule, ...] = default_rules,
    quantized_layers: Mapping[type, Constructor] | None = None,
    follow_links: bool = False,
    progress: Watcher | None = None,
) -> M:
    """Reads a checkpoint into a model, without PyTorch.

    The layout is the one that `config.json` names; a folder without quantization is read as it is. Weights that the
    checkpoint has in FP8 become what `weights` says, all others take the dtype of the model's parameters. Layers that
    engines fuse (`qkv_proj`, `gate_up_proj`) are taken apart, and a head that the checkpoint ties to its embedding gets
    the embedding. A converted model keeps its FP8 state, which is that of other weights: calibrate it.

    Args:
        directory: The folder of the checkpoint.
        model: A model of the same sizes, whose weights do not matter: it may be abstract (`eqx.filter_eval_shape`).
            Arrays are divided as its own are, if they have a sharding.
        names: The `NameMap`, or a dict from the model's names to the checkpoint's. By default a `models.Transformer`
            has the names of its architecture, and any other model those of Haliax's state dict, as with `{}`.
        weights: `"dequantized"`, `"frozen"` or `"served"`; see `Weights`. A served model is as
            `serving.quantize_for_inference` makes it: inputs are quantized as the checkpoint says, stacks become one
            block after the other, and layers compute in the dtype of the model's parameters.
        strict: Whether a tensor of the checkpoint that the model does not have is an error.
        rules: The rules of the layer classes, as in `Fp8Config`.
        quantized_layers: As in `quantize_for_inference`: makes frozen and served layers of your own classes.
        follow_links: As in `check_folder`.
        progress: As in `export_model`.

    Returns:
        The model with the checkpoint's weights.

    Raises:
        ValueError: If `check_folder` finds an error in the configuration or in a tensor that is read; if a tensor is
            missing, has another shape than in the model, or is one that the model lacks. Each names the tensor.
    """
    require_folder_name(directory, "import_model(directory, model)")
    require_layers(model, "import_model(directory, model)")
    require_merged(model)
    weights = _weights(weights)
    folder = TensorFolder.open(directory, follow_links=follow_links)
    name_map, constructors = (
        names_of(model, names, folder.tensors),
        constructors_with(quantized_layers, rules, OF_MATRICES),
    )
    return _imported(folder, model, name_map, weights, rules, constructors, progress, _OF_IMPORT, strict=strict)


def _weights(weights: "Weights | str") -> Weights:
    try:
        return Weights(weights)
    except ValueError:
        options = ", ".join(repr(member.value) for member in Weights)
        raise ValueError(f"weights={weights!r} must be one of {options}") from None


def _imported[M](
    folder: TensorFolder,
    model: M,
    name_map: NameMap,
    weights: Weights,
    rules: tuple[LayerRule, ...],
    constructors: Mapping[type, Constructor],
    progress: Watcher | None,
    remedies: "_Remedies",
    *,
    strict: bool = True,
) -> M:
    with progress_of("reading", sum(stored.bytes for stored in folder.tensors.values()), progress) as advance:
        checkpoint = checkpoint_of(folder, model, name_map, rules, advance, remedies)
        # Names are known before anything is read.
        needed = {checkpoint.source(each.name) for each in tensors_of(model, rules) if _is_floating(each)}
        if strict:
            # What scales belong to shows when weights are read.
            scales = {name for name in checkpoint.checked.tensors if "scale" in name.rpartition(".")[2]}
            shared = {name_map.to_checkpoint(tensor.name) for tensor in tensors_of(without_sharing(model), rules)}
            checkpoint.refuse_unused(needed | shared | scales)
        load = lambda site: _loaded(site, checkpoint, weights, constructors)
        loaded = map_sites(load, model, rules)
    _use_shared(model, loaded, rules, checkpoint)
    if strict:
        checkpoint.refuse_unused(checkpoint.used)
    if weights is not Weights.DEQUANTIZED and not any(site.is_in_fp8 for site in sites(loaded, rules)):
        raise ValueError(
            f"weights={weights.value!r} needs weights in FP8 or four bits, and {folder.directory} has none for the "
            "model: all layers would stay trainable. Give a folder in FP8, such as `haliax-fp8 checkpoint convert` "
            "makes, or take weights='dequantized'"
        )
    return unstacked(loaded) if weights is Weights.SERVED else loaded


def checkpoint_of(
    folder: TensorFolder,
    model: Any,
    names: NameMap,
    rules: tuple[LayerRule, ...],
    advance: Callable[[str, int], None],
    remedies: "_Remedies | None" = None,
) -> "_Checkpoint":
    """The tensors of a folder by a model's names; none is read yet.

    Raises:
        ValueError: If the configuration has an error.
    """
    checked = Checked.of(folder)
    outputs = functools.cache(
        lambda: {
            names.to_checkpoint(tensor.name): tensor.shape[0] for tensor in tensors_of(model, rules) if tensor.shape
        }
    )
    misfits = [fault for fault in faults_of_folder(checked) if fault.is_error]
    for fault in misfits:
        if fault.tensor not in folder.tensors:
            raise fault.error
    tensors, is_tied = with_each_expert(tensors_in(folder)), bool(folder.config.get(TIED))
    return _Checkpoint(tensors, names, outputs, is_tied, set(), checked, misfits, advance, remedies or _OF_IMPORT)


def load(
    directory: str | os.PathLike[str],
    *,
    weights: "Weights | str" = "dequantized",
    dtype: DTypeLike | None = None,
    without_effect: tuple[str, ...] = (),
    follow_links: bool = False,
    progress: Watcher | None = None,
) -> Transformer:
    """The model of a folder of a known family, such as Llama, Qwen3 or Gemma, plain or in any layout of FP8.

    `config.json` says what the model computes; every key that changes it is taken from there or refused by name. So the
    model is the folder's, and not one with the same shapes.

    Args:
        directory: The folder, with `config.json` beside its safetensors.
        weights: As in `import_model`: `"dequantized"`, `"frozen"` or `"served"`.
        dtype: The dtype of the weights that are not in FP8; by default the one that `config.json` names.
        without_effect: Keys of `config.json` that this version does not know, and that you know not to matter.
        follow_links: As in `check_folder`: for a folder in the cache of Hugging Face's hub.
        progress: As in `export_model`.

    Returns:
        The model, its blocks stacked. Sequences may be as long as `max_position_embeddings`.

    Raises:
        ValueError: If the architecture or a key of `config.json` is not supported; or as `import_model` does.

    Example:
        >>> import tempfile
        >>> from haliax_fp8.huggingface import export_model, load
        >>> from haliax_fp8.models import Transformer, TransformerConfig
        >>> trained = Transformer.init(TransformerConfig(layers=1), key=jax.random.key(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_model(trained, f"{folder}/model", "FP8_DYNAMIC")
        ...     served = load(f"{folder}/model", weights="served")
        >>> type(served.blocks.blocks[0].mlp.up).__name__
        'QuantizedLinear'
    """
    require_folder_name(directory, "load(directory)")
    if not isinstance(without_effect, tuple | list) or not all(isinstance(key, str) for key in without_effect):
        raise ValueError(f"without_effect={without_effect!r} must be keys of config.json, such as ('use_cache',)")
    folder = TensorFolder.open(directory, follow_links=follow_links)
    config, names = transformer_of(folder, without_effect)
    named = folder.config.get("dtype", folder.config.get("torch_dtype", "bfloat16"))
    dtype = floating_dtype("dtype", named if dtype is None else dtype)
    init = functools.partial(Transformer.init, config)
    model = eqx.filter_eval_shape(lambda key: init(key=key), jax.random.key(0))
    cast = lambda x: jax.ShapeDtypeStruct(x.shape, dtype) if _is_floating(x) else x
    model = jax.tree.map(cast, model)
    return _imported(folder, model, names, _weights(weights), default_rules, OF_MATRICES, progress, _OF_LOAD)


def _is_floating(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct | Tensor) and jnp.issubdtype(x.dtype, jnp.floating)


def _loaded(site: Site, checkpoint: "_Checkpoint", weights: Weights, constructors: Mapping[type, Constructor]) -> Any:
    """A layer or an array with the numbers of a checkpoint."""
    if site.is_in_fp8:
        raise ValueError(f"model has a layer in FP8 at {site.place}; pass the plain model that it was imported into")
    arrays = leaves(site)
    if site.rule is None:
        is_float = jnp.issubdtype(np.dtype(plain(site.node).dtype), jnp.floating)
        return _filled(arrays[0], checkpoint, 1.0) if is_float else site.node
    layer, op, kernel = site.node, site.op, site.kernel
    changes = {leaf.field: _filled(leaf, checkpoint, 1.0) for leaf in arrays if not leaf.is_kernel}
    for leaf in arrays:
        if not leaf.is_kernel:
            continue
        by_index = [(index, checkpoint.read(name, leaf.shape)) for name, index in leaf.tensors()]
        if weights is Weights.DEQUANTIZED or not any(isinstance(values, ScaledMatrix) for _, values in by_index):
            by_name = {name: values for (name, _), (_, values) in zip(leaf.tensors(), by_index, strict=True)}
            changes[_field_of(layer, kernel)] = _filled(leaf, checkpoint, kernel.factor, by_name)
            continue
        matrices = [(index, _scaled(values, site)) for index, values in by_index]
        assert site.rule is not None
        plain_layer = site.rule.with_op(_with(layer, changes), None)
        if weights is Weights.FROZEN:
            return frozen_layer(plain_layer, leaf, matrices, constructors)
        layouts = [checkpoint.layout(name) for name, _ in leaf.tensors()]
        if len(inputs := {layout and layout.inputs for layout in layouts}) > 1:
            ways = " and ".join(sorted(map(str, inputs)))
            raise ValueError(
                f"{site.place} has blocks or experts whose inputs are quantized in different ways ({ways}); import the "
                "checkpoint dequantized, or into a model without stacks"
            )
        assert layouts[0] is not None
        compute_dtype = None if op is None else op.compute_dtype
        return served_layer(plain_layer, leaf, matrices, constructors, layouts[0], compute_dtype)
    return _with(layer, changes)


def _use_shared(model: Any, loaded: Any, rules: tuple[LayerRule, ...], checkpoint: "_Checkpoint") -> None:
    """Notes which tensors are those of arrays that an `eqx.nn.Shared` has elsewhere, with the same numbers.

    Raises:
        ValueError: If what is shared is in FP8 now: a layer in high precision has no place for it.
    """
    if (whole := without_sharing(model)) is model:
        return
    in_loaded = {tensor.name: tensor for tensor in tensors_of(without_sharing(loaded), rules)}
    for name in (tensor.name for tensor in tensors_of(whole, rules)):
        if name not in in_loaded:
            raise ValueError(
                f"{name} is that of another layer by eqx.nn.Shared, which is in FP8 now; import with "
                "weights='dequantized', or give the model with what is shared in both places, model()"
            )
        tensor, wanted = in_loaded[name], checkpoint.names.to_checkpoint(name)
        if wanted in checkpoint.tensors and wanted not in checkpoint.used:
            values, shared = _dense(checkpoint.tensors[wanted].read()), _dense(tensor.read())
            if np.array_equal(values.astype(shared.dtype), shared):
                checkpoint.use(wanted)


def _filled(leaf: Leaf, checkpoint: "_Checkpoint", factor: float, by_name: dict[str, Values] | None = None) -> Any:
    """An array like that of a leaf, with the numbers of a checkpoint."""
    dtype = np.dtype(plain(leaf.array).dtype)

    def read(name: str) -> np.ndarray:
        numbers = _dense(checkpoint.read(name, leaf.shape) if by_name is None else by_name[name])
        if not jnp.issubdtype(numbers.dtype, jnp.floating):
            raise ValueError(
                f"{name} is in {numbers.dtype} in the checkpoint, and in {dtype} in the model: whole numbers may stand "
                "for others, by a scale. Dequantize the checkpoint with the library that wrote it, and import that"
            )
        numbers = numbers if factor == 1.0 else numbers / factor
        require_fits(numbers, dtype, name)
        return numbers

    return leaf.filled(read)


def _dense(values: Values) -> np.ndarray:
    """`data * scale` in float32, or the values."""
    return values.dequantized() if isinstance(values, ScaledMatrix) else values


def _scaled(values: Values, site: Site) -> ScaledMatrix:
    if isinstance(values, ScaledMatrix):
        return values
    raise ValueError(
        f"{site.place} is in {values.dtype}, but in FP8 in other blocks or experts; import the checkpoint dequantized, "
        "or into a model without stacks"
    )


def _field_of(layer: Any, kernel: Kernel) -> str:
    for field in dataclasses.fields(layer):
        if getattr(layer, field.name, None) is kernel.weight:
            return field.name
    raise ValueError(
        f"the weight of a {type(layer).__name__}, as its LayerRule gives it, is not one of its fields; give a rule "
        "whose Kernel holds the field itself"
    )


def _with(layer: Any, changes: dict[str, Any]) -> Any:
    """The layer with other fields; without its constructor, which may take other arguments."""
    names = [field.name for field in dataclasses.fields(layer) if hasattr(layer, field.name)]
    return rebuilt(type(layer), {name: getattr(layer, name) for name in names} | changes)


# --- What a model wants of a folder -----------------------------------------------------------------------------------


# What a model need not have: tables and bounds that follow from the configuration, and scales of caches.
_DERIVED = ("rotary_emb.inv_freq", *(f".{name}" for name in (INPUT_BOUND, *CACHE_SCALES)))


@dataclasses.dataclass(frozen=True)
class _Remedies:
    """What to do about names that differ."""

    of_missing: str
    of_unused: str


_OF_IMPORT = _Remedies(
    "If it has the tensor under another name, map it with names=...",
    "map their names with names=..., or leave them out with strict=False",
)
_OF_LOAD = _Remedies(
    "Copy all files of the folder, or build the model yourself, and give it to import_model with names=...",
    "correct config.json if it is that of another model, or build the model yourself, and give it to import_model, "
    "which leaves them out with strict=False",
)


@dataclasses.dataclass(frozen=True)
class _Checkpoint:
    """The tensors of a folder by a model's names.

    Args:
        tensors: Those of the folder.
        names: From the model's names to the checkpoint's.
        outputs: Gives the first size of each tensor of the model, by the checkpoint's names.
        is_tied: Whether the configuration says that the head is the embedding.
        used: The names that were read, and those of their scales.
        checked: The folder, with its checks.
        misfits: Tensors that do not fit the configuration, or each other.
        advance: Called with the name and the bytes of each tensor that is read.
        remedies: What to do about a tensor that is missing, and one that nothing reads.
    """

    tensors: dict[str, Tensor]
    names: NameMap
    outputs: Callable[[], dict[str, int]]
    is_tied: bool
    used: set[str]
    checked: Checked
    misfits: list[Fault]
    advance: Callable[[str, int], None]
    remedies: "_Remedies"

    def read(self, name: str, shape: tuple[int, ...]) -> Values:
        """A tensor of the model: its values, or FP8 data and scales.

        Args:
            name: Its name in the model.
            shape: Its shape there.

        Raises:
            ValueError: If there is none, or it has another shape.
        """
        wanted, source = self.names.to_checkpoint(name), self.source(name)
        layer, _, field = wanted.rpartition(".")
        parent, _, last = layer.rpartition(".")
        is_part = source != wanted and source != self._embedding
        values = self._part(source, parent, last, field) if is_part else self._take(source)
        _require_shape(wanted, values.shape, name, shape)
        return values

    def source(self, name: str) -> str:
        """The tensor of the checkpoint that one of the model is read from.

        Raises:
            ValueError: If there is none.
        """
        wanted = self.names.to_checkpoint(name)
        layer, _, field = wanted.rpartition(".")
        parent, _, last = layer.rpartition(".")
        if wanted in self.tensors:
            return wanted
        if (whole := self._fused(parent, last, field)) is not None:
            return f"{whole}.{field}"
        if last == HEAD and field == "weight" and self.is_tied and self._embedding is not None:
            return self._embedding
        near = ", ".join(nearest(wanted, list(self.tensors), 3)) or "none"
        raise ValueError(f"the checkpoint has no {wanted}; the nearest are {near}. {self.remedies.of_missing}")

    def layout(self, name: str) -> Layout | None:
        """How a layer is quantized; None if it is not.

        Args:
            name: Its weight's name in the model.
        """
        layout = self.tensors[self.source(name)].layout
        return None if layout is None else layout.of_one_layer

    def refuse_unused(self, read: Collection[str]) -> None:
        """Raises a ValueError if nothing reads a tensor of the checkpoint.

        Args:
            read: The names of those that are read.
        """
        wholes = {self.tensors[name].whole or name for name in read if name in self.tensors}
        used = {scale for name in wholes for scale in self._with_scales(name)}.union(read)
        rest = [name for name in self.checked.tensors if name not in used and not name.endswith(_DERIVED)]
        rest += [name for name, x in self.tensors.items() if x.whole and x.whole in wholes and name not in read]
        tied, table = f"{HEAD}.weight", self._embedding
        if tied in rest and self.is_tied and table is not None and table in used:
            if np.array_equal(_dense(self.tensors[tied].read()), _dense(self.tensors[table].read())):
                rest.remove(tied)
        if rest:
            more = f" and {len(rest) - 3} more" if len(rest) > 3 else ""
            raise ValueError(
                f"the model has no array for {', '.join(rest[:3])}{more} of {self.checked.folder.directory}; "
                + self.remedies.of_unused
            )

    def use(self, name: str) -> list[str]:
        """Notes that a tensor is read, and its scales; returns the names."""
        names = self._with_scales(name)
        for read in names:
            if read not in self.used and read in self.checked.tensors:
                self.advance(read, self.checked.tensors[read].bytes)
        self.used.update(names)
        return names

    def _with_scales(self, name: str) -> list[str]:
        layer, _, field = name.rpartition(".")
        scales = [f"{layer}.{scale}".removeprefix(".") for scale in SCALES] if field == "weight" else []
        return [name, *(scale for scale in scales if scale in self.checked.tensors)]

    @property
    def _embedding(self) -> str | None:
        return next((name for name in self.tensors if name.endswith(EMBEDDING)), None)

    def _take(self, name: str) -> Values:
        whole = self.tensors[name].whole or name
        if whole not in self.used:
            names = self.use(whole)
            of_these = itertools.chain(*map(self.checked.of_tensor, names))
            misfits = (fault for fault in self.misfits if fault.tensor in names)
            for fault in itertools.chain(misfits, of_these):
                if fault.is_error:
                    raise fault.error
        self.used.add(name)
        return self.tensors[name].read()

    def _fused(self, parent: str, last: str, field: str) -> str | None:
        """The layer that engines fuse this one into, if the checkpoint has it."""
        whole = (f"{parent}.{fused}".removeprefix(".") for fused, parts in JOINED.items() if last in parts)
        return next((layer for layer in whole if f"{layer}.{field}" in self.tensors), None)

    def _part(self, source: str, parent: str, last: str, field: str) -> Values:
        whole = source.removesuffix(f".{field}")
        parts = JOINED[whole.rpartition(".")[2]]
        outputs = self.outputs()
        sizes = [outputs.get(f"{parent}.{part}.weight".removeprefix(".")) for part in parts]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            raise ValueError(f"{whole} holds {', '.join(parts)}, and the model lacks some of them; join its layers")
        values = self._take(f"{whole}.{field}")
        _require_shape(f"{whole}.{field}", values.shape[:1], f"{', '.join(parts)} of {parent}", (sum(known),))
        start = sum(known[: parts.index(last)])
        if self.checked.folder.config.get("model_type") == "gpt_oss" and parts == JOINED["gate_up_proj"]:
            return _alternate(values, parts.index(last), len(parts))
        return _rows(values, start, start + known[parts.index(last)])


def _alternate(values: Values, first: int, step: int) -> Values:
    """Every other output, as gpt-oss has those of gates and others in turn."""
    rows = slice(first, None, step)
    if not isinstance(values, ScaledMatrix):
        return values[rows]
    each = np.repeat(values.scale, values.block[0], axis=0)[: values.shape[0]]
    return dataclasses.replace(values, data=values.data[rows], scale=each[rows], block=(1, values.block[1]))


def _rows(values: Values, start: int, stop: int) -> Values:
    """Some of the outputs."""
    if not isinstance(values, ScaledMatrix):
        return values[start:stop]
    (height, width), scale = values.block, values.scale
    if start % height or (stop % height and stop != values.shape[0]):
        # Blocks that lie across the edge: a scale for each row, the same numbers.
        scale = np.repeat(scale, height, axis=0)[: values.shape[0]]
        height = 1
    part = scale[start // height : -(-stop // height)]
    return dataclasses.replace(values, data=values.data[start:stop], scale=part, block=(height, width))


def _require_shape(name: str, stored: tuple[int, ...], ours: str, shape: tuple[int, ...]) -> None:
    if tuple(stored) != tuple(shape):
        # Haliax's layers may have several axes; a checkpoint's vector is the same numbers.
        hint = "; it is transposed" if tuple(stored) == tuple(shape)[::-1] and len(shape) == 2 else ""
        raise ValueError(
            f"{name} has shape {tuple(stored)}, and {ours} of the model {tuple(shape)}{hint}; "
            f"{math.prod(stored)} and {math.prod(shape)} numbers. Build the model with the sizes of config.json"
        )
