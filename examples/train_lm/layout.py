"""How a model and its batches are divided over devices: `--mesh data=4,model=2`."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from haliax_fp8.models import TransformerConfig


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which axis of the model is divided over which of the mesh.

    Args:
        mesh: The devices; None for one device.
        parameters: For weights, their moments and their gradients.
        activations: For what is computed of them: the batch, and what tensor parallelism divides.
    """

    mesh: Mesh | None
    parameters: Mapping[str, str]
    activations: Mapping[str, str]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Haliax's layers divide their outputs as `activations` says."""
        if self.mesh is None:
            yield
            return
        with jax.set_mesh(self.mesh), hax.axis_mapping(dict(self.activations)):
            yield

    def divided[T](self, tree: T) -> T:
        """A model, or an optimizer's state, on its devices; what is there already is not moved."""
        if self.mesh is None:
            return tree
        # FP8 state has axes of its own, which no mapping names: every device gets it.
        return hax.shard_with_axis_mapping(self._everywhere(tree), dict(self.parameters), self.mesh)

    def _everywhere[T](self, tree: T) -> T:
        """Arrays without names, such as counters, on every device."""
        assert self.mesh is not None
        whole = NamedSharding(self.mesh, P())

        def moved(node: Any) -> Any:
            return jax.device_put(node, whole) if eqx.is_array(node) else node

        return jax.tree.map(moved, tree, is_leaf=lambda node: isinstance(node, hax.NamedArray))

    def batch(self, batch: np.ndarray) -> jax.Array:
        """A batch of bytes, its rows divided over the axis `data`."""
        if self.mesh is None:
            return jnp.asarray(batch)
        spec = P("data") if "data" in self.mesh.axis_names else P()
        return jax.device_put(batch, NamedSharding(self.mesh, spec))

    @property
    def summary(self) -> str:
        """One line: the mesh, and what is divided over its axes."""
        if self.mesh is None:
            return "one device"
        over = {axis: [*dict.fromkeys(self._divided(axis))] for axis in self.mesh.axis_names}
        parts = [f"{', '.join(names) or 'nothing'} over {axis}={self.mesh.shape[axis]}" for axis, names in over.items()]
        return "; ".join(parts)

    def _divided(self, axis: str) -> list[str]:
        both = (*self.activations.items(), *self.parameters.items())
        return [name for name, over in both if over == axis]


def make_layout(sizes: Mapping[str, int] | None, config: TransformerConfig, rows: int) -> Layout:
    """The layout of a mesh: fully sharded data parallelism over `data`, tensor parallelism over `model`.

    On a machine whose only platform is the CPU, JAX gets as many virtual devices; so call this before anything runs.

    Args:
        sizes: Of the mesh axes `data` and `model`, or of one of them; None for one device.
        config: The model's sizes. Axes that the mesh does not divide evenly stay whole on every device.
        rows: Rows of a batch, or of a microbatch.

    Raises:
        ValueError: If there are too few devices, or the batch cannot be divided.
    """
    if sizes is None:
        return Layout(None, {}, {})
    count = int(np.prod(list(sizes.values())))
    with contextlib.suppress(RuntimeError):  # JAX has started: then it has the devices that it has
        jax.config.update("jax_num_cpu_devices", count)
    if jax.device_count() < count:
        raise ValueError(
            f"--mesh needs {count} devices, and JAX has {jax.device_count()} {jax.default_backend()} devices"
        )
    if rows % sizes.get("data", 1):
        raise ValueError(f"--mesh data={sizes['data']} does not divide the {rows} rows of a batch or microbatch")
    mesh = jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:count],
    )
    of = {"mlp": config.mlp, "kv_heads": config.kv_heads, "group": config.heads // config.kv_heads}
    divisible = [name for name, size in of.items() if "model" in sizes and size % sizes["model"] == 0]
    # Query heads are two axes; a mesh axis divides one axis of an array.
    if "kv_heads" in divisible and "group" in divisible:
        divisible.remove("group")
    tensor = dict.fromkeys(divisible, "model")
    batch = {"batch": "data"} if "data" in sizes else {}
    # One mesh axis cannot divide both rows and features of an activation: `hidden` is divided in parameters alone.
    fully = {"hidden": "data"} if "data" in sizes and config.hidden % sizes["data"] == 0 else {}
    return Layout(mesh, tensor | fully, tensor | batch)
