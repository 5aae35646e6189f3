"""Compiles a function of trees for devices that this machine need not have, without allocating any of its arrays."""

import dataclasses
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..devices.xla_flags import XlaFlags
from ..scopes import TRAIN_STEP
from .compilers import changed_process
from .devices import CompilableDevice
from .trace import dotted


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory that a program needs on each device, in bytes.

    Args:
        arguments: The arguments, without those in host memory.
        outputs: The results.
        aliased: Results that overwrite donated arguments.
        temporaries: Everything in between.
        peak: Arguments, outputs that are not aliased, and temporaries: what must be free for it to run.
        host: Arguments that their shardings put into host memory (`memory_kind`).
        ignores_host: Whether the compiler planned the step as if these were on the device, because JAX drops memory
            kinds that it does not know there.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    host: int = 0
    ignores_host: bool = False


MeshLike = Mesh | AbstractMesh | Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled function: its text after and before XLA's optimization, the paths of its results, and its costs."""

    text: str
    written: str
    outputs: tuple[str, ...]
    memory: Memory
    seconds: float


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function of trees, traced by JAX with abstract arguments on a mesh."""

    program: Any
    mesh: Mesh
    argument_bytes: int
    bytes_on_host: int
    seconds: float

    @staticmethod
    def of(function: Callable[..., Any], args: tuple[Any, ...], *, mesh: Mesh, shardings: Any) -> "Traced":
        """Traces a function; the arguments are those of `inspect_step`. Arguments that inner `jit`s donate are donated.

        Args:
            function: The step.
            args: Its arguments.
            mesh: Where they are.
            shardings: How they are divided.
        """
        begin = time.perf_counter()
        inputs = _Inputs.of(function, args, mesh, shardings)
        with jax.set_mesh(mesh):
            program = jax.jit(inputs.call).trace({}, inputs.abstract)
            if donated := _donated(program, inputs):
                rest = {name: x for name, x in inputs.abstract.items() if name not in donated}
                donated_arrays = {name: inputs.abstract[name] for name in donated}
                program = jax.jit(inputs.call, donate_argnums=0).trace(donated_arrays, rest)
        on_host, on_device = (inputs.bytes_of(on_host=there) for there in (True, False))
        return Traced(program, mesh, on_device, on_host, time.perf_counter() - begin)

    def text(self, device: CompilableDevice) -> str:
        """The program before XLA's optimization, without names of files and scopes: the same in every process.

        Args:
            device: What it is traced for.
        """
        with jax.set_mesh(self.mesh), changed_process(variables=device.variables, ignored=_WARNINGS):
            return self.program.lower().as_text()

    @property
    def train_steps(self) -> set[bool]:
        """For each `TrainStep` that it calls, whether that is inside another `jit` of the function."""
        calls = [equation for equation in self.program.jaxpr.eqns if _is_train_step(equation)]
        inner = [equation for equation in self.program.jaxpr.eqns if not _is_train_step(equation)]
        return {False for _ in calls} | {True for equation in inner if any(map(_is_train_step, _inside(equation)))}


def _is_train_step(equation: Any) -> bool:
    return equation.params.get("name") == TRAIN_STEP


def _inside(equation: Any) -> Iterator[Any]:
    """The equations of the functions that an equation calls, at any depth."""
    for value in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
        for inner in getattr(value, "eqns", ()):
            yield inner
            yield from _inside(inner)


def compile_for(traced: Traced, *, device: CompilableDevice, flags: XlaFlags, options: Mapping[str, Any]) -> Compiled:
    """Compiles what was traced; `flags` has all that the user set."""
    begin = time.perf_counter()
    with jax.set_mesh(traced.mesh):
        with changed_process(variables=device.variables, ignored=_WARNINGS):
            lowered = traced.program.lower()
            try:
                compiled = lowered.compile(compiler_options={**device.compiler_options(flags), **options})
            except RuntimeError as error:
                if (remedy := _of_pallas(error)) is None:
                    raise
                raise RuntimeError(f"a Pallas kernel could not be compiled for {device.name}: {remedy}") from error
        written = lowered.as_text("hlo", debug_info=True)
    text, memory = compiled.as_text(), _memory(compiled.memory_analysis(), traced.bytes_on_host)
    assert text is not None
    results = jax.tree_util.tree_flatten_with_path(traced.program.out_info)[0]
    outputs = tuple(dotted(jax.tree_util.keystr(path)) for path, _ in results)
    return Compiled(text, written, outputs, memory, traced.seconds + time.perf_counter() - begin)


def _of_pallas(error: Exception) -> str | None:
    """Why a Pallas kernel was not compiled, and the remedy; None if something else failed."""
    if "No PTX compilation provider" in str(error):
        return "it needs ptxas, from NVIDIA's CUDA toolkit or the package nvidia-cuda-nvcc; put its folder on the PATH"
    if "Mosaic GPU pass pipeline failed" in str(error):
        return (
            "JAX compiles Pallas kernels for one architecture per process, that of the first device; compile for each "
            "other one in its own process"
        )
    return None


# Some donated arguments fit no result: a step that donates all of them means those that do.
UNUSED_DONATION = "Some donated buffers were not usable"

# A cached program cannot be read back, such as one for an absent device.
UNREADABLE_CACHE = "Error reading persistent compilation cache"

_WARNINGS = (UNUSED_DONATION, UNREADABLE_CACHE)


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """A call with its arrays taken out: leaves with abstract arrays, their tree, the arrays' names by index, and the
    indices of those in host memory, which a sharding forgets if the device's description has none."""

    leaves: tuple[Any, ...]
    structure: Any
    names: dict[int, str]
    on_host: frozenset[int]

    @staticmethod
    def of(function: Callable[..., Any], args: tuple[Any, ...], mesh: Mesh, shardings: Any) -> "_Inputs":
        paths, structure = jax.tree_util.tree_flatten_with_path((function, args))
        specs = _specs(args, shardings)
        count = len(paths) - len(specs)
        arguments = _argument_names(function, len(args))
        leaves, names, on_host = [], {}, set()
        for index, ((path, leaf), spec) in enumerate(zip(paths, [None] * count + specs, strict=True)):
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
                leaves.append(leaf)
                continue
            if _is_on_host(leaf, spec, mesh):
                on_host.add(index)
            leaves.append(_abstract(leaf, spec, mesh, on_host=index in on_host))
            first, rest = ("step_fn", path[1:]) if index < count else (arguments[path[1].idx], path[2:])
            name = dotted(first + jax.tree_util.keystr(rest))
            names[index] = name if name not in names.values() else f"{name}#{index}"
        return _Inputs(tuple(leaves), structure, names, frozenset(on_host))

    @property
    def abstract(self) -> dict[str, Any]:
        return {name: self.leaves[index] for index, name in self.names.items()}

    def bytes_of(self, *, on_host: bool) -> int:
        """The size of each device's part of the arrays in host memory, or of the others."""
        arrays = [self.leaves[index] for index in self.names if (index in self.on_host) == on_host]
        return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)

    def call(self, donated: dict[str, Any], arrays: dict[str, Any]) -> Any:
        """The function, called with arrays; returns the arrays of its result."""
        arrays = {**arrays, **donated}
        leaves = [arrays[self.names[i]] if i in self.names else leaf for i, leaf in enumerate(self.leaves)]
        function, args = jax.tree.unflatten(self.structure, leaves)
        return eqx.filter(function(*args), eqx.is_array)


