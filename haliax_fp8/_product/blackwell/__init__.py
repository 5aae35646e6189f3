"""Operands in blocks on Blackwell, each read once for both of its products, and the products that take them."""
