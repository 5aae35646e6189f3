"""Grouped products: `lax.ragged_dot` and its gradients, as kernels that compute what is asked for and no more."""
