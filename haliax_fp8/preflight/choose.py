"""choose: the recipe, what is recomputed, the mesh and the batch with which a step fits and is fastest."""

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from .._arguments import require_bool
from .._printing import Printable, new_table
from ..devices import Peaks
from ..devices.catalog import XlaGpu, catalog
from ..devices.roofline import FASTEST, LEAST_GAIN, MOST_GAIN, SLOWEST, WHOLE_STEP, Roofline
from ..devices.xla_flags import XlaFlags
from .compile import Traced, make_mesh
from .devices import CompilableDevice, as_compilable, compilable_devices
from .report import PreflightReport
from .step import inspect_step


_USABLE = 0.75
"""The share of a device's memory that JAX takes, and so a step may, unless XLA_PYTHON_CLIENT_MEM_FRACTION differs."""

_ASSUMPTIONS = (WHOLE_STEP, LEAST_GAIN, MOST_GAIN, SLOWEST, FASTEST)
"""How fast the device is. The first is the likely one."""

_ERROR = 0.024
"""How far the likely estimate was from the time of a step that ran: at most 2.4 % in the three to which it was fitted,
68.1, 41.2 and 46.6 ms instead of 67.0, 41.3 and 45.5 (four blocks of Llama-8B on an H200)."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of the choices that `choose` looked at.

    Args:
        keywords: What `make` was called with.
        tokens: The tokens in a step.
        peak: The bytes that it takes on each device: what the arguments alone take if it was not compiled, and None
            if that is unknown too.
        seconds: The least and the most time of a step under each assumption about the device. The least hides all
            communication behind other work, the most hides none.
        fp8_share: The share of its FLOPs in FP8 or FP4.
        reason: Why it cannot be chosen; empty if it can.
    """

    keywords: Mapping[str, Any]
    tokens: int
    peak: int | None = None
    seconds: tuple[tuple[float, float], ...] = ()
    fp8_share: float = 0.0
    reason: str = ""

    @property
    def tokens_per_second(self) -> float:
        """The likely rate of all devices together, with communication that hides behind nothing; without it, if the
        speed of links is unknown."""
        least, most = self.seconds[0]
        return self.tokens / (most if math.isfinite(most) else least)

    @property
    def range(self) -> tuple[float, float]:
        """The least and the most tokens per second, under all assumptions."""
        return self.tokens / max(most for _, most in self.seconds), self.tokens / min(
            least for least, _ in self.seconds
        )

    def may_be_faster_than(self, other: "Choice") -> bool:
        """Whether it may get through more tokens per second under one of the assumptions: whether the ranges overlap,
        each wider by the error of estimates.

        Both run on the same device, so their ranges are compared assumption by assumption.

        Args:
            other: Another choice for the same device.
        """
        pairs = zip(self.seconds, other.seconds, strict=True)
        return any(
            mine[0] / self.tokens * (1.0 - _ERROR) <= its[1] / other.tokens * (1.0 + _ERROR) for mine, its in pairs
        )

    def __str__(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.keywords.items())


