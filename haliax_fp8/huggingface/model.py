"""The tensors of a model: one walk over it, by the names of Haliax's state dict.

`sites` finds the layers and other arrays, `leaves` where the tensors of a checkpoint lie in each of their arrays, and
`tensors_of` names and reads them.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.tree_util import KeyPath

from .._tensor_names import is_head
from ..folders.four_bits import E2M1, E4M3, unpacked
from ..folders.layout import as_float32
from ..folders.scaled_matrix import ScaledMatrix, Unit
from ..folders.tensors import Tensor
from ..layers import (
    AbstractQuantizedLayer,
    Fp8DotGeneral,
    Kernel,
    LayerRule,
    OnlyIfNamed,
    Place,
    Places,
    Refused,
    axes_of,
    is_quantized_layer,
    number_of_features,
)
from ..layers.roles import is_embedding, routers
from ..layers.walk import Pattern, matches, rule_of
from ..training import OverwriteWithGradient


# --- The walk ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Site:
    """A layer that has a rule, with all arrays in it; or an array outside of such layers.

    Args:
        node: The layer or array.
        place: Where it is.
        rule: The layer's rule; None for an array.
        owner: The module that the node is a field of; None if it is in none.
    """

    node: Any
    place: Place
    rule: LayerRule | None
    owner: Any

    @functools.cached_property
    def is_in_fp8(self) -> bool:
        """Whether it is a layer whose weight is data and scales, frozen or for inference."""
        return is_quantized_layer(self.node)

    @functools.cached_property
    def kernel(self) -> Kernel:
        """The layer's kernel, as its rule describes it."""
        assert self.rule is not None
        return self.rule.kernel(self.node)

    @functools.cached_property
    def op(self) -> Fp8DotGeneral | None:
        """The op of the layer's products; None if it has none."""
        return None if self.rule is None or self.is_in_fp8 else self.rule.op(self.node)


def sites(model: Any, rules: tuple[LayerRule, ...]) -> Iterator[Site]:
    """Every layer that has a rule, and every array outside of them, but FP8 state.

    Args:
        model: The model, or any tree.
        rules: The rules of the layer classes.
    """
    return (site for site in _flat(model, rules)[0] if site is not None)


def without_sharing[M](model: M) -> M:
    """The model with what each `eqx.nn.Shared` shares in all of its places."""
    is_shared = lambda node: isinstance(node, eqx.nn.Shared)
    if not any(map(is_shared, jax.tree.leaves(model, is_leaf=is_shared))):
        return model
    return jax.tree.map(lambda node: without_sharing(node()) if is_shared(node) else node, model, is_leaf=is_shared)


def map_sites[M](function: Callable[[Site], Any], model: M, rules: tuple[LayerRule, ...]) -> M:
    """The model with `function(site)` instead of each."""
    node_sites, nodes, structure = _flat(model, rules)
    values = [node if site is None else function(site) for node, site in zip(nodes, node_sites, strict=True)]
    return jax.tree.unflatten(structure, values)


def _flat(model: Any, rules: tuple[LayerRule, ...]) -> tuple[list[Site | None], list[Any], Any]:
    types = tuple(jax.tree.leaves([rule.layer_type for rule in rules if not isinstance(rule, Refused)]))
    whole = (*types, Fp8DotGeneral, OverwriteWithGradient, hax.NamedArray)
    flat, structure = jax.tree_util.tree_flatten_with_path(model, is_leaf=lambda node: isinstance(node, whole))
    places = Places(model)

    def site(path: KeyPath, node: Any) -> Site | None:
        is_layer = isinstance(node, types)
        if isinstance(node, Fp8DotGeneral | OverwriteWithGradient):
            return None
        if not (is_layer or is_array(node)):
            return None
        owner = places.node(path[:-1]) if path else None
        return Site(node, places[path], rule_of(node, rules) if is_layer else None, owner)

    return [site(*pair) for pair in flat], [node for _, node in flat], structure


