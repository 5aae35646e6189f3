"""What an export writes: each tensor's name, shape and dtype beforehand, its values when they are asked for."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..._numerics.require import require_bool
from ...layers.config import Fp8Config, as_config
from ...layers.patterns import Targets, as_patterns
from ...layers.tensor_names import WEIGHT
from ...recipes.recipe import SCALE_BITS, OperandName
from ..layout import E4M3, require_elements
from ..names import NameMap
from ..scaled_matrix import BF16, BF16_BITS, ScaledMatrix, are_exponents, quantized, rounded_up, spread
from .cache_scale import CacheScale
from .collected import Matrix, Other, collect
from .matrices import plain


# Layers that engines leave in high precision, by their names in models.
HEADS = ("head", "lm_head")


@dataclasses.dataclass(frozen=True)
class Fp8Kernel:
    """A layer's weight that is written in FP8.

    Args:
        name: The layer's name in the checkpoint.
        shape: `[out, in]`.
        quantize: Makes its data and scales.
    """

    name: str
    shape: tuple[int, int]
    quantize: Callable[[], ScaledMatrix]


@dataclasses.dataclass(frozen=True)
class Dense:
    """A tensor that is written as it is.

    Args:
        name: Its name in the checkpoint.
        shape: Its shape.
        dtype: Its dtype.
        read: Reads its values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that an export writes.

    Args:
        kernels: The weights in FP8.
        dense: All other tensors.
        ignore: The layers whose weights stay in high precision and have two axes or more, by the checkpoint's names.
    """

    kernels: tuple[Fp8Kernel, ...]
    dense: tuple[Dense, ...]
    ignore: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Choices:
    """How the tensors of a model are written.

    Args:
        names: From the model's names to the checkpoint's.
        dtype: The dtype the model computes in, also of arrays that are not quantized. None keeps each array's own.
        bf16_scales: Whether scales are rounded up to what bfloat16 holds.
        training_scales: Whether kernels get the scales of the next step of training, where a layout can have them.
        targets: The layers to quantize; None for those that are in FP8 in training, or all if none is.
        exclude: Layers to leave in high precision; None for heads, unless training has them in FP8.
        config: The configuration; only its rules of layer classes matter.
        kv_cache_scales: Whether scales of keys and values are written, from the state of attention.
    """

    names: NameMap
    dtype: np.dtype | None
    bf16_scales: bool
    training_scales: bool
    targets: Targets | None
    exclude: Targets | None
    config: Fp8Config | None
    kv_cache_scales: bool = False

    def __post_init__(self) -> None:
        for name in ("bf16_scales", "training_scales", "kv_cache_scales"):
            require_bool(name, getattr(self, name), of="an export")


def plan(
    model: Any,
    choices: Choices,
    block_of: Callable[[tuple[int, int]], tuple[int, int]] | None,
    *,
    static: bool,
    exponents: bool = False,
    cache_names: tuple[str, str] | None = None,
) -> Plan:
    """What an export of a model writes, and from where.

    Args:
        model: The model.
        choices: How.
        block_of: The blocks of a kernel of a shape; None if nothing is quantized.
        static: Whether each layer needs a scale of its input.
        exponents: Whether the scales of kernels are powers of two that E8M0 holds.
        cache_names: The names of the scales of keys and values; None if the layout has none.

    Raises:
        ValueError: If two tensors get the same name, nothing is left to quantize, a scale is missing, or a layer of the
            model is in another format of FP8 than layouts have.
    """
    names, rules = choices.names, as_config(choices.config).rules
    targets = None if choices.targets is None else as_patterns("targets", choices.targets)
    exclude = HEADS if choices.exclude is None else as_patterns("exclude", choices.exclude)
    found = collect(model, rules, targets=targets, exclude=exclude)
    kernels, dense = [], []
    for matrix in found.matrices:
        name = names.to_checkpoint(matrix.name)
        if block_of is None or not matrix.quantizable:
            if matrix.frozen is not None:
                raise ValueError(
                    f"{matrix.name} is in FP8 in the model and would be written in high precision; thaw the model "
                    "first, or choose a layout that has it in FP8"
                )
            read = lambda matrix=matrix: matrix.values(choices.dtype)
            dense.append(Dense(f"{name}.weight", matrix.shape, _dtype(matrix, choices), read))
            continue
        if matrix.frozen_dtype not in (None, E4M3):
            raise ValueError(
                f"{matrix.name} is in {matrix.frozen_dtype} in the model, and layouts have {E4M3}; make it plain with "
                "serving.dequantize or checkpoints.thaw, and export that, which quantizes it again"
            )
        if static and matrix.input_scale is None:
            raise ValueError(
                f"{matrix.name} has no scale for its input, which a static layout needs: it has to come from training "
                "with delayed or static scaling, or from calibrate(fp8_linear_layers(model, recipe='static'), ...). "
                "'FP8_DYNAMIC' needs none"
            )
        require_elements(matrix.name, matrix.shape)
        block = block_of(matrix.shape)
        quantize = lambda matrix=matrix, block=block: _quantized(
            matrix, block, choices, static=static, exponents=exponents
        )
        kernels.append(Fp8Kernel(name, matrix.shape, quantize))
    for other in found.others:
        name, dtype = names.to_checkpoint(other.name), _dtype(other, choices)
        read = lambda other=other: other.values(choices.dtype)
        dense.append(Dense(name, other.parts.shape, dtype, read))
    if choices.kv_cache_scales:
        dense += _cache_scales(found.caches, choices, cache_names)
    _require_one_each([*(f"{kernel.name}.weight" for kernel in kernels), *(tensor.name for tensor in dense)])
    if block_of is not None and not kernels:
        raise ValueError("model has no layer to quantize; give targets=..., or the layout 'BF16' for a plain export")
    return Plan(tuple(kernels), tuple(dense), _in_high_precision(dense))


def _in_high_precision(dense: Sequence[Dense]) -> tuple[str, ...]:
    """The layers of matrices that are not quantized, whatever their class and name.

    Engines and checks know a checkpoint's layers by their names alone. Listed, an embedding called `emb` or a
    convolution is not taken for a linear layer that lost its scales.
    """
    return tuple(t.name.removesuffix(WEIGHT) for t in dense if t.name.endswith(WEIGHT) and len(t.shape) > 1)


def _cache_scales(
    caches: Sequence[CacheScale], choices: Choices, cache_names: tuple[str, str] | None
) -> Iterator[Dense]:
    """The scales of keys and values, one of each for an attention."""
    if cache_names is None:
        raise ValueError(
            "kv_cache_scales=True, but the layout has no scales of keys and values; use one of "
            "compressed-tensors, such as 'FP8_DYNAMIC', or 'modelopt'"
        )
    if not caches:
        raise ValueError(
            "kv_cache_scales=True, but nothing in the model has seen keys and values: the state of a projection holds "
            "amaxes of its input, kernel and output gradient, and none of its output, which is rotated before it is "
            "cached. Train with attention.Fp8Attention, or calibrate a model that has it"
        )
    owners = [cache.name for cache in caches]
    if twice := [name for name in owners if owners.count(name) > 1]:
        raise ValueError(
            f"kv_cache_scales=True, but {twice[0] or 'the model'} holds several Fp8Attention, and engines expect one "
            "per module; put each in a module of its own"
        )
    for cache in caches:
        for i, part in enumerate(cache_names):
            name = f"{choices.names.to_checkpoint(cache.name)}.{part}".removeprefix(".")
            scale = np.array([cache.scales()[i]], np.float32)
            scale = rounded_up(scale) if choices.bf16_scales else scale
            yield Dense(name, (1,), scale.dtype, lambda scale=scale: scale)


def _quantized(
    matrix: Matrix, block: tuple[int, int], choices: Choices, *, static: bool, exponents: bool
) -> ScaledMatrix:
    if matrix.frozen is not None:
        made = matrix.frozen_values()
        if (finer := spread(made, block)) is None:
            raise ValueError(
                f"{matrix.name} is in FP8 in blocks of {made.block}, which the layout's blocks of {block} cannot hold; "
                "choose the layout that it was imported from, or thaw the model to quantize it again"
            )
        if exponents and not are_exponents(finer.scale):
            raise ValueError(
                f"{matrix.name} has scales that the layout cannot store: it takes powers of two, 2**-127 or larger. "
                "Choose the layout that it was imported from, or make the model plain to quantize it again"
            )
        return dataclasses.replace(finer, input_scale=made.input_scale if static else None)
    training = choices.training_scales
    stored = matrix.stored_scale if training else None
    try:
        made = quantized(
            matrix.values(choices.dtype),
            block,
            scaling=matrix.scaling if training else None,
            stored=stored,
            scale_bits=_scale_bits(matrix, choices, "kernel"),
            bf16_scales=choices.bf16_scales,
            exponents=exponents,
        )
    except ValueError as error:
        raise ValueError(f"{matrix.name} cannot be exported: {error}") from None
    if not static:
        return made
    scale = np.float32(matrix.input_scale)
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"{matrix.name} has the input scale {scale}; calibrate the model, or train a step")
    bits = _scale_bits(matrix, choices, "input")
    scale = rounded_up(scale.reshape(1), min(bits, BF16_BITS) if choices.bf16_scales else bits)[0]
    return dataclasses.replace(made, input_scale=float(scale))


def _scale_bits(matrix: Matrix, choices: Choices, operand: OperandName) -> int:
    """How many significant bits the scale of an operand has where the step multiplies: fewer in bfloat16."""
    return SCALE_BITS[operand] if _dtype(matrix, choices) == BF16 else 24


def _dtype(tensor: Matrix | Other, choices: Choices) -> np.dtype:
    own = np.dtype(plain(tensor.array).dtype)
    if isinstance(tensor, Matrix) and tensor.op is not None and tensor.op.compute_dtype is not None:
        return tensor.op.compute_dtype
    is_float = own.kind == "f" or own.name.startswith(("bfloat", "float"))
    return choices.dtype if choices.dtype is not None and is_float else own


def _require_one_each(names: list[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"names gives {twice[0]!r} to two tensors of the model; each needs a name of its own")
