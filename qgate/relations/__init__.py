"""Relations: two ways to compute the same thing that must agree bit for bit or to float noise."""
