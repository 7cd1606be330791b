"""Compare what a model card claims of the format with what the checkpoint has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from qgate.checkpoints.recipes import DeclaredFormat
from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.shipped.files import ShippedFiles
from qgate.text import one_line, shortened

CARD = "README.md"
CLAIMS: dict[str, tuple[str, ...]] = {
    r"w4a16|w4a8|int4|uint4|4[- ]?bit|awq": ("int4", "uint4"),
    r"w8a8(?!.?fp8)|w8a16|int8": ("int8", "uint8", "fp8_e4m3"),
    r"fp8|float8|e4m3|8[- ]?bit": ("fp8_e4m3", "fp8_e5m2", "int8", "uint8"),
    r"nvfp4|mxfp4|fp4": ("fp4_e2m1",),
    r"nf4": ("nf4",),
    r"3[- ]?bit|int3": ("int3", "uint3"),
    r"2[- ]?bit|int2": ("int2", "uint2"),
}
"""Claims in titles and tags, and the elements that they may mean."""
WIDER = {"4[- ]?bit": ("fp4_e2m1", "nf4", "bnb_fp4")}
GROUP = re.compile(r"group[ _-]?size\W{0,4}(\d+)|\bg(32|64|128)\b", re.IGNORECASE)


def card_findings(
    child: ShippedFiles, formats: Sequence[DeclaredFormat]
) -> Iterator[CheckpointFinding]:
    """Find claims of title and tags that no weight bears out, and another size of groups."""
    text = child.text(CARD)
    if not text or not formats:
        return
    elements = {declared.element for declared in formats}
    claims = list(_claims(text))
    allowed = {element for _, meant in claims for element in meant}
    if claims and not allowed & elements:
        yield CheckpointFinding(
            f"{CARD} title",
            f"it says {claims[0][0]!r} here, and the weights are "
            f"{' and '.join(sorted(map(str, set(formats))))}: correct the card, or export again",
        )
    sizes = {declared.tile[1] for declared in formats if declared.tile[1] is not None}
    stated = {int(match[1] or match[2]) for match in GROUP.finditer(text)}
    if sizes and stated and not stated & sizes:
        yield CheckpointFinding(
            f"{CARD} group size",
            f"it says {', '.join(map(str, sorted(stated)))} here, and the weights have groups of "
            f"{', '.join(map(str, sorted(sizes)))}: correct the card, or export again",
        )


def _claims(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the claims of the first heading and of the tags at the top."""
    front, body = "", text
    if text.startswith("---"):
        front, _, body = text[3:].partition("\n---")
    tags = re.search(r"^tags:\s*((?:\n\s*-.*)+|\[.*\])", front, re.MULTILINE)
    title = re.search(r"^#\s+(.*)$", body, re.MULTILINE)
    for part in (title[1] if title else "", tags[1] if tags else ""):
        for pattern, meant in CLAIMS.items():
            if match := re.search(rf"(?<![a-z0-9])({pattern})(?![a-z0-9])", part, re.IGNORECASE):
                wider = WIDER["4[- ]?bit"] if "4" in match[0] and "bit" in match[0].lower() else ()
                yield shortened(one_line(match[0])), (*meant, *wider)
