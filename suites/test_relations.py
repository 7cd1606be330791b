"""Whether a mode gives the same twice: alone or in a batch, padded, cut, in chunks, restarted.

Every site is compared with one run of all rows and fed by it. What differs by more than float noise
(with --bitwise: by a bit) is red at the first site that makes it; no baseline is needed. The suite
runs where its file is named, or with --relations.
"""


def test_relations(relation_gate, mode):
    relation_gate.mode(mode)
