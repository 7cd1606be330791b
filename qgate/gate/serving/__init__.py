"""State that serving keeps between tokens: served in every way, held against its definition."""
