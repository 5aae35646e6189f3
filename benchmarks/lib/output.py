"""Output of a benchmark's rows: to the terminal, as Markdown or as JSON, with hardware and versions."""

import argparse
import datetime
import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

import haliax_fp8


Row = dict[str, Any]
"""One measurement: figures in base units by name."""

_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-pjrt",
    "jax-cuda12-pjrt",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
    "equinox",
    "marin-haliax",
    "flax",
    "optax",
    "numpy",
)


def environment() -> dict[str, Any]:
    """Hardware, versions and date: without them, a figure is meaningless."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device.device_kind,
        "platform": device.client.platform_version.splitlines()[0],
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {
            "haliax-fp8": haliax_fp8.__version__,
            **{name: version for name in _PACKAGES if (version := _version(name))},
        },
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return match[1] if match else platform.processor() or platform.machine()


def described(environment: dict[str, Any]) -> str:
    """One line of an environment."""
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    where = f"{environment['device']}, {environment['processor']} with {environment['cores']} cores"
    return f"{environment['date']}; {where}; Python {environment['python']}, {packages}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every benchmark takes."""
    parser.add_argument("--json", type=Path, help="also write the rows, with hardware, versions and date, here")
    parser.add_argument("--markdown", action="store_true", help="print Markdown")


def write(path: Path, rows: Sequence[Row], environment: dict[str, Any]) -> None:
    """Writes the rows atomically: at any time the file is entirely old or entirely new."""
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(json.dumps({"environment": environment, "rows": list(rows)}, indent=2))
    draft.replace(path)


def show(
    title: str,
    columns: dict[str, Callable[[Row], str]],
    rows: Sequence[Row],
    environment: dict[str, Any],
    *,
    markdown: bool,
    left: int = 2,
) -> None:
    """Prints the table.

    Args:
        title: What it shows.
        columns: How each cell is written, by the heading.
        rows: The rows.
        environment: From `environment`.
        markdown: For a page, and not for the terminal.
        left: How many columns are text, to be aligned at the left.
    """
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    if markdown:
        print(f"*{title}. {described(environment)}.*\n")
        print(f"| {' | '.join(columns)} |")
        print(f"|{'---|' * left}{'---:|' * (len(columns) - left)}")
        for line in cells:
            print(f"| {' | '.join(cell.replace('|', '∣') for cell in line)} |")
        return
    table = Table(title=title, caption=described(environment), caption_justify="left")
    for i, heading in enumerate(columns):
        table.add_column(heading, justify="left" if i < left else "right", overflow="fold")
    for line in cells:
        table.add_row(*line)
    Console().print(table)


def finish(
    title: str,
    columns: dict[str, Callable[[Row], str]],
    rows: Sequence[Row],
    options: argparse.Namespace,
    *,
    left: int = 2,
) -> None:
    """Prints the table and writes the file, as the options say."""
    made_with = environment()
    show(title, columns, rows, made_with, markdown=options.markdown, left=left)
    if options.json:
        write(options.json, rows, made_with)
