"""Which powers of two suit a format."""