def is_array(node: Any) -> bool:
    """Whether it is an array of a model: Haliax's, JAX's, NumPy's, or an abstract one; not a place for a shared one."""
    return isinstance(plain(node), jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def plain(array: Any) -> Any:
    """The array in a `NamedArray`, or anything else as it is."""
    return array.array if isinstance(array, hax.NamedArray) else array


# --- Where tensors lie in an array ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a model, and the tensors that a checkpoint holds of it.

    Args:
        site: The layer that it is in, or itself.
        field: The field of the layer; empty if it is itself a site.
        array: The array, which may have names.
        order: The axes of the array: leading ones, which number the tensors, then those of a tensor.
        leading: The sizes of the leading axes.
        blocks: For each axis of the stack, which leading axis it is; None if the array is the same in all blocks.
        shape: The shape of a tensor.
        split: The sizes of the axes that a tensor's axes were made of.
        is_kernel: Whether it is the weight of a layer: its tensors are matrices, `[out, in]`.
    """

    site: Site
    field: str
    array: Any
    order: tuple[int, ...]
    leading: tuple[int, ...]
    blocks: tuple[int | None, ...]
    shape: tuple[int, ...]
    split: tuple[int, ...]
    is_kernel: bool

    @property
    def stack(self) -> tuple[hax.Axis, ...]:
        """The axes of the stacks that the array has."""
        return tuple(axis for axis, i in zip(self.site.place.stack, self.blocks, strict=True) if i is not None)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The name of each tensor, and its index along the leading axes.

        Members of an ensemble and experts are numbered after the name of their layer.
        """
        place, more = self.site.place, (self.field,) if self.field else ()
        others = [axis for axis in range(len(self.leading)) if axis not in self.blocks]
        for blocks in itertools.product(*(range(axis.size) for axis in place.stack)):
            for rest in itertools.product(*(range(self.leading[axis]) for axis in others)):
                index = dict(zip(others, rest, strict=True)) | dict(zip(self.blocks, blocks, strict=True))
                yield place.name(blocks, *rest, *more), tuple(index[axis] for axis in range(len(self.leading)))

    def read(self, index: tuple[int, ...]) -> np.ndarray:
        """One tensor; of an array on a device, only this part is copied."""
        array = plain(self.array)
        if _on_host(array):
            part = np.asarray(array).transpose(self.order)[index]
        else:
            for axis, number in sorted(zip(self.order, index, strict=False), reverse=True):
                array = lax.dynamic_index_in_dim(array, number, axis, keepdims=False)
            rest = self.order[len(self.leading) :]
            part = np.asarray(array).transpose([sorted(rest).index(axis) for axis in rest])
        return part.reshape(self.shape)

    def filled(self, read: Callable[[str], np.ndarray]) -> Any:
        """An array like this one, made of its tensors by name, in its dtype and on its devices."""
        template = plain(self.array)
        values = uncopied(template.shape, template.dtype)
        for name, index in self.tensors():
            # With an ellipsis: the view of an array without axes would be a scalar.
            values.transpose(self.order)[(*index, ...)] = read(name).astype(template.dtype).reshape(self.split)
        array = jax.device_put(values, getattr(template, "sharding", None))
        if not isinstance(self.array, hax.NamedArray):
            return array
        return jax.tree.unflatten(jax.tree.structure(self.array), [array])

    def sharded(self, array: np.ndarray, *, transposed: bool = False) -> jax.Array:
        """Data or scales of the matrices on the devices of the array, divided as that is.

        An axis stays whole if the array's axes in it are not divided at its first one alone, or if it is too short.

        Args:
            array: `[*leading, ...]`; what follows are the rows and columns of data, or of their scales.
            transposed: Whether columns come before rows.
        """
        sharding = getattr(plain(self.array), "sharding", None)
        if not isinstance(sharding, NamedSharding):
            return jax.device_put(array, sharding)
        spec = [*sharding.spec, *[None] * len(self.order)]
        leading, rest = self.order[: len(self.leading)], self.order[len(self.leading) :]
        parts, split = [spec[axis] for axis in leading], list(zip(rest, self.split, strict=True))
        of_matrix = []
        for size in self.shape:
            axes = []
            while math.prod(n for _, n in axes) < size or (split and split[0][1] == 1):
                axes.append(split.pop(0))
            divided = [spec[axis] for axis, n in axes if n > 1]
            of_matrix.append(divided[0] if divided and not any(divided[1:]) else None)
        parts += reversed(of_matrix) if transposed else of_matrix
        names = lambda part: part if isinstance(part, tuple) else (part,)
        fits = lambda size, part: part and size % math.prod(sharding.mesh.shape[name] for name in names(part)) == 0
        divisible = [part if fits(size, part) else None for size, part in zip(array.shape, parts, strict=False)]
        return jax.device_put(array, NamedSharding(sharding.mesh, P(*divisible)))


def uncopied(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array to be filled, which `jax.device_put` takes over on a CPU instead of copying it.

    XLA asks for buffers that begin at a multiple of 64 bytes, and NumPy's begin 16 bytes behind one.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + 63, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _on_host(array: Any) -> bool:
    """Whether NumPy can read it without a copy from a device."""
    if not isinstance(array, jax.Array):
        return True
    return len(array.devices()) == 1 and all(device.platform == "cpu" for device in array.devices())


def leaves(site: Site) -> list[Leaf]:
    """The arrays of a layer, first its weight if it has one of its own, then such as its bias; or the array itself."""
    if site.rule is None:
        # Norms have vectors in a checkpoint, whatever their axes.
        return [_of_array(site, "", site.node, 0, flat=isinstance(site.owner, hnn.LayerNorm | hnn.RmsNorm))]
    if site.is_in_fp8:
        kernel, arrays = None, [_of_quantized(site)]
    else:
        kernel = site.kernel.weight
        arrays = [_of_kernel(site)] if is_array(kernel) else []
    for field in dataclasses.fields(site.node):
        value: Any = getattr(site.node, field.name, None)
        if not field.metadata.get("static", False) and is_array(value) and value is not kernel:
            members = 0 if isinstance(value, hax.NamedArray) else max(0, value.ndim - 1 - len(site.place.stack))
            arrays.append(_of_array(site, field.name, value, members, flat=True))
    return arrays


def _leaf(
    site: Site, field: str, array: Any, order: tuple[int, ...], leading: int, blocks: Any, outputs: int | None
) -> Leaf:
    """A leaf by the number of its leading axes, and of a matrix the number of axes of its outputs."""
    sizes = tuple(plain(array).shape[axis] for axis in order)
    split = sizes[leading:]
    shape = split if outputs is None else (math.prod(split[:outputs]), math.prod(split[outputs:]))
    return Leaf(site, field, array, order, sizes[:leading], tuple(blocks), shape, split, outputs is not None)


def _of_array(site: Site, field: str, array: Any, members: int, *, flat: bool) -> Leaf:
    shape, stack = plain(array).shape, site.place.stack
    if isinstance(array, hax.NamedArray):
        names, members = array.axis_names, len(shape) - len(array.axis_names)
        leading = [*range(members), *(members + names.index(axis.name) for axis in stack if axis.name in names)]
        blocks = [leading.index(members + names.index(axis.name)) if axis.name in names else None for axis in stack]
    else:
        is_stacked = shape[members : members + len(stack)] == tuple(axis.size for axis in stack)
        leading = list(range(members + (len(stack) if is_stacked else 0)))
        blocks = [members + i if is_stacked else None for i in range(len(stack))]
    order = (*leading, *(axis for axis in range(len(shape)) if axis not in leading))
    leaf = _leaf(site, field, array, order, len(leading), blocks, None)
    return dataclasses.replace(leaf, shape=(math.prod(leaf.split),)) if flat else leaf


def _of_kernel(site: Site) -> Leaf:
    """The matrices of a layer's weight, each `[out, in]`.

    Raises:
        ValueError: If the rule does not tell which axes are summed over.
    """
    kernel, weight, stack = site.kernel, site.kernel.weight, site.place.stack
    if isinstance(weight, hax.NamedArray):
        names, members = weight.axis_names, weight.array.ndim - len(weight.axis_names)
        of = lambda features: [] if features is None else [axis.name for axis in axes_of(features)]
        inputs, outputs = of(kernel.In), of(kernel.Out)
        leading = [axis.name for axis in stack if axis.name in names] + of(kernel.Experts)
        if sorted((*leading, *outputs, *inputs)) != sorted(names):
            raise _unknown(site, weight.axes)
        order = (*range(members), *(members + names.index(name) for name in (*leading, *outputs, *inputs)))
        blocks = [members + leading.index(axis.name) if axis.name in leading else None for axis in stack]
        return _leaf(site, "weight", weight, order, members + len(leading), blocks, len(outputs))
    members, of_weight = kernel.members_and_stack(stack)
    n = len(members) + len(of_weight)
    body = tuple(range(n, len(weight.shape)))
    inputs = tuple(n + axis for axis in _contracted(site, kernel, weight.shape[n:]))
    order = (*range(n), *(axis for axis in body if axis not in inputs), *inputs)
    blocks = [len(members) + of_weight.index(axis) if axis in of_weight else None for axis in stack]
    return _leaf(site, "weight", weight, order, n, blocks, len(body) - len(inputs))


def _contracted(site: Site, kernel: Kernel, shape: tuple[int, ...]) -> tuple[int, ...]:
    if kernel.contracted is not None:
        return kernel.contracted
    if kernel.In is not None and kernel.Out is not None and len(shape) == 2:
        sizes = number_of_features(kernel.Out), number_of_features(kernel.In)
        axes = [axis for axis, fits in ((1, sizes), (0, sizes[::-1])) if shape == fits]
        if len(axes) == 1:
            return (axes[0],)
    raise _unknown(site, shape)


def _unknown(site: Site, axes: Any) -> ValueError:
    return ValueError(
        f"the weight of {site.place} has axes {axes}, and its LayerRule does not say which are inputs and which are "
        "outputs. Set them in its Kernel: Kernel(..., contracted=(0,)), or In and Out that name all axes"
    )


# --- Weights that are in FP8 ------------------------------------------------------------------------------------------


def _of_quantized(site: Site) -> Leaf:
    kernel, stack = site.node.kernel, site.place.stack
    experts, outputs, inputs = _axes_of_quantized(site.node)
    stored = kernel.stored
    data, n = stored.data, stored.leading
    members = data.array.ndim - len(data.axis_names)
    front = data.axis_names[: n - members]
    blocks = [members + front.index(axis.name) if axis.name in front else None for axis in stack]
    order = (*range(n), *(n + stored.order.index(axis) for axis in (*experts, *outputs, *inputs)))
    # Its names say nothing but where blocks are.
    return _leaf(site, "weight", data, order, n + len(experts), blocks, len(outputs))


def _axes_of_quantized(layer: AbstractQuantizedLayer) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Which axes of its kernel number experts, are outputs and inputs, in the order of a checkpoint."""
    kernel, described = layer.kernel, layer.described
    names = [axis.name for axis in getattr(layer, "axes", ())]
    positions = lambda axes: tuple(names.index(axis.name) for axis in axes if axis.name in names)
    experts = () if described.Experts is None else positions(axes_of(described.Experts))
    if names and not isinstance(described.In, int | str | None) and not isinstance(described.Out, int | str | None):
        outputs, inputs = positions(axes_of(described.Out)), positions(axes_of(described.In))
        if len(experts) + len(outputs) + len(inputs) == len(names):
            return experts, outputs, inputs
    free = tuple(axis for axis in sorted(kernel.stored.order) if axis not in (*kernel.contracted, *experts))
    return experts, free, kernel.contracted


def fp8_matrix(leaf: Leaf, index: tuple[int, ...]) -> ScaledMatrix:
    """The data and scales of one matrix of a layer, as they are.

    Raises:
        ValueError: If its scales are of blocks that `[out, in]` has no rows and columns for.
    """
    kernel, data = leaf.site.node.kernel, np.ascontiguousarray(leaf.read(index))
    stored, in_four = kernel.stored, kernel.stored.dtype == E2M1
    bits, block = _quantized_scale(leaf, index)
    one = lambda array: np.asarray(array.array)[index[: array.array.ndim]].view(np.float32)
    unit = None if stored.tensor_scale is None else Unit(one(stored.tensor_scale), stored.divides)
    scale = _float32(bits) if unit is None else unit.scales(bits.view(E4M3))
    inputs = None if kernel.input_scale is None else float(one(kernel.input_scale))
    inputs = 1.0 / inputs if inputs is not None and stored.divides else inputs
    data, origin = (unpacked(data), "four bits") if in_four else (data.view(stored.dtype), "FP8")
    return ScaledMatrix(data, scale, block, f"{origin} in the model", inputs, unit)


def _quantized_scale(leaf: Leaf, index: tuple[int, ...]) -> tuple[np.ndarray, tuple[int, int]]:
    """The bits of the scales of one matrix, and the rows and columns of a block."""
    kernel = leaf.site.node.kernel.stored
    stored = np.asarray(kernel.scale.array)
    experts, outputs, inputs = _axes_of_quantized(leaf.site.node)
    n, codes = len(leaf.leading) - len(experts), 2 if kernel.dtype == E2M1 else 1
    split = (*leaf.split[:-1], codes * leaf.split[-1])
    if stored.ndim <= len(leaf.leading):
        # One scale for a layer, or an expert of it.
        return stored[index[: stored.ndim]].reshape(1, 1), (leaf.shape[0], codes * leaf.shape[1])
    stored = stored.transpose((*range(n), *(n + axis for axis in (*experts, *outputs, *inputs))))
    stored = stored[tuple(min(number, size - 1) for number, size in zip(index, stored.shape, strict=False))]
    halves = []
    for axes, first in ((outputs, 0), (inputs, len(outputs))):
        counts, sizes = stored.shape[first : first + len(axes)], split[first : first + len(axes)]
        halves.append(_blocks_along(counts, sizes, None if kernel.block is None else kernel.block[axes[-1]]))
    (count_out, height), (count_in, width) = halves
    return np.ascontiguousarray(stored).reshape(count_out, count_in), (height, width)


def _blocks_along(counts: tuple[int, ...], sizes: tuple[int, ...], block: int | None) -> tuple[int, int]:
    """How many blocks are along the outputs or inputs, and how many of these a block has."""
    if math.prod(counts) == 1:
        return 1, math.prod(sizes)
    last = sizes[-1] // counts[-1] if block is None else min(block, sizes[-1])
    if counts[:-1] == sizes[:-1] and (len(sizes) == 1 or sizes[-1] % last == 0):
        return math.prod(counts), last
    raise ValueError(
        f"a kernel has scales for {counts} blocks of axes of {list(sizes)}, which are not blocks of a matrix; "
        "dequantize the model, and export that"
    )


def _float32(bits: Any) -> np.ndarray:
    """Scales from what kernels hold: bits of float32, or exponents."""
    bits = np.ascontiguousarray(bits)
    return as_float32(bits) if bits.dtype == np.uint8 else bits.view(np.float32)


# --- All tensors of a model -------------------------------------------------------------------------------------------


def tensors_of(
    model: Any,
    rules: tuple[LayerRule, ...],
    *,
    dtype: np.dtype | None = None,
    targets: tuple[Pattern, ...] | None = None,
    exclude: tuple[Pattern, ...] = (),
) -> Iterator[Tensor]:
    """The tensors of a model by its own names, in its order; without FP8 state.

    Args:
        model: The model; it may be abstract if nothing is read.
        rules: The rules of the layer classes.
        dtype: The dtype that the model computes in; None for each array's own. An op's, if it has one, decides.
        targets: The layers to quantize, by their names in the state dict with `*` for the numbers of blocks; None for
            those that have an op, or for all but routers and embeddings if none has; never heads.
        exclude: The layers to leave in high precision.
    """
    all_sites = list(sites(model, rules))
    layers = [site for site in all_sites if site.rule is not None]
    any_fp8 = any(site.op is not None or site.is_in_fp8 for site in layers)
    are_routers = routers({str(site.place): site.kernel for site in layers if not site.is_in_fp8})

    def is_chosen(site: Site) -> bool:
        path, layer = str(site.place), site.node
        # An embedding is read by rows too: its table stays as it is.
        if site.rule is None or is_embedding(layer) or any(matches(p, path, layer) for p in exclude):
            return False
        if targets is not None:
            return any(matches(pattern, path, layer) for pattern in targets)
        if site.is_in_fp8 or is_head(path):
            # Engines read no scales of heads: one in FP8 is that of a folder, or named.
            return site.is_in_fp8
        if any_fp8:
            return site.op is not None
        return path not in are_routers and not isinstance(site.rule.refusal(layer), OnlyIfNamed)

    for site in all_sites:
        chosen = is_chosen(site)
        for leaf in leaves(site):
            for name, index in leaf.tensors():
                yield _tensor(leaf, name, index, dtype, is_chosen=chosen and leaf.is_kernel)


def _tensor(leaf: Leaf, name: str, index: tuple[int, ...], dtype: np.dtype | None, *, is_chosen: bool) -> Tensor:
    site = leaf.site
    array_dtype = np.dtype(plain(leaf.array).dtype)
    if site.is_in_fp8 and leaf.is_kernel:
        kind = site.node.kernel.stored.dtype
        matrix = functools.partial(fp8_matrix, leaf, index)
        shape = (leaf.shape[0], 2 * leaf.shape[1]) if kind == E2M1 else leaf.shape
        return Tensor(name, shape, kind, matrix, layer=site.node, index=index, is_chosen=is_chosen)
    is_float = array_dtype.kind == "f" or array_dtype.name.startswith(("bfloat", "float"))
    kind = dtype if dtype is not None and is_float else array_dtype
    op, factor = (site.op, site.kernel.factor) if leaf.is_kernel else (None, 1.0)
    if op is not None and op.compute_dtype is not None:
        kind = op.compute_dtype

    def read() -> np.ndarray:
        values = leaf.read(index)
        if factor != 1.0:
            values = (values * np.asarray(factor, values.dtype)).astype(values.dtype)
        return values.astype(kind)

    return Tensor(name, leaf.shape, kind, read, op=op, index=index, is_chosen=is_chosen)
