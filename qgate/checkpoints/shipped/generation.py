"""Compare how a checkpoint generates and ends texts with its parent: defaults and ids of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.shipped.files import ShippedFiles, differs, is_missing

GENERATION, CONFIG = "generation_config.json", "config.json"
DEFAULTS: Mapping[str, object] = {
    "do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": None,
    "typical_p": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "num_beams": 1,
    "max_length": 20, "min_length": 0, "early_stopping": False, "use_cache": True,
    "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_return_sequences": 1,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "diversity_penalty": 0.0,
    "remove_invalid_values": False,
}  # fmt: skip
"""Values of settings that some versions write and others leave out."""
IDS = ("bos_token_id", "eos_token_id", "decoder_start_token_id")


def generation_findings(child: ShippedFiles, parent: ShippedFiles) -> Iterator[CheckpointFinding]:
    """Find defaults of generation and ids of tokens that are not the parent's."""
    own, parents = child.settings(GENERATION), parent.settings(GENERATION)
    if parent.has(GENERATION) and not child.has(GENERATION):
        yield is_missing(GENERATION, "copy it; without it engines sample and stop in another way")
    elif parent.has(GENERATION):
        for key in dict.fromkeys([*parents, *own]):
            if key.startswith("_") or key in ("transformers_version", "pad_token_id"):
                continue
            one, other = (side.get(key, DEFAULTS.get(key)) for side in (own, parents))
            if _ids_of(one) != _ids_of(other):
                advice = (
                    "" if key in parents else "remove it, as the parent leaves it at its default"
                )
                yield differs(GENERATION, key, one, other, advice)
    for key in IDS:
        one, other = (side.settings(CONFIG).get(key) for side in (child, parent))
        # Ids that are added, as of the end of a turn, stop a text no later.
        if other is not None and key in child.settings(CONFIG) and _ids_of(other) - _ids_of(one):
            yield differs(CONFIG, key, one, other)


def _ids_of(value: object) -> set[object]:
    """Return ids as a set, whether one or several are stated."""
    values = value if isinstance(value, list) else [value]
    return {repr(entry) if isinstance(entry, dict | list) else entry for entry in values}
