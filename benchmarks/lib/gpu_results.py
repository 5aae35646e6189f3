"""What `one_hour_on_a_gpu.py` has measured, what was forecast of it, and the tables of both."""

import dataclasses
import datetime
import json
import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx

from haliax_fp8.devices.catalog import XlaGpu, catalog
from haliax_fp8.devices.roofline import (
    FASTEST,
    LEAST_GAIN,
    LIKELY,
    MOST_GAIN,
    SLOWEST,
    WHOLE_STEP,
    Efficiency,
    Roofline,
)
from haliax_fp8.preflight import Program, inspect_step
from lib import language_model, output
from lib.cases import TRITON, Plan
from lib.gpu_parts import TRITON_OFF, Part, size_of_step
from lib.output import Row
from lib.programs import explained


FORECASTS = Path(__file__).parents[1] / "forecasts.json"
BF16 = "bf16"


@dataclasses.dataclass(frozen=True)
class Measurements:
    """A file of JSON lines, to which every process appends: environments, rows, and parts that are done.

    Args:
        path: The file.
    """

    path: Path

    def append(self, line: Row) -> None:
        """Adds a line; what a killed process wrote last may lack its end."""
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write(json.dumps(line).encode() + b"\n")

    def lines(self) -> list[Row]:
        """All but what a killed process left unfinished."""
        lines = []
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                lines.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return lines

    def by_environment(self) -> list[tuple[dict[str, Any], list[Row]]]:
        """The rows that were measured on one device with the same versions on the same day, and where that was."""
        environments = {line["call"]: line["environment"] for line in self.lines() if "environment" in line}
        groups: dict[str, tuple[dict[str, Any], list[Row]]] = {}
        for device in dict.fromkeys(environment["device"] for environment in environments.values()):
            for row in self.rows(device):
                environment = environments[row["call"]]
                groups.setdefault(output.described(environment), (environment, []))[1].append(row)
        return list(groups.values())

    def done(self, device: str) -> set[str]:
        """The keys of the parts that need not be measured again on a device."""
        return {line["done"] for line in self.lines() if "done" in line and line["device"] == device}

    def rows(self, device: str) -> list[Row]:
        """The last one of each thing that was measured on a device."""
        rows = [line for line in self.lines() if line["device"] == device and "part" in line]
        return list({key_of(row): row for row in rows}.values())


def key_of(row: Row) -> tuple[str, ...]:
    """What a row is about."""
    return row["part"], row["flags"], row.get("size", ""), row.get("library", "")


def name_of(kind: str) -> str | None:
    """The name of a device in the catalog, by what JAX calls it."""
    return next((name for name, row in catalog.items() if row.kind == kind), None)


# --- Forecasts --------------------------------------------------------------------------------------------------------

COMPILED_FOR = {"h200": "h100"}
"""An H200 is an H100 with another memory: the estimate is that of the same program."""

NOT_FORECAST = ("flax", "use_gmm", "rematerialized")
"""Flax's op makes the program of Haliax's, Haliax's `use_gmm` none, and options for memory have their own benchmark."""


def forecasts(part: Part, plan: Plan, devices: Sequence[str], known: Container[tuple[str, ...]]) -> Iterator[Row]:
    """What the preflight says of a part, before anything runs: milliseconds, and gains over bf16, with ranges.

    Args:
        part: What is asked.
        plan: The sizes.
        devices: Names of devices that are compiled for alike.
        known: The devices and keys of rows that need not be made again.
    """
    options = {TRITON: False} if part.flags == TRITON_OFF else {}
    target = COMPILED_FOR.get(devices[0], devices[0])
    for group in part.groups(plan) if part.groups else ():
        rows = {
            name: {"part": part.name, "flags": part.flags, "size": group.size, "library": name} for name in group.cases
        }
        rows = {name: row for name, row in rows.items() if not any(word in name for word in NOT_FORECAST)}
        if all((device, *key_of(row)) in known for row in rows.values() for device in devices):
            continue
        baseline = None
        for name, row in rows.items():
            case = group.cases[name]
            try:
                args, case_options = eqx.filter_eval_shape(case.arguments), options | dict(case.options)
                program = inspect_step(case.function, *args, device=target, compiler_options=case_options).step
            except Exception as error:
                yield from ({"device": device, **row, "error": explained(error)} for device in devices)
                continue
            baseline = program if name == BF16 else baseline
            for device in devices:
                yield {"device": device, **row, **forecast(program, baseline, device, is_step=group.is_step)}


