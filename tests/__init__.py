"""A package, so that a test file can import its neighbor: `from tests import house`."""
