"""What all tests of examples have."""

import jax
import pytest


@pytest.fixture(autouse=True)
def standard_promotion():
    """What users of an example have; optax's AdamW does not run under strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield
