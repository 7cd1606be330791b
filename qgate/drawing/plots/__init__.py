"""The pictures of an analysis of dumps."""
