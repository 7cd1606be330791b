"""Compare the probabilities that two engines give to the same tokens, and their weights.

It needs `--engines A B`: dumps, files of logits, or log-probabilities that servers print; B drew
the tokens. Their differences may not exceed those that were accepted for the same tokens. Weights
that differ by more than rounding fail, and no update accepts them. Of dumps it also compares
modules, and names the first whose error is above the accepted one.

`--engines TRAINER PROBE` holds the weights of an engine after a sync, and `--engines-steps DIR` the
steps of a run, as `qgate engines` does; these need no baseline.
"""


def test_engines(engine_gate, engine_part):
    engine_gate.part(engine_part)
