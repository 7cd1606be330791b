"""Compare the vocabulary in the head of a GGUF file with the parent's tokenizer.

Tokens of a model are compared by id as texts, and added ones without spaces at their ends, which
the converter may drop. WordPiece and other kinds, which the converter writes otherwise, are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qgate.checkpoints.gguf.recipes import CONFIGURATION
from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.shipped.files import NONE, ShippedFiles, value_text, value_texts
from qgate.checkpoints.shipped.tokenizers import (
    CONFIG,
    FAST,
    added_tokens,
    merge_texts,
    section_of,
    special_token,
    templates_of,
    token_ids,
)
from qgate.checkpoints.stored import Checkpoint

TOKENS, MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
KINDS = ("gpt2", "llama")
"""Values of `tokenizer.ggml.model` whose tokens are those of tokenizer.json."""
SPECIAL = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token",
}  # fmt: skip
NEEDED = ("bos", "eos")
FLAGS = ("add_bos_token", "add_eos_token")
STATED = ("config.json", "generation_config.json")
AGAIN = "convert it again from the parent"
_SPACE = "\u0120"
"""Stands for a space inside one half of a merge."""


def vocabulary_findings(child: Checkpoint, parent: ShippedFiles) -> Iterator[CheckpointFinding]:
    """Find tokens, merges, special ids and templates that are not the parent's."""
    stated = child.configuration.get(CONFIGURATION)
    fields = stated if isinstance(stated, Mapping) else {}
    settings = parent.settings(FAST)
    if not settings:
        return
    model, added = section_of(settings, "model"), added_tokens(settings)
    if not fields.get("tokenizer.ggml.model"):
        yield CheckpointFinding(TOKENS, f"the vocabulary is missing here: {AGAIN}")
        return
    ids = {token: entry[0] if isinstance(entry, tuple) else entry
           for token, entry in token_ids(model).items()}  # fmt: skip
    if fields["tokenizer.ggml.model"] in KINDS:
        yield from _token_findings(fields.get(TOKENS), ids, set(added))
        yield from _merge_findings(fields.get(MERGES), model)
    ids |= {token: rules.get("id") for token, rules in added.items()}
    yield from _special_findings(fields, parent, ids)
    yield from _template_findings(fields, parent)


def _token_findings(
    stored: object, ids: Mapping[str, object], added: set[str]
) -> Iterator[CheckpointFinding]:
    """Compare each token of the parent's model with the one that has its id here."""
    tokens = stored if isinstance(stored, list) else []
    unlike = [
        (number, token)
        for token, number in ids.items()
        if isinstance(number, int)
        and token not in added
        and (not 0 <= number < len(tokens) or tokens[number] != token)
    ]
    if unlike:
        number, token = min(unlike)
        own = tokens[number] if 0 <= number < len(tokens) else None
        one, other = value_texts(own, token)
        yield CheckpointFinding(
            TOKENS,
            f"{len(unlike):,} of {len(ids):,} tokens are not the parent's, first id {number}: it "
            f"is {one} here and {other} in the parent's {FAST}; {AGAIN}",
        )


def _merge_findings(stored: object, model: Mapping[str, object]) -> Iterator[CheckpointFinding]:
    if not isinstance(stored, list):
        return
    merges = model.get("merges")
    pairs = merges if isinstance(merges, list) else []
    parents = [
        " ".join(str(half).replace(" ", _SPACE) for half in pair)
        if isinstance(pair, list)
        else text
        for pair, text in zip(pairs, merge_texts(model), strict=True)
    ]
    if stored == parents:
        return
    sides = (stored, parents)
    at = next((n for n, (x, y) in enumerate(zip(*sides, strict=False)) if x != y), None)
    at = min(map(len, sides)) if at is None else at
    one, other = (value_text(side[at] if at < len(side) else None) for side in sides)
    yield CheckpointFinding(
        MERGES,
        f"{len(stored):,} merges here and {len(parents):,} in the parent's {FAST}, the first that "
        f"differs is number {at}: {one} here and {other} there; {AGAIN}",
    )


def _special_findings(
    fields: Mapping[object, object], parent: ShippedFiles, ids: Mapping[str, object]
) -> Iterator[CheckpointFinding]:
    """Compare the ids of special tokens with any that the parent's files state."""
    for name, key in SPECIAL.items():
        stated = [ids.get(str(special_token(parent, key)))]
        for file in STATED:
            value = parent.settings(file).get(f"{key}_id")
            stated += value if isinstance(value, list) else [value]
        allowed = {number for number in stated if isinstance(number, int)}
        field = f"tokenizer.ggml.{name}_token_id"
        number = fields.get(field)
        if allowed and number not in allowed and (number is not None or name in NEEDED):
            listed = " or ".join(map(str, sorted(allowed, key=str)))
            yield CheckpointFinding(
                field, f"it is {value_text(number)} here and {listed} in the parent: {AGAIN}"
            )
    for key in FLAGS:
        field, other = f"tokenizer.ggml.{key}", parent.settings(CONFIG).get(key)
        flag = fields.get(field)
        if isinstance(flag, bool) and isinstance(other, bool) and flag != other:
            words = f"it is {flag} here and {other} in the parent's {CONFIG}: {AGAIN}"
            yield CheckpointFinding(field, words)


def _template_findings(
    fields: Mapping[object, object], parent: ShippedFiles
) -> Iterator[CheckpointFinding]:
    file, templates = templates_of(parent)
    template, own = templates.get(""), fields.get("tokenizer.chat_template")
    if template is None or (isinstance(own, str) and own.strip() == template.strip()):
        return
    one, other = value_texts(own, template) if isinstance(own, str) else (NONE, file)
    yield CheckpointFinding(
        "tokenizer.chat_template", f"it is {one} here and {other} in the parent: {AGAIN}"
    )
