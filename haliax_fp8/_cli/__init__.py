"""The command line, `python -m haliax_fp8`: preflight of a step, tables of devices and formats."""
