"""What is wrong with a folder as a whole: its configuration, and tensors that do not fit it or each other."""

import math
import re
from collections.abc import Iterator

from .._printing.progress import Watcher, progress_of
from .._tensor_names import SAME_INPUT, WEIGHT, is_head, is_linear, is_router
from ..layouts import Layout
from .beside import HEAD, has_tied_head
from .checked import Checked, Fault, bits_of, is_quantized
from .folder import CONFIG
from .four_bits import TwoLevels
from .layout import FLOATS, KEY, input_scale_names, layout_of_layer, scale_names
from .model_keys import input_scales, model_faults
from .patterns import REGEX, matcher
from .sizes import size_faults


# Calibrations of one input differ less than by this factor.
_SAME_INPUT_FACTOR = 64

# What a target is that names a class of layers; other classes have no weights that are multiplied.
_CLASSES = re.compile(r"(Linear|Experts?|MoE)$")

# One scale for keys and values, as older libraries wrote it.
_OLD_CACHE_SCALE = "kv_scale"


def every_fault(checked: Checked, progress: Watcher | None) -> Iterator[Fault]:
    """Everything that is wrong with a folder.

    Args:
        checked: The folder.
        progress: As in `check_folder`.
    """
    sizes = {name: stored.bytes for name, stored in checked.tensors.items()}
    with progress_of("checking", sum(sizes.values()), progress) as advance:
        for name, size in sizes.items():
            yield from checked.of_tensor(name)
            advance(name, size)
    yield from faults_of_folder(checked)


def faults_of_folder(checked: Checked) -> Iterator[Fault]:
    """What is wrong beside single tensors, whose values are not read.

    Args:
        checked: The folder.
    """
    yield from (Fault(*fields) for fields in size_faults(checked.folder))
    yield from (Fault(*fields) for fields in model_faults(checked.folder, checked.layout))
    yield from _of_caches(checked)
    if checked.layout is not None:
        yield from _of_configuration(checked, checked.layout)
        yield from _of_merged_layers(checked, checked.layout)
        yield from _of_input_scales(checked, checked.layout)


def _of_configuration(checked: Checked, layout: Layout) -> Iterator[Fault]:
    strict = layout.method == "compressed-tensors"
    if strict and layout.status != "compressed":
        problem = f"quantization_status is {layout.status}; without 'compressed', Transformers quantizes the "
        problem += "weights again, or ignores their scales, and computes other numbers"
        remedy, is_error = "set quantization_status to 'compressed'", layout.status != "frozen"
        yield Fault(CONFIG, KEY, problem, remedy, is_error)
    if not any(map(is_quantized, checked.tensors.values())):
        yield Fault(CONFIG, KEY, "it is there, but no tensor is in FP8 or four bits", f"remove {KEY}")
    for layer in checked.layers:
        stored = checked.tensors[layer + WEIGHT]
        if is_quantized(stored) or layer in checked.ignored or not is_linear(layer, len(stored.shape)):
            continue
        kind = "head" if is_head(layer) else "router" if is_router(layer, checked.tensors) else "linear layer"
        # Other methods' engines leave heads and routers alone by themselves.
        is_meant = "Linear" in layout.targets or layer in checked.targeted
        if (is_meant and (strict or kind == "linear layer")) or stored.dtype.kind in "iu":
            problem = f"this {kind} is in {stored.shown}, and `ignore` does not list {layer}"
            yield checked.fault(
                layer + WEIGHT, f"{problem}: engines look for its scale", f"add {layer} to `ignore`, or quantize it"
            )
    yield from _of_targets(checked, layout)
    for entry in layout.ignore:
        tied = has_tied_head(checked.folder.config, checked.layers)
        tied = tied and (is_head(entry) or matcher("ignore", entry, layout.method)(HEAD))
        if not (tied or checked.matched("ignore", [entry])):
            kind = "matches" if entry.startswith(REGEX) else "is the name of"
            problem = f"{entry!r:.80} {kind} no layer of the checkpoint"
            yield Fault(CONFIG, "ignore", problem, "correct or remove it", is_error=False)


def _of_targets(checked: Checked, layout: Layout) -> Iterator[Fault]:
    """Layers in FP8 that no target means."""
    by_class = any(_CLASSES.search(target) for target in layout.targets if not target.startswith(REGEX))
    if by_class or not layout.targets:
        return
    missed = [
        name for name in checked.layers if is_quantized(checked.tensors[name + WEIGHT]) and name not in checked.targeted
    ]
    if missed:
        more = f" and {len(missed) - 1} more" if len(missed) > 1 else ""
        problem = f"{list(layout.targets)!r:.80} do not mean {missed[0]}{more}, which are in FP8: engines take their "
        yield Fault(CONFIG, "targets", f"{problem}bytes for the weights", "add 'Linear', or the names of the layers")


