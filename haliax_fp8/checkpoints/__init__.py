"""Checkpoints of one's own runs: saved, and loaded into models of another recipe, history length or layout."""

# By this name too.
from ..folders import BrokenCheckpoint  # noqa: F401
from .file import save as save
from .load import load_into as load_into
from .report import LoadReport as LoadReport
