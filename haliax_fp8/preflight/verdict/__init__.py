"""Which products a compiled program runs in which format, and why."""
