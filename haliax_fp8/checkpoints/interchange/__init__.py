"""Checkpoints that plain and converted models exchange: names, files, histories, joined layers."""
