"""Checkpoints: models as named tensors, in the layouts that inference engines load, and back."""
