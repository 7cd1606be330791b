"""Modes of the experts of a mixture, asked for by name: `--mode 'experts-*'` means all of them.

Attention and the router stay as they are, as engines serve them, unless the mode says otherwise.
Each expert is quantized by itself, of fused weights too: no block and no scale spans two experts.
"""

from __future__ import annotations

from qgate.modes.mode import Mode, Per, Rule

_EXPERTS, _ROUTER = r"\.experts\.\d+\.\w+", r"\.(router|gate)"


def _mode(
    name: str,
    fmt: str,
    about: str,
    ports: str = "input|weight",
    per: Per = "format",
    *,
    group: int = 128,
    router: bool = False,
    causal: bool = True,
) -> Mode:
    rules = [Rule(f"{_EXPERTS}:({ports})$", fmt, per=per, group=group)]
    if router:
        rules.append(Rule(f"{_ROUTER}:({ports})$", fmt, per=per, group=group))
    return Mode(
        f"experts-{name}", about, fits="other", rules=tuple(rules), causal=causal, by_name=True
    )


EXPERT_MODES = (
    _mode("mxfp4-weights", "mxfp4_e2m1", "MXFP4 weights of experts alone, as GPT-OSS", "weight"),
    _mode(
        "int4-weights",
        "int4",
        "INT4 weights of experts alone, a scale per 64 features",
        "weight",
        "group",
        group=64,
    ),
    _mode("mxfp4", "mxfp4_e2m1", "MXFP4 weights and inputs of experts"),
    _mode("mxfp8", "mxfp8_e4m3", "MXFP8 (E4M3) weights and inputs of experts"),
    _mode("nvfp4", "nvfp4", "NVFP4 experts, each with tensor scales of its own", causal=False),
    _mode(
        "fp8", "fp8_e4m3", "FP8 (E4M3) experts, a scale per output channel and per token", per="row"
    ),
    _mode("int8", "int8", "INT8 experts, a scale per output channel and per token", per="row"),
    Mode(
        "experts-fp8-static",
        "FP8 (E4M3) experts, each with a static input scale of its own, from calibration",
        fits="other",
        rules=(
            Rule(f"{_EXPERTS}:input$", "fp8_e4m3", per="static"),
            Rule(f"{_EXPERTS}:weight$", "fp8_e4m3", per="row"),
        ),
        by_name=True,
    ),
    _mode(
        "fp8-router",
        "fp8_e4m3",
        "as experts-fp8, and the router in FP8 too",
        per="row",
        router=True,
    ),
    _mode(
        "mxfp4-router", "mxfp4_e2m1", "as experts-mxfp4, and the router in MXFP4 too", router=True
    ),
)
