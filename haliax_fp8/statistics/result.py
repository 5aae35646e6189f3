"""OpStatistics and ModelStatistics: what was measured of the operands of one op, and of all ops of a model."""

from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float32
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .._printing import DottedName, Printable, new_table
from ..recipes import OperandName
from .result_table import Worst, groups, verdict


OPERANDS: tuple[OperandName, ...] = ("input", "kernel", "output_grad")


class OpStatistics(Printable, eqx.Module):
    """What quantization does to the operands of one op, `[*stack, 3]` for input, kernel and output gradient.

    Operands that the loss does not reach have NaN; operands in high precision lose nothing, so their shares are 0. If
    an op is used several times, each number is the largest over its uses. `x` are the finite elements of an operand,
    `q` what they are quantized to.

    Args:
        amax: `max |x|`.
        scale: The scale, `x ≈ data * scale`; of blocks the largest.
        saturation: The share of elements that are clipped at the format's maximum.
        underflow: The share of elements that are not zero and are flushed to zero.
        last_bin: The share of elements that end at the format's maximum, whether they are clipped or not: where it is
            large, neighbouring values have become one (arXiv:2506.20752).
        error: `|x - q|**2 / |x|**2`, the mean square error of quantization relative to the operand.
        rms_error: `sqrt(mean((x - q)**2))`, in the units of the operand.
        norm: `|x|`, the square root of the sum of squares.
        dynamic_range: `log2(max |x| / min |x|)` over elements that are not zero, in bits. A format with one scale holds
            about 18 (E4M3) or 32 (E5M2) of them.
        kurtosis: `mean((x - mean)**4) / variance**2`: 3 for a normal distribution, large for one with outliers.
        wide_rows: The share of rows (of a kernel, those of an output) whose amax is at least an eighth of the tensor's:
            where it is large, as with an outlier channel, scales per row gain little.
        nonfinite: How many elements are infinite or NaN.
        active: The share of experts that have rows, of the input and output gradient of a layer of experts whose state
            is shared; else 1.
        scale_age: How many steps ago the amax was measured that the next scale comes from, 0 if in this one; NaN for
            operands whose scaling keeps no history, and None if none does.
    """

    amax: Float32[Array, "*stack 3"]
    scale: Float32[Array, "*stack 3"]
    saturation: Float32[Array, "*stack 3"]
    underflow: Float32[Array, "*stack 3"]
    last_bin: Float32[Array, "*stack 3"]
    error: Float32[Array, "*stack 3"]
    rms_error: Float32[Array, "*stack 3"]
    norm: Float32[Array, "*stack 3"]
    dynamic_range: Float32[Array, "*stack 3"]
    kurtosis: Float32[Array, "*stack 3"]
    wide_rows: Float32[Array, "*stack 3"]
    nonfinite: Float32[Array, "*stack 3"]
    active: Float32[Array, "*stack 3"]
    scale_age: Float32[Array, "*stack 3"] | None = None

    @property
    def sqnr(self) -> Float32[Array, "*stack 3"]:
        """The signal-to-quantization-noise ratio in dB: `-10 log10(error)`; infinite without error."""
        return _derived(self, jnp)["sqnr"]

    @property
    def mse(self) -> Float32[Array, "*stack 3"]:
        """`mean((x - q)**2)`; of tiny gradients it underflows in float32, where `rms_error` does not."""
        return _derived(self, jnp)["mse"]

    @property
    def over_noise(self) -> Float32[Array, "*stack 3"]:
        """`|x| / (sqrt(3) |x - q|)`: below 1, noise of quantization outweighs a gradient (arXiv:2505.19115)."""
        return _derived(self, jnp)["over_noise"]

    def __rich__(self) -> Table:
        is_stack = getattr(self.amax, "ndim", 1) > 1
        table = new_table("Quantization of each operand" + (" (the worst of a stack)" if is_stack else ""))
        for column in ("", *OPERANDS):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        if not is_concrete(self):
            table.add_row(_NO_NUMBERS)
            return table
        for name in (*self.__dataclass_fields__, "sqnr"):
            if getattr(self, name) is None:
                continue
            # Of a ratio of signal to noise, the smallest is the worst.
            reduce = np.fmin if name == "sqnr" else np.fmax
            values = reduce.reduce(np.asarray(getattr(self, name)).reshape(-1, 3), axis=0)
            table.add_row(name, *(f"{value:.3g}" for value in values))
        return table


def _derived(op: OpStatistics, xp: Any) -> dict[str, Any]:
    """What follows from an op's numbers, with the functions of `jnp` or of NumPy."""
    return {
        "sqnr": xp.float32(-10.0) * xp.log10(op.error),
        "mse": op.rms_error**2,
        "over_noise": xp.float32(1.0) / xp.sqrt(xp.float32(3.0) * op.error),
    }


