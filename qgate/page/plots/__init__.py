"""The pictures of the gates' page: hand-made SVG, a few kilobytes and about a millisecond each."""
