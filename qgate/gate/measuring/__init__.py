"""Models, dumps and activations under the gate: measured, held against what was accepted."""
