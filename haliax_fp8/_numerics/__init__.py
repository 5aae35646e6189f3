"""Numbers: formats, rounding, rotation, and arrays with their scales."""
