"""The report in the documentation is that of the program which its step compiles to today."""

import html
import json
import pathlib
import re
import runpy

import jax
import pytest

from haliax_fp8.preflight import compilable_devices


FIGURES = pathlib.Path(__file__).parents[2] / "docs" / "_figures"


def without_times(facts):
    """How long compiling took is another number each time."""
    return {name: {**program, "seconds": None} for name, program in facts.items()}


@pytest.mark.slow
def test_what_is_kept_is_what_the_step_compiles_to(monkeypatch):
    if (missing := compilable_devices["h100"].missing()) is not None:
        pytest.skip(missing)
    monkeypatch.syspath_prepend(FIGURES)  # as when it is run as a script
    script = runpy.run_path(str(FIGURES / "kept_report.py"))
    # As in a user's process: the tests' settings are stricter.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        programs = script["facts"](script["compiled"]())
    assert without_times(programs) == without_times(json.loads(script["STORED"].read_text())), (
        "run python docs/_figures/kept_report.py"
    )


def test_the_report_of_what_is_kept_is_the_report(monkeypatch):
    """Every figure of the JSON that the command line writes, but for the program's text, comes out again."""
    monkeypatch.syspath_prepend(FIGURES)
    script = runpy.run_path(str(FIGURES / "kept_report.py"))
    report = script["stored_report"]()
    assert without_times(script["facts"](report)) == without_times(json.loads(script["STORED"].read_text()))
    assert report.speedup is not None
    assert report.caveats == (), "nothing of Triton, whose products are off"
    assert {product.reason for product in report.products if product.reason} == {"excluded by 'layers.2'"}
    picture = script["PICTURES"]["preflight"]()
    shown = [product for product in report.products if product.name in ("fprop", "forward")]
    assert shown and all(f"{product.m}×{product.k}×{product.n}" in picture for product in shown)
    # The layer has ten outputs, whatever XLA pads them to, and all three products.
    words = html.unescape(re.sub(r"<[^>]*>", " ", picture))
    assert re.search(r"2\s+8192×4096×10\s+0\.2%\s+bf16\s+bf16\s+bf16\s", words)
