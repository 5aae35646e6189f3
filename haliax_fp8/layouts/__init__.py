"""Layouts: how weights and inputs are quantized for inference, in a folder and in process; with NumPy alone."""

from .layout import PLAIN as PLAIN, Inputs as Inputs, Layout as Layout, as_layout as as_layout, named as named
