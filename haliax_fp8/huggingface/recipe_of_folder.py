"""The quantizer of a published folder as a configuration for training, and its scales in the converted model."""

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import haliax as hax
import jax.numpy as jnp
import numpy as np

from ..folders.folder import TensorFolder, require_folder_name
from ..folders.layout import scale_names
from ..folders.scaled_matrix import ScaledMatrix, are_exponents
from ..formats import E2M1
from ..layers import Fp8Config, LayerRule, axes_of, default_rules, with_names_of_stacks
from ..layers.checks import require_layers
from ..layers.walk import Pattern, find_layers
from ..layouts import Layout
from ..recipes import (
    AbstractScaling,
    FolderScales,
    FolderScaling,
    NVFP4Scaling,
    Quantization,
    Recipe,
    StaticScaling,
    by_name,
)
from ..training import OpState
from .architecture import names_of
from .importing import checkpoint_of
from .model import Leaf, Site, leaves, map_sites, sites


type Matrices = Sequence[tuple[tuple[int, ...], ScaledMatrix]]


def fp8_config_of(
    directory: str | os.PathLike[str],
    model: Any,
    *,
    names: Any = None,
    rules: tuple[LayerRule, ...] = default_rules,
    follow_links: bool = False,
) -> Fp8Config:
    """The quantizer of a published folder, as a configuration that trains with it.

    `out = dot(q(input), q(kernel))`, where `q` has the formats, blocks and rule of scales of the folder, each a
    `FolderScaling`. Gradients are those of the nearest named recipe: `"current"` for scales of tensors, `"rowwise"` of
    channels, `"deepseek"` of blocks, `"mxfp8"` or `"nvfp4"`. Layers that the folder left alone stay as they are.

    Dynamic inputs have scales in float32, or powers of two where weights do; static ones the folder's scale, which
    `with_folder_scales` sets. In NVFP4 the scale of an input tensor is that of each batch, `NVFP4Scaling()`.

    Args:
        directory: The folder.
        model: The model that `load` or `import_model` made of it, `weights="dequantized"`, not converted.
        names: As in `import_model`.
        rules: As in `Fp8Config`.
        follow_links: As in `check_folder`.

    Raises:
        ValueError: If the folder has no quantized layer of the model, or a layer has inputs in high precision or
            clipped ones, scales that ModelOpt has in two levels, or blocks or experts in different layouts; names the
            layer and what to do.

    Example:
        >>> import tempfile
        >>> from haliax_fp8.huggingface import export_model, load, with_folder_scales
        >>> from haliax_fp8.models import Transformer, TransformerConfig
        >>> folder = tempfile.mkdtemp() + "/published"
        >>> report = export_model(Transformer.init(TransformerConfig(layers=1), key=jax.random.key(0)), folder)
        >>> published = load(folder)
        >>> config = fp8_config_of(folder, published)
        >>> print(config.recipe.kernel.scaling)
        FolderScaling(block=(1, 0), scales='bfloat16_up')
        >>> converted = with_folder_scales(folder, fp8_linear_layers(published, config))
    """
    paths = {id(layer): path for path, (layer, _) in find_layers(model, rules).items()}
    recipes: dict[str, Recipe] = {}
    call = "fp8_config_of(directory, model)"
    for site, leaf, matrices, layout, scale_dtypes in _quantized(call, directory, model, names, rules, follow_links):
        if site.op is not None:
            raise ValueError(f"{site.place} trains in FP8 already; give fp8_config_of the model before its conversion")
        recipe = _recipe(str(site.place), layout, matrices, scale_dtypes)
        _require_blocks_fit(site, leaf, recipe.kernel.scaling)
        recipes[paths[id(site.node)]] = recipe
    if not recipes:
        raise ValueError(
            f"no layer of the model is quantized in {os.fspath(directory)}: train it with a recipe by name"
        )
    exactly = lambda path: re.compile(re.escape(path))
    first, *_ = recipes.values()
    others: dict[Pattern, Recipe] = {exactly(path): recipe for path, recipe in recipes.items() if recipe != first}
    return Fp8Config([exactly(path) for path in recipes], recipe=first, overrides=others, rules=rules)


