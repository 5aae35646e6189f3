"""The command line, `python -m haliax_fp8`: preflight of a step, tables of devices and formats."""

from ._main import INTERRUPTED as INTERRUPTED, main as main