@dataclasses.dataclass(frozen=True, repr=False)
class Choices(Printable):
    """The result of `choose`. Print it for a table, and the lines of code that make the first choice.

    Args:
        device: What was compiled for.
        memory: How many bytes a step may take on each device.
        fitting: The choices that fit, the fastest first.
        others: Those that do not, and why.
        code: `code(choice)`, the lines of Python that make a choice, and its report.
    """

    device: CompilableDevice
    memory: float
    fitting: tuple[Choice, ...]
    others: tuple[Choice, ...]
    code: Callable[[Choice], str]

    @property
    def too_close_to_call(self) -> tuple[Choice, ...]:
        """The choices that may be faster than the first: their ranges overlap."""
        return tuple(choice for choice in self.fitting[1:] if choice.may_be_faster_than(self.fitting[0]))

    def __rich__(self) -> RenderableType:
        names = [*(self.fitting or self.others)[0].keywords]
        table = new_table(f"Choices for {self.device.kind}, {self.memory / 1e9:.1f} GB each, by tokens per second")
        for name in names:
            table.add_column(name)
        for name in ("tokens/s (estimate)", "GB", ""):
            table.add_column(name, justify="left" if not name else "right")
        close = self.too_close_to_call
        for choice in self.fitting:
            low, high = choice.range
            rate = f"{choice.tokens_per_second:,.0f} ({low:,.0f} to {high:,.0f})"
            remark = "too close to call" if any(choice is one for one in close) else ""
            table.add_row(*_cells(choice), rate, _gigabytes(choice), remark)
        for choice in self.others:
            table.add_row(*_cells(choice), "", _gigabytes(choice), choice.reason, style="dim")
        if not self.fitting:
            return Group(table, Text("Nothing fits: use more devices or fewer tokens, or recompute more."))
        remark = (
            "Ranges: speeds that devices have reached, with communication from all hidden to all exposed. A choice is "
            f"too close to call if, under one of these assumptions and to {_ERROR:.1%}, it may be as fast as the first."
        )
        return Group(table, Text(remark))

    def __str__(self) -> str:
        # Not in the table, whose lines are as wide as a terminal: lines to copy stay whole.
        return "\n\n".join([super().__str__(), *map(self.code, self.fitting[:1])])


def _cells(choice: Choice) -> Iterator[str]:
    for value in choice.keywords.values():
        if isinstance(value, Mapping):
            yield " ".join(f"{axis}={size}" for axis, size in value.items())
        else:
            yield str(value)


def _gigabytes(choice: Choice) -> str:
    return "" if choice.peak is None else f"{choice.peak / 1e9:.1f}"


type Makes = Callable[..., tuple[Any, ...]]
"""Makes a step from keywords: returns `(step_fn, args)` or `(step_fn, args, shardings)`."""


