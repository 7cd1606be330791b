"""The pictures of an analysis of activations."""
