"""Tensors as exact counts that add up, and what is read from them."""