def with_folder_scales[M](
    directory: str | os.PathLike[str],
    model: M,
    *,
    names: Any = None,
    rules: tuple[LayerRule, ...] = default_rules,
    follow_links: bool = False,
) -> M:
    """The model with the scales of the folder that its weights came from.

    A block of a kernel whose elements are still those of the folder keeps its scale: fprop then multiplies the folder's
    data and scales, and `export_model` writes them, bit for bit. Scales of static inputs are set. In NVFP4 the scale of
    the tensor stays, so that other blocks do. It costs four bytes for each block, and in each product one more cast of
    the kernel and a comparison, and a byte per weight that the backward pass keeps.

    Args:
        directory: The folder.
        model: The model, converted with `fp8_config_of`.
        names: As in `import_model`.
        rules: As in `Fp8Config`.
        follow_links: As in `check_folder`.

    Raises:
        ValueError: If a layer that the folder has quantized has another recipe; if experts have static inputs with a
            scale each; names the layer and what to do.
    """
    replacements: dict[int, Any] = {}
    call = "with_folder_scales(directory, model)"
    for site, leaf, matrices, _, _ in _quantized(call, directory, model, names, rules, follow_links):
        op = site.op
        if op is None or not isinstance(op.recipe.kernel.scaling, FolderScaling):
            what = "in high precision" if op is None else f"in {op.recipe}"
            raise ValueError(
                f"{site.place} is quantized in the folder and {what} in the model; convert it with "
                "fp8_linear_layers(model, fp8_config_of(directory, model))"
            )
        assert site.rule is not None
        op = dataclasses.replace(op, folder_scales=_scales(leaf, matrices))
        if isinstance(op.recipe.input.scaling, StaticScaling):
            assert isinstance(op.state, OpState)
            op = dataclasses.replace(op, state=_with_input_scale(op.state, site, leaf, matrices))
        replacements[id(site.node)] = site.rule.with_op(site.node, op)
    return map_sites(lambda site: replacements.get(id(site.node), site.node), model, rules)


def _quantized(
    call: str,
    directory: str | os.PathLike[str],
    model: Any,
    names: Any,
    rules: tuple[LayerRule, ...],
    follow_links: bool,
) -> Iterator[tuple[Site, Leaf, Matrices, Layout, set[str]]]:
    """The layers that a folder has quantized, with their matrices, their layout and the dtypes of scales in files."""
    require_folder_name(directory, call)
    require_layers(model, call)
    folder = TensorFolder.open(directory, follow_links=follow_links)
    checkpoint = checkpoint_of(folder, model, names_of(model, names, folder.tensors), rules, lambda *_: None)
    for site in sites(model, rules):
        if site.rule is None:
            continue
        if site.is_in_fp8:
            raise ValueError(f"{site.place} is frozen or served; load the folder with weights='dequantized'")
        for leaf in (leaf for leaf in leaves(site) if leaf.is_kernel):
            layouts = {checkpoint.layout(name) for name, _ in leaf.tensors()}
            if layouts == {None}:
                continue
            layout, *others = layouts
            if others or layout is None:
                raise ValueError(
                    f"{site.place} has blocks or experts in different layouts, and one recipe; import the folder into "
                    "a model without stacks"
                )
            read = [(index, checkpoint.read(name, leaf.shape)) for name, index in leaf.tensors()]
            matrices = [(index, matrix) for index, matrix in read if isinstance(matrix, ScaledMatrix)]
            layers = (checkpoint.source(name).rpartition(".")[0] for name, _ in leaf.tensors())
            scales = [f"{layer}.{scale}" for layer in layers for scale in scale_names(layout)]
            yield site, leaf, matrices, layout, {folder.tensors[s].type for s in scales if s in folder.tensors}


def _recipe(place: str, layout: Layout, matrices: Matrices, scale_dtypes: set[str]) -> Recipe:
    """The recipe of a layer."""
    inputs, first = layout.inputs, matrices[0][1]
    if inputs is None or inputs.bound is not None:
        what = "in high precision" if inputs is None else f"clipped at {inputs.bound:g}"
        raise ValueError(
            f"{place} has inputs {what} in the folder, and no recipe multiplies them by kernels in "
            f"{layout.format.name}; import it with weights='frozen' and train adapters, or use a recipe by name"
        )
    if first.unit is not None and not first.unit.divides:
        raise ValueError(
            f"{place} has scales in two levels by ModelOpt's rule, and recipes have that of compressed-tensors; train "
            "it with the recipe 'nvfp4', or import it with weights='frozen' and train adapters"
        )
    if any(matrix.block != first.block for _, matrix in matrices):
        raise ValueError(
            f"{place} has blocks of different sizes, and one recipe; import it into a model without stacks"
        )
    rule = _rule(layout, matrices, scale_dtypes)
    block: Any = tuple(0 if b >= n else b for b, n in zip(first.block, first.shape, strict=True))
    kernel = FolderScaling(block if layout.size is None else layout.size, rule)
    of_inputs: Any = rule if rule.startswith("e8m0") else "float32"
    of_input: AbstractScaling
    match inputs.strategy:
        case "tensor":
            of_input = FolderScaling((0, 0), of_inputs) if inputs.dynamic else StaticScaling()
        case "token":
            of_input = FolderScaling((1, 0), of_inputs)
        case _ if layout.has_units:
            of_input = NVFP4Scaling()
        case _:
            of_input = FolderScaling((1, inputs.size), of_inputs)
    by_strategy = {"tensor": "current", "channel": "rowwise", "block": "deepseek"}
    nearest = by_name("nvfp4" if layout.has_units else by_strategy.get(layout.strategy, "mxfp8"))
    return Recipe(
        Quantization(inputs.format, of_input),
        Quantization(layout.format, kernel),
        nearest.output_grad,
        input_for_wgrad=nearest.uses["input", "wgrad"],
        kernel_for_dgrad=nearest.uses["kernel", "dgrad"],
        output_grad_for_wgrad=nearest.uses["output_grad", "wgrad"],
    )


