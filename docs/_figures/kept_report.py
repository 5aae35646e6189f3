"""Draws the report of `preflight.md` from what was compiled once: the build of the site has no compiler for GPUs.

    python docs/_figures/kept_report.py    # with the compiler: compiles the step again, and keeps what it is in JSON

The report itself, its estimates and its picture are made anew with every build. A test compares what is kept with what
the step compiles to, wherever the compiler is installed.
"""

import dataclasses
import json
import pathlib
from typing import Any

import my_training

from haliax_fp8._cli.screen import as_svg
from haliax_fp8.devices import Traffic
from haliax_fp8.devices.xla_flags import XlaFlags
from haliax_fp8.preflight import (
    Memory,
    OtherLaunches,
    PreflightReport,
    Product,
    Program,
    Verdict,
    compilable_devices,
    inspect_step,
)


STORED = pathlib.Path(__file__).with_name("kept_report.json")
DEVICE = "h100"
# Those that the step sets.
FLAGS = XlaFlags.parse("--xla_gpu_enable_triton_gemm=false")
COMMAND = "my_training.py:make_step --device h100"


def compiled() -> PreflightReport:
    """The report of today's step, compiled."""
    step, args = my_training.make_step()
    baseline, baseline_args = my_training.make_bf16_step()
    return inspect_step(step, *args, device=DEVICE, compare=(baseline, baseline_args))


def facts(report: PreflightReport) -> dict[str, Any]:
    """What the step and the baseline compile to."""
    programs = {"step": report.step, "baseline": report.baseline}
    return {
        name: _fields(program) for name, program in programs.items() if program is not None
    }


def _fields(program: Program) -> dict[str, Any]:
    fields = dataclasses.asdict(program)
    del fields["text"]
    for product in fields["products"]:
        product["verdict"] = product["verdict"].value
    return json.loads(json.dumps(fields))


def _program(fields: dict[str, Any]) -> Program:
    assert not fields["collectives"] and not fields["opaque"], (
        "a step of one device, without kernels of its own"
    )
    return Program(
        **{
            **fields,
            "products": tuple(
                Product(**{**p, "verdict": Verdict(p["verdict"])}) for p in fields["products"]
            ),
            "others": OtherLaunches(
                Traffic(**fields["others"]["traffic"]), fields["others"]["small"]
            ),
            "memory": Memory(**fields["memory"]),
            "collectives": (),
            "opaque": (),
            "elementwise": tuple(fields["elementwise"]),
            "text": "",
        }
    )


def stored_report() -> PreflightReport:
    """The report of the step as it was compiled last."""
    programs = json.loads(STORED.read_text())
    return PreflightReport(
        compilable_devices[DEVICE],
        {"devices": 1},
        _program(programs["step"]),
        _program(programs["baseline"]),
        FLAGS,
    )


PICTURES = {"preflight": lambda: as_svg(stored_report().__rich__(), f"preflight {COMMAND}")}


if __name__ == "__main__":
    STORED.write_text(json.dumps(facts(compiled()), indent=1) + "\n")
