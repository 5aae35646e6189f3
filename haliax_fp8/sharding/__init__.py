"""Meshes of devices: what they need beyond the products."""

from .dispatch import send_rows as send_rows
