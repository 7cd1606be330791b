"""Statistics of activations: magnitudes, outliers, formats, and what is shown of them."""
