"""Check that a mode gives the same results alone, batched, padded, cut, in chunks and restarted.

Every site gets the tensors of one run of all rows, and is compared with that run. A difference of
more than float noise (with --bitwise: of one bit) fails at the first site that makes it; no
baseline is needed. The suite runs if you name its file, or with --relations.
"""


def test_relations(relation_gate, mode):
    relation_gate.mode(mode)
