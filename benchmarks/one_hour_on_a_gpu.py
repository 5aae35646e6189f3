"""Claim: on a GPU, converted layers and models are faster than in bf16. What it measures, most valuable first.

    uv run benchmarks/one_hour_on_a_gpu.py --minutes 10               # needs a GPU, jax[cuda]; the same command goes on
    uv run benchmarks/one_hour_on_a_gpu.py --part training --part linear      # only these, also if they are done
    uv run benchmarks/one_hour_on_a_gpu.py --smoke                    # the same calls at tiny sizes, anywhere
    uv run benchmarks/one_hour_on_a_gpu.py --show                     # what is measured, beside the forecasts
    uv run benchmarks/one_hour_on_a_gpu.py --results                  # writes the tables of RESULTS.md
    uv run benchmarks/one_hour_on_a_gpu.py --forecast h100 h200 b200  # needs XLA's compiler: adds to forecasts.json

`--list` prints the parts: `lib/gpu_parts.py` has them, `lib/cases.py` what they compile. Each runs in a process of its
own, which ends at its limit; a call ends when no part fits into what is left of `--minutes`. Every row is appended to
`--json` when it is measured. The next call does what this GPU has not done yet: a call that is killed loses the part
that it was in, whose programs stay compiled in `runs/`. A part that failed, or took longer than its limit, is not tried
again unless `--part` names it.

Inputs are random; times are medians of repeated runs after warm-up, libraries in turn within one process. A GPU at its
power limit changes its clock, and so what a library does is compared with what the others do in the same round: a
ratio is the median of those of the rounds, with an interval that holds the median of all rounds there could be in 95 %
of cases. The time of a layer or block is that of its launches in sequence: several runs are started in a row. One step
sets the scales before the measurement. Memory is what the compiled program needs, arguments included, from XLA's own
analysis.

A forecast is the preflight's estimate, made and dated before the measurement, with the ends of the measured rates.
"""

import argparse
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path


BEGIN = time.monotonic()
HERE = Path(__file__).resolve().parent

import jax  # noqa: E402
from lib import output  # noqa: E402
from lib.cases import SMOKE, TRITON, Plan  # noqa: E402
from lib.gpu_parts import BLACKWELL, FLAGS, HOPPER, Part, Unfinished, parts  # noqa: E402
from lib.gpu_results import (  # noqa: E402
    COMPILED_FOR,
    Measurements,
    forecast_steps,
    forecasts,
    key_of,
    read_forecasts,
    section,
    show,
    write_forecasts,
    write_section,
)
from lib.programs import explained  # noqa: E402

from haliax_fp8.devices import Device  # noqa: E402


MEASURED = HERE / "measured_on_gpus.jsonl"
SMOKE_MINUTES = 0.5
QUICKLY = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
UNFINISHED = 75
FORECAST = ("product", "Llama-8B, unrolled", "Llama-8B, scan + checkpointing", "Llama-8B, scan", "block scales")
FORECAST += ("experts", "linear")


def measure(part: Part, measured: Measurements, call: str, limit: float, parent: int, *, smoke: bool) -> int:
    """What a process of its own does: measures one part, and returns its exit status."""

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)  # Two measurements at a time would disturb each other.

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.alarm(max(1, int(limit)))
    device, folder = jax.devices()[0].device_kind, measured.path.parent / "runs"
    folder.mkdir(exist_ok=True)
    left = (limit - (time.monotonic() - BEGIN) - 20.0) / 60.0
    try:
        for row in part.rows(SMOKE if smoke else Plan(), folder, left):
            measured.append({"call": call, "device": device, **row})
    except Unfinished:
        return UNFINISHED
    except Exception as error:
        where = {"call": call, "device": device, "part": part.name, "flags": part.flags}
        measured.append({**where, "error": explained(error)})
    return 0


def describe_device(measured: Measurements, call: str, *, smoke: bool) -> None:
    """Adds the environment of a call."""
    device = Device.local()
    generation = BLACKWELL if device.is_cuda_from(10.0) else HOPPER if device.is_hopper else None
    if generation is None and not smoke:
        raise SystemExit(
            f"JAX computes on {device.kind} here: this needs jax[cuda] and a GPU of the generation {HOPPER} or "
            f"{BLACKWELL}; --smoke runs anywhere"
        )
    environment = output.environment() | {"generation": generation}
    measured.append({"call": call, "device": device.kind, "environment": environment})


