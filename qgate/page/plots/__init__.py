"""Plots of the gates' page: SVG of a few kilobytes, drawn in about a millisecond each."""
