"""Compare two models question by question."""

from qgate.metrics.paired_accuracy import compare_accuracy

reference = [True] * 540 + [False] * 460
served = [False] * 30 + [True] * 510 + [True] * 10 + [False] * 450

result = compare_accuracy(served, reference, least=0.01)
assert result.verdict == "worse"
assert "of 1,000 questions 30 lost and 10 gained" in str(result)