def run_call(chosen: Sequence[Part] | None, measured: Measurements, minutes: float, *, smoke: bool) -> None:
    """Measures what is not done and fits into the time."""
    end, call = BEGIN + 60.0 * minutes, datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

    def process(key: str, limit: float, flags: str = "") -> int:
        variables = {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # Allocate memory on demand, up to nearly all of it.
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
            "JAX_COMPILATION_CACHE_DIR": str(measured.path.parent / "runs" / "compiled"),
            "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "all",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # Processes share hundreds of small programs.
            **os.environ,
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags} {QUICKLY if smoke else ''}".strip(),
        }
        asked = ["--child", key, "--parent", str(os.getpid()), "--limit", f"{limit:.0f}", "--call", call]
        command = [sys.executable, __file__, *asked, "--json", str(measured.path), *["--smoke"] * smoke]
        return subprocess.run(command, env=variables, check=False).returncode

    if status := process("device", 300.0):
        raise SystemExit(status)
    here = [line for line in measured.lines() if "environment" in line][-1]
    device, generation = here["device"], here["environment"]["generation"]
    done, waiting = measured.done(device) if chosen is None else set(), []
    # A CPU has no Triton to be on or off.
    planned = {part.name: part for part in parts()} if smoke else {part.key: part for part in parts()}
    for part in chosen or [part for part in planned.values() if smoke or generation in part.on]:
        limit, left = 60.0 * (SMOKE_MINUTES if smoke else part.minutes), end - time.monotonic()
        takes_the_rest = smoke or part.goes_on
        if part.key in done:
            continue
        if limit > left:
            waiting.append(f"{part.key}, {limit / 60:g} minutes")
            continue
        limit = left if takes_the_rest else limit
        print(f"{part.key}: at most {limit / 60:.1f} of {left / 60:.1f} minutes", file=sys.stderr, flush=True)
        begin = time.monotonic()
        status = process(part.key, limit, FLAGS[part.flags])
        if status == UNFINISHED or (status == -signal.SIGALRM and takes_the_rest):
            waiting.append(part.key)
            continue
        line = {"call": call, "device": device, "done": part.key, "seconds": round(time.monotonic() - begin, 1)}
        if status:
            why = f"was stopped after {limit:.0f} s" if status == -signal.SIGALRM else f"ended with {status}"
            print(f"{part.key} {why}", file=sys.stderr)
            line |= {"part": part.name, "flags": part.flags, "error": why}
        measured.append(line)
    if waiting:
        print(f"The same command goes on with: {'; '.join(waiting)}", file=sys.stderr)


def make_forecasts(devices: Sequence[str], plan: Plan) -> None:
    """Adds what `forecasts.json` lacks, row by row. What it has stays: a forecast is of its date."""
    known = read_forecasts()

    def add(rows: Iterator[output.Row]) -> None:
        for row in rows:
            key = row["device"], *key_of(row)
            if "error" in row:
                print(", ".join(key), row["error"], sep=": ", file=sys.stderr, flush=True)
            elif key not in known:
                print(", ".join(key), file=sys.stderr, flush=True)
                known[key] = row
                write_forecasts(known.values())

    for device in devices:
        if not any(key[:2] == (device, "training") for key in known):
            add(forecast_steps(plan, device))
    alike: dict[str, list[str]] = {}
    for device in devices:
        alike.setdefault(COMPILED_FOR.get(device, device), []).append(device)
    for part in parts():
        for target, group in alike.items():
            generation = BLACKWELL if Device.by_name(target).is_cuda_from(10.0) else HOPPER
            if part.name in FORECAST and generation in part.on:
                add(forecasts(part, plan, group, known))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all that the call does")
    parser.add_argument("--part", action="append", help="only this; may be repeated")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on any device")
    parser.add_argument("--json", type=Path, help=f"the file of measurements; default: {MEASURED.name}")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")
    parser.add_argument("--list", action="store_true", help="only print the parts")
    parser.add_argument("--show", action="store_true", help="only print what is measured")
    parser.add_argument("--results", action="store_true", help="only write the tables of RESULTS.md")
    parser.add_argument("--forecast", nargs="+", metavar="DEVICE", help="only add forecasts for devices")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--call", help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    by_key = {part.key: part for part in parts()}
    if unknown := set(options.part or ()) - by_key.keys() - {part.name for part in by_key.values()}:
        parser.error(f"--part {unknown.pop()!r} is not one of {list(by_key)}")
    measured = Measurements((options.json or (Path("runs/smoke.jsonl") if options.smoke else MEASURED)).resolve())
    measured.path.parent.mkdir(parents=True, exist_ok=True)
    if options.child == "device":
        describe_device(measured, options.call, smoke=options.smoke)
    elif options.child:
        part, limit, parent = by_key[options.child], options.limit, options.parent
        raise SystemExit(measure(part, measured, options.call, limit, parent, smoke=options.smoke))
    elif options.list:
        for part in by_key.values():
            print(f"{part.key:45s} {part.minutes:4g} minutes, {' and '.join(part.on)}")
    elif options.forecast:
        make_forecasts(options.forecast, Plan())
    elif options.results:
        write_section(HERE / "RESULTS.md", section(measured))
    elif options.show:
        show(measured, markdown=options.markdown)
    else:
        if TRITON in os.environ.get("XLA_FLAGS", ""):
            parser.error(f"XLA_FLAGS={os.environ['XLA_FLAGS']!r}: leave out {TRITON}, which each part sets for itself")
        named = [part for part in by_key.values() if {part.key, part.name} & set(options.part or ())]
        run_call(named or None, measured, options.minutes, smoke=options.smoke)
        show(measured, markdown=options.markdown)


if __name__ == "__main__":
    main()
