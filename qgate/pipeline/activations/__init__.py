"""Statistics of a model's activations: settings, one run, its record."""
