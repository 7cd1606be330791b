"""All plots, one file each; the only place that knows matplotlib."""
