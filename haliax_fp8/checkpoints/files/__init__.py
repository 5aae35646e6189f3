"""Folders of safetensors: written one tensor at a time, complete or absent; read through a memory map."""

from .broken import BrokenCheckpoint as BrokenCheckpoint
from .folder import TensorFolder as TensorFolder, require_folder_name as require_folder_name
from .write import TensorSpec as TensorSpec, new_folder as new_folder, write_tensors as write_tensors
