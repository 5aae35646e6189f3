"""Grouped products: `lax.ragged_dot` and its gradients, as Pallas kernels that compute what is asked for, no more."""
