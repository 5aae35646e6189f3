"""Checkpoints: models as named tensors, in the layouts that inference engines load, and back."""

from . import names as names
from .byte_tokenizer import write_byte_tokenizer as write_byte_tokenizer
from .exporting import ExportReport as ExportReport, export_model as export_model, serving_tensors as serving_tensors
from .frozen import (
    FrozenEquinoxLinear as FrozenEquinoxLinear,
    FrozenLinear as FrozenLinear,
    FrozenMoELinear as FrozenMoELinear,
    thaw as thaw,
)
from .importing import Weights as Weights, import_model as import_model
from .layouts import AbstractLayout as AbstractLayout
from .names import NameMap as NameMap