def forecast_steps(plan: Plan, device: str) -> Iterator[Row]:
    """The same of training steps, with as many layers and sequences as fit."""
    xla = catalog[device].xla
    assert isinstance(xla, XlaGpu)
    limit = 0.92 * xla.device_memory_size
    sizes = plan.model.with_layers(language_model.fitting_layers(plan.model, int(limit)))
    baseline, sequences = None, plan.sequences
    for library, way in language_model.WAYS.items():
        step = dataclasses.replace(way.step, donate=True)
        state = eqx.filter_eval_shape(way.initial, sizes, "cudnn")
        while True:
            tokens = eqx.filter_eval_shape(language_model.batch, sizes, sequences)
            program = inspect_step(step, *state, tokens, device=device, compiler_options={TRITON: False}).step
            if program.memory.peak <= 0.97 * limit or sequences == 1:
                break
            sequences //= 2
        row = {"device": device, "part": "training", "flags": TRITON_OFF, "library": library}
        row["size"] = size_of_step(sizes, sequences, "cudnn")
        baseline = program if library == BF16 else baseline
        yield row | forecast(program, baseline, device, is_step=True)


def forecast(program: Program, baseline: Program | None, device: str, *, is_step: bool) -> Row:
    """Milliseconds of a program, and how many times as fast as the baseline it is."""
    peaks = catalog[device].peaks
    assert peaks is not None
    of = lambda program, efficiency: 1e3 * program.estimate(Roofline(peaks, efficiency)).total
    likely = WHOLE_STEP if is_step else LIKELY
    ends = [_idling(efficiency, is_step) for efficiency in (FASTEST, SLOWEST)]
    times = sorted(of(program, efficiency) for efficiency in (likely, *ends))
    row: Row = {"ms": of(program, likely), "ms_least": times[0], "ms_most": times[-1]}
    row["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    if program.opaque:
        row["note"] = f"without {len(program.opaque)} launches that cannot be analyzed"
    if baseline is not None:
        gains = [of(baseline, efficiency) / of(program, efficiency) for efficiency in (likely, LEAST_GAIN, MOST_GAIN)]
        row |= {"times_bf16": gains[0], "times_bf16_least": min(gains), "times_bf16_most": max(gains)}
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


def _idling(efficiency: Efficiency, is_step: bool) -> Efficiency:
    return efficiency if is_step else dataclasses.replace(efficiency, idle=0.0)


def read_forecasts(path: Path = FORECASTS) -> dict[tuple[str, ...], Row]:
    """By the name of the device and the key of the row."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["device"], *key_of(row)): row for row in rows}


def write_forecasts(rows: Iterable[Row], path: Path = FORECASTS) -> None:
    """Replaces the file: a line for each row, and what they were made with."""
    lines = ",\n".join(map(json.dumps, rows))
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(f'{{"made_with": {json.dumps(output.described(output.environment()))},\n"rows": [\n{lines}\n]}}\n')
    draft.replace(path)


# --- Tables -----------------------------------------------------------------------------------------------------------


def with_forecasts(rows: Sequence[Row], kind: str) -> list[Row]:
    """Rows with what was forecast of them, as `forecast`."""
    known, name = read_forecasts(), name_of(kind) or ""
    of = lambda row: known.get((name, *key_of(row)))
    return [row | {"forecast": times} if (times := of(row)) else row for row in rows]


def _number(name: str, form: str) -> Callable[[Row], str]:
    return lambda row: format(row[name], form) if name in row else ""


def _gain(row: Row) -> str:
    if "times_bf16_least" not in row or row["library"] == BF16:
        return _number("times_bf16", ".2f")(row)
    return f"{row['times_bf16']:.2f} ({row['times_bf16_least']:.2f} – {row['times_bf16_most']:.2f})"


def _ms(row: Row) -> str:
    return f"{row['ms']:,.3f}" if row["ms"] < 10 else f"{row['ms']:,.1f}"


def _forecast(row: Row) -> str:
    times = row.get("forecast", {})
    return f"{_ms(times)} ({_ms({'ms': times['ms_least']})} – {_ms({'ms': times['ms_most']})})" if "ms" in times else ""


def _missed(row: Row) -> str:
    """Measured over forecast, and whether it is in its range."""
    times = row.get("forecast", {})
    if "ms" not in times or "ms" not in row:
        return ""
    inside = times["ms_least"] <= row["ms"] <= times["ms_most"]
    return f"{row['ms'] / times['ms']:.2f}{'' if inside else ', outside'}"


def _products(row: Row) -> str:
    if "cublas_fp8" not in row:
        return ""
    return f"{row['cublas_fp8']} / {row['cublas_other']} / {row['triton_products']}"


COLUMNS: dict[str, Callable[[Row], str]] = {
    "what": lambda row: row["part"],
    "size": lambda row: row.get("size", ""),
    "flags": lambda row: row["flags"],
    "library": lambda row: row.get("library", ""),
    "ms": lambda row: _ms(row) if "ms" in row else "",
    "x bf16": _gain,
    "forecast, ms": _forecast,
    "measured / forecast": _missed,
    "TFLOP/s": _number("tflops", ",.0f"),
    "tokens/s": _number("tokens_per_second", ",.0f"),
    "program, GB": _number("program_gb", ".2f"),
    "products in cuBLAS FP8 / cuBLAS other / Triton": _products,
    "note": lambda row: row.get("error", row.get("note", "")),
}
IN_RESULTS = ("what", "size", "flags", "library", "ms", "x bf16", "forecast, ms", "measured / forecast", "tokens/s")
IN_RESULTS += ("program, GB",)


def show(measured: Measurements, *, markdown: bool) -> None:
    """Prints all rows, beside their forecasts."""
    for environment, measured_rows in measured.by_environment():
        rows = with_forecasts(measured_rows, environment["device"])
        missed = [_missed(row) for row in rows]
        outside = sum(text.endswith("outside") for text in missed)
        title = (
            f"{environment['device']}: {outside} of {sum(map(bool, missed))} are outside the range of their forecast"
        )
        output.show(title, COLUMNS, rows, environment, markdown=markdown, left=4)


def section(measured: Measurements) -> str:
    """The tables of `RESULTS.md`, one for each device and day."""
    tables = []
    for environment, measured_rows in measured.by_environment():
        rows = with_forecasts(measured_rows, environment["device"])
        bits = [row for row in rows if "wrong" in row]
        heading = [name for name in COLUMNS if name in IN_RESULTS]
        lines = [f"{output.described(environment)}.", "", f"| {' | '.join(heading)} |"]
        lines.append(f"|{'---|' * 4}{'---:|' * (len(heading) - 4)}")
        last: tuple[str, ...] = ()
        for row in rows:
            if "ms" in row and "idle_ms" not in row:
                cells = [COLUMNS[name](row) for name in heading]
                # What is as in the row above is not repeated.
                same = tuple(cells[:3]) == last
                last = tuple(cells[:3])
                lines.append(f"| {' | '.join(['', '', '', *cells[3:]] if same else cells)} |")
        lines += [f"- {row['part']}, {row['size']}, {row['library']}: {row['note']}." for row in rows if _is_said(row)]
        if bits:
            wrong = [row["size"] for row in bits if row["wrong"]]
            lines += ["", f"Beside the CPU, {len(bits) - len(wrong)} of {len(bits)} cases are as expected."]
            lines += [f"- Not so: {name}." for name in wrong]
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _is_said(row: Row) -> bool:
    return "idle_ms" in row or (row["part"] == "loss" and bool(row.get("note")))


BEGINNING, END = "<!-- one_hour_on_a_gpu.py --results writes this -->", "<!-- until here -->"


def write_section(path: Path, text: str) -> None:
    """Replaces what is between the marks in a page."""
    before, _, rest = path.read_text().partition(BEGINNING)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{path} lacks the lines {BEGINNING!r} and {END!r}; restore them around the table")
    path.write_text(f"{before}{BEGINNING}\n\n{text}\n\n{END}{after}")