def _of_caches(checked: Checked) -> Iterator[Fault]:
    """Scales of keys and values that are not complete, or that no engine reads."""
    partners, cached = {"k_scale": "v_scale", "v_scale": "k_scale"}, checked.layout and checked.layout.cached
    scales = [name for name in checked.tensors if name.rpartition(".")[2] in (*partners, _OLD_CACHE_SCALE)]
    for name in scales:
        stored, (layer, _, kind) = checked.tensors[name], name.rpartition(".")
        if kind == _OLD_CACHE_SCALE:
            problem = "it is the old name of one scale for keys and values, which vLLM reads and others ignore"
            yield checked.fault(name, problem, "write it twice, as k_scale and as v_scale", is_error=False)
        else:
            other = f"{layer}.{partners[kind]}".replace(f".{kind[0]}_proj.", f".{partners[kind][0]}_proj.")
            if other not in checked.tensors:
                problem = f"{other} is missing: keys and values both need a scale, or neither"
                yield checked.fault(name, problem, f"add it, or remove {kind}")
        if math.prod(stored.shape) != 1 or stored.dtype not in FLOATS:
            problem = f"it is {stored.shown}{stored.shape}; a scale of keys or values is one floating-point number"
            yield checked.fault(name, problem, "write the largest alone, in float32")
        if not cached:
            problem = "config.json does not say that keys and values are in FP8: engines ignore it"
            remedy = "add a kv_cache_scheme to the quantization_config, or remove the scale"
            yield checked.fault(name, problem, remedy, is_error=False)
    if cached and not scales:
        problem = "it says that keys and values are in FP8, but no tensor holds their scales: engines take 1"
        remedy = "add k_scale and v_scale to each attention, or remove kv_cache_scheme"
        yield Fault(CONFIG, KEY, problem, remedy, is_error=False)


def _of_merged_layers(checked: Checked, layout: Layout) -> Iterator[Fault]:
    """Layers that engines make one, and that do not fit together."""
    for names in SAME_INPUT:
        for first in [name for name in checked.tensors if name.endswith(f".{names[0]}{WEIGHT}")]:
            parent = first.removesuffix(f"{names[0]}{WEIGHT}")
            partners, what = [f"{parent}{name}" for name in names], ", ".join(names)
            weights = [checked.tensors.get(f"{partner}{WEIGHT}") for partner in partners]
            if None in weights:
                continue
            are_quantized = {is_quantized(weight) for weight in weights if weight}
            if len(are_quantized) > 1:
                bits = next(bits_of(weight) for weight in weights if weight and is_quantized(weight))
                problem = f"some of {what} are in {bits} and some are not; engines merge them"
                yield checked.fault(first, problem, "quantize all of them, or add all to `ignore`")
            elif True in are_quantized:
                if len({id(layout_of_layer(layout, partner)) for partner in partners}) > 1:
                    problem = f"{what} are in different groups of config_groups; engines merge them"
                    yield checked.fault(first, problem, "quantize all of them in one layout")
                else:
                    yield from _of_partners(checked, layout_of_layer(layout, partners[0]), partners, first, what)


def _of_input_scales(checked: Checked, layout: Layout) -> Iterator[Fault]:
    """Scales of inputs that are far from all others: of a large model with outliers, or wrong."""
    names = [name for name in checked.tensors if name.rpartition(".")[2] in input_scale_names(layout)]
    stored = [name for name in names if checked.tensors[name].dtype in FLOATS and checked.tensors[name].bytes]
    scales = {name: float(checked.value(name).max()) for name in stored}
    scales = {name: scale for name, scale in scales.items() if 0 < scale < math.inf}
    for name, factor in input_scales(scales):
        problem = f"it is {factor:.3g} times the median of the folder's input scales"
        remedy = "if the layer's inputs are not that large, calibrate them again: amax / 448"
        yield checked.fault(name, problem, remedy, is_error=False)


def _of_units(checked: Checked, partners: list[str], first: str, what: str) -> Iterator[Fault]:
    """Scales of tensors in NVFP4 that differ where engines have one."""
    scales = [checked.tensors.get(f"{partner}.weight_scale") for partner in partners]
    units = [scale.tensor for scale in scales if isinstance(scale, TwoLevels) and scale.tensor is not None]
    if len(units) == len(partners) and len({unit.array().tobytes() for unit in units if unit.is_known}) > 1:
        kind = units[0].name.rpartition(".")[2]
        problem = f"{kind} of {what} differ: engines that merge them take one for all, and scale some weights wrongly"
        yield checked.fault(first, problem, "quantize them again with one for all", is_error=False)


def _of_partners(checked: Checked, layout: Layout, partners: list[str], first: str, what: str) -> Iterator[Fault]:
    if layout.has_units:
        yield from _of_units(checked, partners, first, what)
    kinds = [scale_names(layout)] if layout.strategy == "tensor" else []
    kinds += [input_scale_names(layout)] if layout.is_static else []
    for kind in kinds:
        names = [checked.present(partner, kind) for partner in partners]
        stored = [checked.tensors.get(name) for name in names]
        if any(scale is None or not scale.is_known or math.prod(scale.shape) != 1 for scale in stored):
            continue
        scales = [float(checked.value(name).reshape(())) for name in names]
        factor = max(scales) / min(scales) if min(scales) > 0 else 0
        if kind == input_scale_names(layout) and _SAME_INPUT_FACTOR <= factor < math.inf:
            far, last = names[scales.index(max(scales))], names[0].rpartition(".")[2]
            problem = f"{last} of {what} differ by a factor of {factor:.0f}, although they have one input"
            yield checked.fault(far, problem, "calibrate the input again: amax / 448")
        elif len(set(scales)) > 1 and all(map(math.isfinite, scales)):
            problem = f"{names[0].rpartition('.')[2]} of {what} differ: engines that merge them quantize again"
            is_weight = kind == scale_names(layout)
            remedy = "convert to FP8" if layout.is_static else "convert to FP8_DYNAMIC"
            remedy = f"{remedy}, which has a scale for each row" if is_weight else "give all of them the largest"
            yield checked.fault(first, f"{problem}, with the largest", remedy, is_error=False)
    rows = [checked.tensors[f"{partner}{WEIGHT}"].shape[0] for partner in partners[:-1]]
    height = (layout.size or (1, 1))[0]
    if any(row % height for row in rows):
        problem = f"{what} have {rows} outputs, not multiples of {height}: engines that merge them refuse that"
        yield checked.fault(first, problem, "convert to FP8_DYNAMIC, which has a scale for each row", is_error=False)
