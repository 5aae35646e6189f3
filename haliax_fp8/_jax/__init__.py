"""Extensions of JAX; the only folder that imports its internals. See README.md."""
