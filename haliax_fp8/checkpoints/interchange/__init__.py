"""Checkpoints that plain and converted models exchange: names, files, histories."""
