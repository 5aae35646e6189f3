"""The devices to compile for, which this machine need not have."""