class ModelStatistics(Printable, eqx.Module):
    """The statistics of a model's ops, by path. Print it for a table.

    Args:
        paths: The paths of the ops, in the order of the model's tree.
        of_ops: The statistics of each of them.
    """

    # Not a dictionary: JAX sorts those by their keys, "layers.10" before "layers.2".
    paths: tuple[str, ...] = eqx.field(static=True)
    of_ops: tuple[OpStatistics, ...]

    @property
    def ops(self) -> dict[str, OpStatistics]:
        """The statistics of each op by its path."""
        return dict(zip(self.paths, self.of_ops, strict=True))

    def __getitem__(self, path: str) -> OpStatistics:
        """The statistics of the op at a path."""
        if path not in self.paths:
            raise KeyError(f"no op at {path!r}; there are {list(self.paths)}")
        return self.ops[path]

    @property
    def saturation(self) -> Float32[Array, ""]:
        """The mean share of clipped elements over all operands that the loss reaches."""
        return self._mean("saturation")

    @property
    def underflow(self) -> Float32[Array, ""]:
        """The mean share of elements flushed to zero over all operands that the loss reaches."""
        return self._mean("underflow")

    def flat(self, prefix: str = "fp8") -> dict[str, Any]:
        """Every number by the name `{prefix}/{layer}/{operand}/{statistic}`, as trackers and loggers take them.

        Layers of a stack are numbered: `fp8/blocks[3]/input/amax`. Under `jit` the numbers are traced; outside they are
        `np.float32`, read from the device all at once.

        Args:
            prefix: What the names begin with.

        Example:
            >>> measured = quantization_statistics(fp8_linear_layers(model), loss_fn, x)
            >>> float(measured.flat()["fp8/layers.0/input/saturation"])
            0.0
        """
        # On the host NumPy computes what follows from the numbers: a call for each op costs more there.
        of_ops, xp = self.of_ops, jnp
        if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(of_ops)):
            of_ops, xp = jax.device_get(of_ops), np
        fields = [
            {name: x for name in OpStatistics.__dataclass_fields__ if (x := getattr(op, name)) is not None}
            for op in of_ops
        ]
        with np.errstate(divide="ignore"):
            columns = [measured | _derived(op, xp) for op, measured in zip(of_ops, fields, strict=True)]
        return {
            f"{prefix}/{numbered(path, index)}/{operand}/{name}": values[name][*index, i]
            for path, values in zip(self.paths, columns, strict=True)
            for index in np.ndindex(values["amax"].shape[:-1])
            for i, operand in enumerate(OPERANDS)
            for name in values
        }

    def each(self) -> Iterator[tuple[str, OpStatistics, tuple[int, ...]]]:
        """Each layer's name, its op's statistics, and its index in their stack; several for the op of a stack."""
        for path, op in self.ops.items():
            for index in np.ndindex(op.amax.shape[:-1]):
                yield numbered(path, index), op, index

    def _mean(self, name: str) -> Float32[Array, ""]:
        return jnp.nanmean(jnp.concatenate([getattr(op, name).ravel() for op in self.ops.values()]))

    def __rich__(self) -> RenderableType:
        numbers = {path: op for path, op in self.ops.items() if is_concrete(op)}
        # A count for every operand, but for those of an op that the loss does not call.
        never_called = [path for path, op in numbers.items() if np.isnan(op.nonfinite).all()]
        of_groups = groups(self.paths)
        whole = of_groups[0].prefix if len(of_groups) == 1 else ""
        within = f"; in {whole}" if whole else ""
        table = new_table(f"Quantization of each operand (the worst of a stack{within})")
        table.add_column("op", overflow="fold")
        table.add_column("operand", no_wrap=True)
        for column in ("amax", "saturation", "underflow", "SQNR"):
            table.add_column(column, justify="right", no_wrap=True)
        worst: list[Worst] = []
        for group in of_groups:
            indent = 2 if group.prefix and not whole else 0
            if indent:
                table.add_row(DottedName(group.prefix))
            for path, name in group.names.items():
                if path not in never_called:
                    worst += _add_rows(table, DottedName(name, indent), self[path])
        if not all(map(is_concrete, self.of_ops)):
            return table
        paths = ", ".join(path or "the model itself" for path in never_called)
        why = f"{paths}: never called; describe(model, loss_fn, *batch) says why"
        return Group(Text(verdict(worst)), *[Text(why)] * bool(paths), Text(), table)


def _add_rows(table: Table, name: DottedName, op: OpStatistics) -> list[Worst]:
    """Adds the rows of an op; returns the worst shares of each operand."""
    if not is_concrete(op):
        table.add_row(name, _NO_NUMBERS)
        return []
    # NaN, for members that the loss does not reach, gives way to numbers.
    worst = lambda values, reduce=np.fmax: reduce.reduce(np.asarray(values).reshape(-1, 3), axis=0)
    amaxes, sqnrs = worst(op.amax), worst(op.sqnr, np.fmin)
    rows = [Worst(*map(float, x)) for x in zip(*map(worst, (op.saturation, op.underflow, op.nonfinite)), strict=True)]
    for i, (operand, row) in enumerate(zip(OPERANDS, rows, strict=True)):
        amax, sqnr = amaxes[i], sqnrs[i]
        last = f"{row.nonfinite:.0f} NaN or inf" if row.nonfinite > 0 else f"{sqnr:.1f} dB"
        shares = f"{row.saturation:.3%}", f"{row.underflow:.3%}"
        table.add_row("" if i else name, operand, f"{amax:.3g}", *shares, last)
    return rows


_NO_NUMBERS = "traced or abstract: no numbers"


def is_concrete(op: OpStatistics) -> bool:
    """Whether the statistics have numbers: they are not traced, abstract, or a tree of something else."""
    numbers = [getattr(op, name) for name in op.__dataclass_fields__ if name != "scale_age" or op.scale_age is not None]
    return all(isinstance(x, np.ndarray | jax.Array) and not isinstance(x, Tracer) for x in numbers)


def numbered(path: str, index: tuple[int, ...]) -> str:
    """The name of a layer: its path, and its number in a stack; "model" for the model itself."""
    return (path or "model") + "".join(f"[{i}]" for i in index)
