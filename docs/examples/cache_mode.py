"""Write a mode of a cache of keys and values."""

from qgate import Mode
from qgate.modes.attention.choices import AttentionChoices, TensorChoice

mode = Mode(
    "k8v4",
    "keys in INT8 per token and head, values in INT4 per 16 channels, 4 sinks",
    fits="other",
    attention=AttentionChoices(
        keys=TensorChoice("int8", "token_head"), values=TensorChoice("int4", "group", 16), sinks=4
    ),
)
