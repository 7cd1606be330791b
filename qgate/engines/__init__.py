"""Two engines on the same tokens: how far their probabilities and modules are apart, and why."""
