"""Ways in which a pull request could silence its gates, and whether each of them is seen."""
