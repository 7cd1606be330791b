"""Check that activations are as easy to quantize as when they were accepted.

For every linear layer and block it compares how large the values are, how many tokens stand out,
how far the largest channel is above the median one, and how heavy the tails are. The record belongs
to the model's name: it also holds after another training, and figures that moved too far fail.
"""

import pytest


# All are logarithms. Tuning the tiny models on other text until the loss is a fifth lower moves the
# largest channel of a tensor by 0.47 octaves, its largest value by 0.33 and its tail by 0.19; other
# samples move them by 0.37, 0.40 and 0.18. A norm whose weight is doubled moves them by 1.5 to 5.
@pytest.mark.limits(
    regression=0, atol=0.5, reason="tuning on other text moves it by up to 0.47 octaves"
)
def test_activations(activation_gate, layer):
    activation_gate.layer(layer)
