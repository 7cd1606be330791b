"""The modules that most gates of a model do without: named here once, loaded when they are needed.

A gate of one layer of a mode without caches and states needs a third of what there is to measure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qgate.loading import LateModule

if TYPE_CHECKING:
    from qgate.expected import fused_attention as fused_attention
    from qgate.gate.measuring import long_texts as long_texts
    from qgate.gate.modules import expert_rows as expert_rows
    from qgate.gate.modules import holding as holding
    from qgate.gate.segments import attention_arithmetic as attention_arithmetic
    from qgate.gate.segments import gradient_code as gradient_code
    from qgate.gate.segments import gradient_factors as gradient_factors
    from qgate.gate.segments import half_code as half_code
    from qgate.gate.segments import half_twins as half_twins
    from qgate.gate.serving import cache_rows as cache_rows
    from qgate.gate.serving import state_rows as state_rows
else:
    fused_attention = LateModule("qgate.expected.fused_attention")
    attention_arithmetic = LateModule("qgate.gate.segments.attention_arithmetic")
    cache_rows = LateModule("qgate.gate.serving.cache_rows")
    expert_rows = LateModule("qgate.gate.modules.expert_rows")
    gradient_factors = LateModule("qgate.gate.segments.gradient_factors")
    gradient_code = LateModule("qgate.gate.segments.gradient_code")
    half_code = LateModule("qgate.gate.segments.half_code")
    half_twins = LateModule("qgate.gate.segments.half_twins")
    holding = LateModule("qgate.gate.modules.holding")
    long_texts = LateModule("qgate.gate.measuring.long_texts")
    state_rows = LateModule("qgate.gate.serving.state_rows")
