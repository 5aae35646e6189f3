"""Layouts: how a checkpoint names and shapes FP8 weights and their scales. One file per family."""

from .base import AbstractLayout as AbstractLayout
from .catalog import as_layout as as_layout, named as named
from .compressed_tensors import CompressedTensors as CompressedTensors
from .hugging_face import HuggingFaceFp8 as HuggingFaceFp8
from .modelopt import ModelOptFp8 as ModelOptFp8
