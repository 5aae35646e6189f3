"""Meshes of devices: what they need in addition to products."""

from .dispatch import send_rows as send_rows