def _require_blocks_fit(site: Site, leaf: Leaf, scaling: AbstractScaling) -> None:
    """Raises a ValueError if blocks of a folder are none of the layer's weight, whose axes are not two."""
    assert isinstance(scaling, FolderScaling)
    if site.kernel.Experts is not None and not 0 < scaling.block[0] <= leaf.shape[0]:
        raise ValueError(
            f"the experts of {site.place} have a scale each in the folder, and no recipe has these; exclude this "
            "layer, or convert the folder to FP8_DYNAMIC"
        )
    outputs = next(n for n in range(len(leaf.split) + 1) if math.prod(leaf.split[:n]) == leaf.shape[0])
    try:
        for which, sizes in enumerate((leaf.split[:outputs], leaf.split[outputs:])):
            scaling.sides(sizes, which)
    except ValueError as error:
        raise ValueError(f"{site.place}: {error}") from None


def _rule(layout: Layout, matrices: Matrices, scale_dtypes: set[str]) -> Any:
    """How a folder's quantizer rounded scales: configurations do not say it, the scales do."""
    if layout.has_units:
        return "two_levels"
    if all(are_exponents(matrix.scale) for _, matrix in matrices) and (layout.exponents or layout.strategy == "block"):
        # compressed-tensors has it for both formats. In E4M3 it differs for an amax of 448 times a power of two alone.
        return "e8m0_nearest" if layout.method == "compressed-tensors" or layout.format is E2M1 else "e8m0_up"
    if scale_dtypes == {"BF16"}:
        return "bfloat16"
    words = [np.ascontiguousarray(matrix.scale, np.float32).view(np.uint32) for _, matrix in matrices]
    # As `export_model` rounds them, for engines that cast float32 to bfloat16.
    return "float32" if any((word & np.uint32(0xFFFF)).any() for word in words) else "bfloat16_up"


def _scales(leaf: Leaf, matrices: Matrices) -> FolderScales[Any]:
    """The scales of a layer's matrices, by stacks and ensembles as its weight."""

    def named(values: Sequence[Any]) -> hax.NamedArray:
        array = np.empty((*leaf.leading, *np.shape(values[0])), np.float32)
        for (index, _), value in zip(matrices, values, strict=True):
            array[index] = value
        return with_names_of_stacks(jnp.asarray(array.view(np.uint32)), leaf.stack, _before_experts(leaf))

    scale = named([matrix.scale for _, matrix in matrices])
    units = [matrix.unit.value for _, matrix in matrices if matrix.unit is not None]
    inputs = [1 / matrix.input_scale for _, matrix in matrices if units and matrix.input_scale is not None]
    return FolderScales(scale, named(units) if units else None, named(inputs) if inputs else None)


def _before_experts(leaf: Leaf) -> int:
    """How many leading axes number layers, not experts."""
    experts = leaf.site.kernel.Experts
    return len(leaf.leading) - (0 if experts is None else len(axes_of(experts)))


def _with_input_scale(state: OpState, site: Site, leaf: Leaf, matrices: Matrices) -> OpState:
    scales = np.empty(leaf.leading, np.float32)
    for index, matrix in matrices:
        assert matrix.input_scale is not None
        scales[index] = matrix.input_scale
    while scales.ndim > _before_experts(leaf):
        if (scales != scales[..., :1]).any():
            raise ValueError(
                f"the experts of {site.place} have static inputs with a scale each, and their rows one recipe: convert "
                "the folder to FP8_DYNAMIC, or exclude this layer"
            )
        scales = scales[..., 0]
    others = [state.scale[..., row] for row in range(1, len(state.limits))]
    return state.with_scale(jnp.stack([jnp.asarray(scales), *others], axis=-1))
