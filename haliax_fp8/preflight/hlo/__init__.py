"""Compiled programs as XLA prints them: read, and taken apart."""
