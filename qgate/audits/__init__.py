"""The audit of comparisons in tests: which wrong values would have passed too.

`watching` wraps the functions that compare, `callers` names the line of the test, `assertions`
reads whether and how that line asserts the result, `compute` tries wrong alternatives, `record`
adds up the calls of a place, `advice` finds limits, and `texts` writes lines. Nothing here loads
torch, and numpy comes with the first comparison.
"""
