"""A hook of mkdocs: every figure of the site is drawn anew when the site is built."""

import functools
import os
import pathlib
import subprocess
import sys
import tempfile

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


SCRIPT = pathlib.Path(__file__).parents[1] / "_figures" / "figures.py"


@functools.cache
def drawn(changed: float) -> dict[str, bytes]:
    """The files that the script draws, by name; again when one of the scripts was changed, as `mkdocs serve` sees."""
    del changed
    root = SCRIPT.parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, str(SCRIPT), folder],
            check=True,
            cwd=root,
            # Some come from models that are trained for a few steps; with the CPU they are the same everywhere.
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        )
        return {
            picture.name: picture.read_bytes()
            for picture in sorted(pathlib.Path(folder).iterdir())
        }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Puts what was drawn in place of the copies that the repository keeps for readers of the bare pages."""
    changed = max(path.stat().st_mtime for path in SCRIPT.parent.glob("*.py"))
    for name, content in drawn(changed).items():
        if (copy := files.get_file_from_path(f"images/{name}")) is not None:
            files.remove(copy)
        files.append(File.generated(config, f"images/{name}", content=content))
    return files
