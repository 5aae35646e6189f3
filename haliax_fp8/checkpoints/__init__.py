"""Checkpoints: saved, and loaded into models of another recipe, library or layout."""

from .interchange.equinox_file import save as save
from .interchange.load import load_into as load_into
from .interchange.report import LoadReport as LoadReport
