"""Whether two engines give the same probabilities to the same tokens, and have the same weights.

Needs `--engines A B`: dumps, files of logits, or log-probabilities as servers print them; B drew
the tokens. How far apart they are is held against what was accepted for the same tokens. Weights
that differ by more than rounding fail and are never accepted by an update; of dumps, modules are
compared too, and the first that is beyond its accepted error is named.
"""


def test_engines(engine_gate, engine_part):
    engine_gate.part(engine_part)
