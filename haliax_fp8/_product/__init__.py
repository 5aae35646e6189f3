"""The product with its derivative: fprop, dgrad and wgrad. See README.md."""
