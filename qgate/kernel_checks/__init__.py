"""Checks of one kernel in anybody's test: expected results, relations, repeatability."""