def _abstract(leaf: Any, spec: Any, mesh: Mesh, *, on_host: bool) -> jax.ShapeDtypeStruct:
    if spec is None:
        sharding = getattr(leaf, "sharding", None)
        spec = PartitionSpec()
        if isinstance(sharding, NamedSharding) and set(sharding.mesh.axis_names) <= set(mesh.axis_names):
            spec = sharding.spec
    elif isinstance(spec, NamedSharding):
        spec = spec.spec
    aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
    weak = bool(getattr(aval, "weak_type", False))
    sharding = NamedSharding(mesh, spec, memory_kind="pinned_host" if on_host else None)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def _is_on_host(leaf: Any, spec: Any, mesh: Mesh) -> bool:
    """Whether an array's sharding puts it into host memory; a CPU has no other."""
    sharding = spec if isinstance(spec, NamedSharding) else getattr(leaf, "sharding", None)
    is_host = isinstance(sharding, NamedSharding) and sharding.memory_kind == "pinned_host"
    return is_host and mesh.devices.flat[0].platform != "cpu"


def _specs(args: tuple[Any, ...], shardings: Any) -> list[Any]:
    """A spec or None for each leaf of the arguments."""
    is_spec = lambda node: node is None or isinstance(node, PartitionSpec | NamedSharding)
    try:
        spread = jax.tree.broadcast(shardings, args, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(
            f"shardings={shardings} is not a prefix of the argument tree: pass a tuple with one PartitionSpec (or a "
            "tree of them, or None) for each argument"
        ) from error
    return jax.tree.structure(args).flatten_up_to(spread)


def _argument_names(function: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [names[i] if i < len(names) else f"arg{i}" for i in range(count)]


def _donated(traced: Any, inputs: _Inputs) -> list[str]:
    """The names of arguments that a `jit` inside the function donates."""
    # JAX sorts the keys of a dictionary.
    names = sorted(inputs.abstract)
    return [name for name, is_donated in zip(names, donated_inside(traced), strict=True) if is_donated]


def _memory(stats: Any, on_host: int) -> Memory:
    sizes = [getattr(stats, f"{name}_size_in_bytes") for name in ("argument", "output", "alias", "temp")]
    arguments, outputs, aliased, temporaries = sizes
    ignores_host = on_host > 0 and getattr(stats, "host_argument_size_in_bytes", 0) == 0
    if ignores_host:
        arguments -= on_host
    # Not all backends report a peak, and those that do define it differently.
    peak = arguments + outputs - aliased + temporaries
    return Memory(arguments, outputs, aliased, temporaries, peak, on_host, ignores_host)


def make_mesh(device: CompilableDevice, devices: int | None, mesh: MeshLike | None) -> Mesh:
    """A mesh of devices of one kind.

    Args:
        device: What to compile for.
        devices: The number of devices; None for as many as `mesh` has, or one.
        mesh: Axes and sizes, or a mesh of other devices that has them; None for one axis, `devices`.

    Raises:
        ValueError: If `devices` and `mesh` do not agree.
    """
    if mesh is None:
        mesh = {"devices": 1 if devices is None else devices}
    sizes = dict(mesh) if isinstance(mesh, Mapping) else dict(mesh.shape)
    count = math.prod(sizes.values())
    if devices not in (None, count):
        raise ValueError(f"devices={devices}, but mesh has {count}: {sizes}; leave devices out, or make them equal")
    if count < 1:
        raise ValueError(f"devices={count} must be at least 1")
    types = getattr(mesh, "axis_types", None)
    return Mesh(np.asarray(device.devices(count)).reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)


def donated_inside(traced: Any) -> list[bool]:
    """Whether a `jit` inside a traced function donates each of its flat arguments.

    Args:
        traced: What `jax.jit(function).trace(...)` returned.
    """
    jaxpr = traced.jaxpr.jaxpr
    donated = set()
    for equation in jaxpr.eqns:
        flags = equation.params.get("donated_invars", ())
        donated |= {id(var) for var, flag in zip(equation.invars, flags, strict=False) if flag}
    return [id(var) in donated for var in jaxpr.invars]
