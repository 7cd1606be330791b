"""The page and the texts of a run of gates."""
