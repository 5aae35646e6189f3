"""Models, as checkpoints see them: a list of named matrices and vectors."""
