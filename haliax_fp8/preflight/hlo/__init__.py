"""Reads compiled programs as XLA prints them."""
