"""Where JAX is extended; the only folder that imports its internals. See README.md."""
