"""What to compile for: devices that this machine need not have."""
