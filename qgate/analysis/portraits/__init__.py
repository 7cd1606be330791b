"""Tensors as exact counts that add up, and what follows from them."""