def choose(
    make: Makes,
    *,
    tokens: Sequence[int],
    recipes: Sequence[Any] | None = None,
    recompute: Sequence[Any] | None = None,
    meshes: Sequence[Mapping[str, int]] | None = None,
    device: str | CompilableDevice = "h100",
    devices: int | None = None,
    memory: float | None = None,
    exact: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Choices:
    """Compiles a step in many ways for a device that need not be here, and lists those that fit, the fastest first.

    Each combination of the lists is a choice: `make(recipe=..., recompute=..., mesh=..., tokens=...)`, without the
    keywords whose lists are left out. Stack your blocks (`haliax.nn.Stacked`): a scan compiles as fast as one block,
    with all the layers, and fewer layers mislead, because the head weighs too much.

    Not compiled are choices whose arguments alone do not fit, and those that need more than one that does not fit: as
    much recomputed or less, with as many tokens or more, for the same recipe and mesh.

    Args:
        make: Makes the step. It returns what `inspect_step` takes: `(step_fn, args)`, or `(step_fn, args, shardings)`.
        tokens: How many tokens a step may have, in all.
        recipes: Recipes; None among them is high precision.
        recompute: What the backward pass computes again, in your own words, from what takes least memory to what takes
            most, such as `(True, False)`.
        meshes: Mesh axes and their sizes.
        device: As in `inspect_step`.
        devices: As in `inspect_step`.
        memory: The bytes that a step may take on each device: by default three quarters of what the device has, as
            JAX does. If you set `XLA_PYTHON_CLIENT_MEM_FRACTION`, pass that share of it.
        exact: Whether the loss must not change: leaves out all recipes but None.
        compiler_options: As in `inspect_step`.
        cache: A folder for what was found. A second call continues there, also after the first was killed. A program
            or an option that changed is compiled again.
        progress: Called with words about each choice before it is compiled.

    Returns:
        The choices; `print` shows them as a table.

    Raises:
        ValueError: If a list is empty, if the peaks of the device or, without `memory`, its size are unknown; and if no
            choice compiles, the last one's error.
        RuntimeError: If the device's compiler is not installed, and as for ValueError.

    Example:
        >>> from haliax_fp8.preflight import LocalDevice, Peaks
        >>> toy = LocalDevice("toy", "a toy", Peaks(fp8=2e12, bf16=1e12, f32=1e12, bandwidth=1e11, source="invented"))
        >>> make = lambda tokens: (lambda w, x: x @ w, (jnp.ones((64, 64)), jnp.ones((tokens, 64))))
        >>> choices = choose(make, tokens=[1024, 2048], device=toy, memory=1e6)
        >>> [choice.tokens for choice in choices.fitting], [choice.tokens for choice in choices.others]
        ([1024], [2048])
    """
    require_bool("exact", exact, of="choose")
    chosen = as_compilable(device)
    if chosen.peaks is None:
        raise ValueError(f"device={chosen.name!r} has no known peaks, so no times can be estimated; name another")
    available = _memory_of(chosen) if memory is None else memory
    if exact:
        if recipes is None:
            raise ValueError("exact=True without recipes: list them, with None for bf16; only that is looked at")
        recipes = [recipe for recipe in recipes if recipe is None]
    lists = {"mesh": meshes, "recipe": recipes, "tokens": sorted(tokens), "recompute": recompute}
    for name, values in lists.items():
        if values is not None and not values:
            why = ", because exact=True keeps only None" if name == "recipe" and exact else ""
            raise ValueError(f"no {name} to choose from{why}; list some, or leave the argument out")
    grid = {name: values for name, values in lists.items() if values is not None}
    compiler = _Compiler(make, chosen, devices, dict(compiler_options or {}), cache)
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    choices: list[Choice] = []
    last: Exception | None = None
    for index, keywords in enumerate(points):
        choice = Choice(keywords, keywords["tokens"])
        if (
            smaller := next((one for one in choices if _takes_less(one, choice, recompute, available)), None)
        ) is not None:
            choices.append(dataclasses.replace(choice, reason=f"takes more than {smaller}"))
            continue
        if progress is not None:
            progress(f"{index + 1} of {len(points)}: {choice}")
        try:
            choice = compiler.figures(choice, available)
        except (ValueError, RuntimeError) as error:  # of a recipe, for example, that does not fit the device
            last = error
            choice = dataclasses.replace(choice, reason=f"{type(error).__name__}: {str(error).partition('\n')[0]}")
        if choice.peak is not None and choice.peak > available:
            choice = dataclasses.replace(choice, reason=choice.reason or "does not fit")
        choices.append(choice)
    if last is not None and all(choice.peak is None for choice in choices):
        raise last
    fitting = sorted((choice for choice in choices if not choice.reason), key=lambda choice: -choice.tokens_per_second)
    others = tuple(choice for choice in choices if choice.reason)
    return Choices(chosen, available, tuple(fitting), others, compiler.code)


def _takes_less(one: Choice, other: Choice, recompute: Sequence[Any] | None, available: float) -> bool:
    """Whether a choice that does not fit takes at most as much memory as another."""
    if one.peak is None or one.peak <= available:
        return False
    same = all(one.keywords[name] == other.keywords[name] for name in ("mesh", "recipe") if name in other.keywords)
    order = lambda choice: 0 if recompute is None else [*recompute].index(choice.keywords["recompute"])
    return same and one.tokens <= other.tokens and order(one) <= order(other)


def _memory_of(device: CompilableDevice) -> float:
    row = catalog.get(device.name)
    if row is None or not isinstance(row.xla, XlaGpu):
        raise ValueError(f"the memory of {device.kind} is not known; pass memory= in bytes, such as memory=32e9")
    return _USABLE * row.xla.device_memory_size


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """Makes a choice's step, compiles it, and keeps the figures. The arguments are those of `choose`."""

    make: Makes
    device: CompilableDevice
    devices: int | None
    options: Mapping[str, Any]
    cache: str | os.PathLike[str] | None

    def figures(self, choice: Choice, available: float) -> Choice:
        """The choice with its figures: from the cache if it is there, else by compiling it if its arguments fit."""
        step, args, *shardings = self.make(**choice.keywords)
        mesh = choice.keywords.get("mesh")
        shardings = shardings[0] if shardings else None
        traced = Traced.of(step, args, mesh=make_mesh(self.device, self.devices, mesh), shardings=shardings)
        if traced.argument_bytes > available:
            return dataclasses.replace(choice, peak=traced.argument_bytes, reason="the arguments alone do not fit")
        file = None if self.cache is None else pathlib.Path(self.cache) / f"{self._key(traced, step, args)}.json"
        if file is None or not file.exists():
            report = inspect_step(
                step,
                *args,
                device=self.device,
                devices=self.devices,
                mesh=mesh,
                shardings=shardings,
                compiler_options=self.options,
            )
            figures = {"peak": report.step.memory.peak, "seconds": _seconds(report), "fp8_share": report.fp8_share}
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                # A process that is killed leaves no half of a file under its name.
                unfinished = file.with_suffix(f".{os.getpid()}")
                unfinished.write_text(json.dumps(figures | {"choice": str(choice)}))
                unfinished.replace(file)
        else:
            figures = json.loads(file.read_text())
        seconds = tuple((least, most) for least, most in figures["seconds"])
        return dataclasses.replace(choice, peak=figures["peak"], seconds=seconds, fp8_share=figures["fp8_share"])

    def _key(self, traced: Traced, step: Any, args: tuple[Any, ...]) -> str:
        """A name for all that the figures depend on: the program itself, so that a changed model is another."""
        options_of = getattr(step, "compiler_options", None)
        flags = XlaFlags.of_environment(platform=self.device.hardware.platform).values
        decides = (
            # Its description too, which is not in its text.
            vars(self.device),
            dict(traced.mesh.shape),
            flags,
            self.options,
            None if options_of is None else options_of(*args, device=self.device.hardware),
            _ASSUMPTIONS,
            *(importlib.metadata.version(package) for package in ("haliax-fp8", "jax", "jaxlib")),
        )
        return hashlib.sha256(f"{decides!r}\n{traced.text(self.device)}".encode()).hexdigest()[:32]

    def code(self, choice: Choice) -> str:
        """The lines that make a choice, and its report."""
        name = getattr(self.make, "__name__", "make")
        name, module = (name, self.make.__module__) if name.isidentifier() else ("make", "__main__")
        results = ["step", "args", "shardings"][: len(self.make(**choice.keywords))]
        options = {
            "device": repr(self.device.name) if self.device.name in compilable_devices else "device",
            "devices": None if self.devices is None else repr(self.devices),
            "mesh": repr(choice.keywords["mesh"]) if "mesh" in choice.keywords else None,
            "shardings": "shardings" if "shardings" in results else None,
            "compiler_options": repr(dict(self.options)) if self.options else None,
        }
        more = "".join(f", {name}={value}" for name, value in options.items() if value is not None)
        lines = [
            *([] if module == "__main__" else [f"from {module} import {name}"]),
            "from haliax_fp8.preflight import inspect_step",
            "",
            f"{', '.join(results)} = {name}({choice})",
            f"report = inspect_step(step, *args{more})",
        ]
        return "\n".join(lines)


def _seconds(report: PreflightReport) -> list[tuple[float, float]]:
    """The least and the most seconds of a step under each assumption."""
    peaks = report.device.peaks
    assert peaks is not None
    times = [report.step.estimate(Roofline(peaks, assumption)).total for assumption in _ASSUMPTIONS]
    sent = sum(collective.sent for collective in report.step.collectives)
    return [(max(time, _sending(sent, peaks, 0.0)), time + _sending(sent, peaks, math.inf)) for time in times]


def _sending(sent: int, peaks: Peaks, unknown: float) -> float:
    """Seconds to send bytes to the next device."""
    if not sent:
        return 0.0
    return unknown if peaks.link is None else sent / peaks.link
