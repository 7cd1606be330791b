"""Find claims of a model card that no weight bears out: title, head in YAML, and prose.

A sentence counts only if it is about the weights of this checkpoint: what a card compares with,
and what it says of activations and of a cache, are no claims.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from qgate.checkpoints.recipes import DeclaredFormat
from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.shipped.files import ShippedFiles
from qgate.text import one_line, shortened

CARD = "README.md"
INT4, INT8 = ("int4", "uint4"), ("int8", "uint8")
FP8 = ("fp8_e4m3", "fp8_e5m2")
CLAIMS: dict[str, tuple[str, ...]] = {
    r"w4a16|w4a8|u?int4|awq": INT4,
    r"4[- ]?bits?": (*INT4, "fp4_e2m1", "nf4", "bnb_fp4"),
    r"u?int8": INT8,
    r"w8a8(?!.?fp8)|w8a16|8[- ]?bits?": (*INT8, *FP8),
    r"fp8|float8|mxfp8|e4m3": FP8,
    r"nvfp4": ("fp4_e2m1 per 16",),
    r"mxfp4": ("fp4_e2m1 per 32",),
    r"fp4": ("fp4_e2m1", "bnb_fp4"),
    r"nf4": ("nf4",),
    r"3[- ]?bits?|u?int3": ("int3", "uint3"),
    r"2[- ]?bits?|u?int2": ("int2", "uint2"),
}
"""Claims, and the elements or formats that they may mean."""
GROUP = re.compile(r"group[ _-]?size\W{0,4}(\d+)|\bg(32|64|128)\b", re.IGNORECASE)
TAGS = re.compile(r"^tags:\s*((?:\n\s*-.*)+|\[.*\])", re.MULTILINE)
TITLE = re.compile(r"^#\s+(.*)$", re.MULTILINE)
STATED = re.compile(
    r"^[ \t-]*(quantization|quantized|quant_\w+|quantization_\w+|precision|weight_\w+|weights|"
    r"model_name):[ \t]+(\S.*)$",
    re.MULTILINE | re.IGNORECASE,
)
"""Entries of the head that are about weights."""
BITS = re.compile(r"^[ \t-]*((?:w_|num_|weight_)?bits?):[ \t]+(\d+)[ \t]*$", re.MULTILINE)
ABOUT = re.compile(
    r"\bthis is an?\b.*\b(quantized|version|model|checkpoint)\b|"
    r"\b(this|the) (\w+ )?(model|checkpoint|repository|export)\b.*\bquantized\b|"
    r"\bweights (are|were|have been|is|in)\b|\bweights\b.*\bquantized\b",
    re.IGNORECASE,
)
"""Sentences about the weights of this checkpoint."""
OTHERS = re.compile(
    r"\b(unlike|compar\w+|than|instead|not|no|never|without|other|another|also|see|original|base|"
    r"parent|trained|training|activations?|inputs?|kv|cache|gradients?|if|would|can|could|may|might|"
    r"similar|versus|vs|from|before|previous|older|earlier|later|planned|available|recommend\w*)\b|"
    r"n't\b|\?",
    re.IGNORECASE,
)
"""Words of sentences that are, or may be, about something else."""
NO_PROSE = re.compile(r"^(```|~~~).*?^\1|^[ \t]*[|>#][^\n]*|^(?: {4}|\t)[^\n]*|<[^>]*>|`[^`\n]*`",
                      re.MULTILINE | re.DOTALL)  # fmt: skip
LINKS = re.compile(r"!?\[[^\]]*\]\([^)]*\)|https?://\S+")
SENTENCES = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*[-*+] |\n\s*\d+\. ")


def card_findings(
    child: ShippedFiles, formats: Sequence[DeclaredFormat]
) -> Iterator[CheckpointFinding]:
    """Find claims that no weight bears out, and another size of groups."""
    text = child.text(CARD)
    if not text or not formats:
        return
    borne_out = {name for declared in formats for name in (declared.element, str(declared))}
    stored = " and ".join(sorted(map(str, set(formats))))
    for part, content in _parts(text):
        claims = list(_claims(content))
        if claims and not any(set(meant) & borne_out for _, meant in claims):
            yield CheckpointFinding(
                f"{CARD} {part}",
                f"it says {claims[0][0]!r} here, and the weights are {stored}: correct the card, "
                "or export again",
            )
    sizes = {declared.tile[1] for declared in formats if declared.tile[1] is not None}
    stated = {int(match[1] or match[2]) for match in GROUP.finditer(text)}
    if sizes and stated and not stated & sizes:
        yield CheckpointFinding(
            f"{CARD} group size",
            f"it says {', '.join(map(str, sorted(stated)))} here, and the weights have groups of "
            f"{', '.join(map(str, sorted(sizes)))}: correct the card, or export again",
        )


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """Yield the parts of a card that make claims, with what they are called."""
    front, body = "", text
    if text.startswith("---"):
        front, _, body = text[3:].partition("\n---")
    if title := TITLE.search(body):
        yield "title", title[1]
    if tags := TAGS.search(front):
        yield "tags", tags[1]
    for entry in STATED.finditer(front):
        yield one_line(entry[1]), entry[2]
    for entry in BITS.finditer(front):
        yield one_line(entry[1]), f"{entry[2]}-bit"
    for sentence in SENTENCES.split(LINKS.sub(" ", NO_PROSE.sub("", body))):
        if ABOUT.search(sentence) and not OTHERS.search(sentence):
            yield "text", sentence


def _claims(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for pattern, meant in CLAIMS.items():
        if match := re.search(rf"(?<![a-z0-9])({pattern})(?![a-z0-9])", text, re.IGNORECASE):
            yield shortened(one_line(match[0])), meant
