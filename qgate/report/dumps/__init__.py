"""What an analysis of dumps found, as texts, tables and a page."""
