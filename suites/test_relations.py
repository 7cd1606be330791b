"""Check that a mode gives the same results in a long text, decoded, alone, batched and padded.

Every site gets the tensors of one run, and is compared with that run. A difference of more than
float noise (with --bitwise: of one bit) fails at the first site that makes it; no baseline is
needed. With --relations rows are also cut, put in chunks, split, and the mode is built again.
"""


def test_relations(relation_gate, mode):
    relation_gate.mode(mode)
