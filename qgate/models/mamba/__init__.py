"""Mamba-1: the network with the leaf names of Hugging Face, its scan, and its rotation."""
