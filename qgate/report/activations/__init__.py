"""What an analysis of activations found, as texts, tables and a page."""
