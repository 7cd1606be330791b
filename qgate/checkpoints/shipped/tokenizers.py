"""Compare the tokenizer of a checkpoint with its parent's: tokens, rules, settings, template.

Libraries write one tokenizer in several ways: a setting may be in one file or another, and a class
may have two names. So meanings are compared, not bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qgate.checkpoints.record import CheckpointFinding
from qgate.checkpoints.shipped.files import (
    ShippedFiles,
    differs,
    first_difference,
    is_missing,
    same_value,
    value_text,
)
from qgate.errors import first_line
from qgate.text import counted

FAST, CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
VOCABULARIES = (
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
    "merges.txt", "tekken.json", "qwen.tiktoken", "tiktoken.model",
)  # fmt: skip
"""Files with the tokens of tokenizers that are not `tokenizer.json`."""
TEMPLATES = ("chat_template.jinja", "chat_template.json", CONFIG)
TOKENS = (
    "bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token", "pad_token",
)  # fmt: skip
ADDED_MATTER = ("bos_token", "eos_token")
"""Tokens that change prompts or ends where the parent has none."""
SETTINGS = (
    "add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces",
    "do_lower_case", "legacy", "model_max_length", "padding_side", "truncation_side",
    "split_special_tokens", "spaces_between_special_tokens", "tokenizer_class",
)  # fmt: skip
"""Settings that change tokens; each is compared where both sides state it."""
OFF = ("add_eos_token",)
"""Settings that are off where nothing states them."""
ANY_CLASS = ("PreTrainedTokenizer", "TokenizersBackend")
"""Names of classes that stand for whatever `tokenizer.json` holds."""
LEFT_BY_CALIBRATION = {
    "truncation": "calibration left it, and prompts are cut there; turn it off before saving",
    "padding": "calibration left it; turn it off before saving",
}
SECTIONS = ("model", "normalizer", "pre_tokenizer", "post_processor", "decoder")
SAMPLES = (
    "Hello world", " two  spaces", "a b ab cd", "don't 1234567 3.14", "line\nline\n\n\ttab",
    "é ü ß 中文 🙂", "def f(x):\n    return x[0]", "ALL CAPS", "Ａ ﬁ", "", "<s>a</s> b",
)  # fmt: skip
"""Texts by which tokenizers are compared."""
TOKEN_RULES = ("id", "special", "lstrip", "rstrip", "single_word", "normalized")


def tokenizer_findings(child: ShippedFiles, parent: ShippedFiles) -> Iterator[CheckpointFinding]:
    """Find what a tokenizer does otherwise than the parent's."""
    files = (FAST, *VOCABULARIES)
    if parent.has(*files) and not child.has(*files):
        yield is_missing(FAST if parent.has(FAST) else next(filter(parent.has, VOCABULARIES)))
    elif child.has(FAST) and parent.has(FAST):
        yield from _fast_findings(child, parent)
    for name in VOCABULARIES:
        if child.has(name) and parent.has(name) and child.data(name) != parent.data(name):
            own, parents = child.document(name), parent.document(name)
            if own is None or own != parents:
                sizes = f"{len(child.data(name)):,} bytes here and {len(parent.data(name)):,}"
                cause = f"it is not the parent's file ({sizes} there): copy it from the parent"
                yield CheckpointFinding(name, cause)
    if parent.has(CONFIG) and not child.has(CONFIG):
        yield is_missing(CONFIG)
    elif parent.has(CONFIG):
        yield from _setting_findings(child, parent)
    yield from _template_findings(child, parent)


def _fast_findings(child: ShippedFiles, parent: ShippedFiles) -> Iterator[CheckpointFinding]:
    if child.data(FAST) == parent.data(FAST):
        return
    own, parents = child.settings(FAST), parent.settings(FAST)
    if not own or not parents:
        return  # A broken file is a finding of its own.
    own_model, parent_model = (section_of(side, "model") for side in (own, parents))
    yield from _id_findings(token_ids(own_model), token_ids(parent_model))
    own_merges, parent_merges = merge_texts(own_model), merge_texts(parent_model)
    if own_merges != parent_merges:
        key, one, other = first_difference(own_merges, parent_merges, "model.merges")
        if isinstance(one, list) and isinstance(other, list):
            one, other = counted(len(one), "merge"), counted(len(other), "merge")
        yield differs(FAST, key, one, other)
    yield from _added_findings(added_tokens(own), added_tokens(parents))
    yield from _rule_findings(child, parent, own, parents)


def _rule_findings(
    child: ShippedFiles,
    parent: ShippedFiles,
    own: Mapping[str, object],
    parents: Mapping[str, object],
) -> Iterator[CheckpointFinding]:
    """Compare how texts are cut into tokens: by rules, and where these differ, by sample texts.

    Versions of libraries write rules of one meaning in several ways.
    """
    for key in LEFT_BY_CALIBRATION:
        if own.get(key) != parents.get(key):
            difference = first_difference(own.get(key), parents.get(key), key)
            yield differs(FAST, *difference, LEFT_BY_CALIBRATION[key])
    one, other = (
        {key: section for key in SECTIONS if (section := _without_tokens(side.get(key)))}
        for side in (own, parents)
    )
    if one == other:
        return
    texts = [files.text(FAST) for files in (child, parent)]
    words = first_unlike(*texts)
    if words is None:
        yield differs(
            FAST, *first_difference(one, other), "copy the parent's, or install `tokenizers`, "
            "with which qgate compares tokens"
        )  # fmt: skip
    elif words:
        difference = first_difference(one, other)
        yield differs(FAST, *difference, f"{words}; copy it from the parent's {FAST}")


def _without_tokens(section: object) -> object:
    if not isinstance(section, Mapping):
        return section
    return {key: value for key, value in section.items() if key not in ("vocab", "merges")}


def first_unlike(own: str, parents: str) -> str | None:
    """Say which sample text two tokenizers cut otherwise; None where the library is missing."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    sides = []
    for text in (own, parents):
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # The library raises nothing narrower.
            return f"it cannot be loaded ({first_line(error)})"
        tokenizer.no_truncation()
        tokenizer.no_padding()
        sides.append(tokenizer)
    for sample in SAMPLES:
        ids = [side.encode(sample).ids for side in sides]
        if ids[0] != ids[1]:
            return f"{sample!r} has the tokens {ids[0][:8]} here and {ids[1][:8]} in the parent"
        if sides[0].decode(ids[0]) != sides[1].decode(ids[0]):
            return f"the tokens {ids[0][:8]} mean other texts"
    return ""


def section_of(settings: Mapping[str, object], key: str) -> Mapping[str, object]:
    part = settings.get(key)
    return part if isinstance(part, Mapping) else {}


def token_ids(model: Mapping[str, object]) -> dict[str, object]:
    """Return the tokens of a model with their ids, or for lists their ids and scores."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, Mapping):
        return dict(vocabulary)
    if not isinstance(vocabulary, list):
        return {}
    pairs = [entry for entry in vocabulary if isinstance(entry, list) and len(entry) == 2]
    return {str(entry[0]): (number, entry[1]) for number, entry in enumerate(pairs)}


def _id_findings(
    own: Mapping[str, object], parents: Mapping[str, object]
) -> Iterator[CheckpointFinding]:
    for words, tokens in (
        ("missing here", [token for token in parents if token not in own]),
        ("not in the parent's", [token for token in own if token not in parents]),
    ):
        if tokens:
            count = (
                f"{len(tokens):,} of {len(parents):,} tokens {'is' if len(tokens) == 1 else 'are'}"
            )
            cause = f"{count} {words}, first {value_text(tokens[0])}: copy the parent's {FAST}"
            yield CheckpointFinding(f"{FAST} model.vocab", cause)
    moved = [token for token in parents if token in own and own[token] != parents[token]]
    if moved:
        first = moved[0]
        cause = (
            f"{len(moved):,} of {len(parents):,} tokens have other ids, first {value_text(first)}: "
            f"{own[first]} here and {parents[first]} in the parent; copy the parent's {FAST}"
        )
        yield CheckpointFinding(f"{FAST} model.vocab", cause)


def merge_texts(model: Mapping[str, object]) -> list[str]:
    """Return merges as texts; some versions write pairs."""
    merges = model.get("merges")
    listed = merges if isinstance(merges, list) else []
    return [
        " ".join(map(str, merge)) if isinstance(merge, list) else str(merge) for merge in listed
    ]


def added_tokens(settings: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    tokens = settings.get("added_tokens")
    listed = tokens if isinstance(tokens, list) else []
    return {str(t.get("content")): t for t in listed if isinstance(t, Mapping)}


def _added_findings(
    own: Mapping[str, Mapping[str, object]], parents: Mapping[str, Mapping[str, object]]
) -> Iterator[CheckpointFinding]:
    for token in dict.fromkeys([*parents, *own]):
        one, other = (
            {key: side[token].get(key) for key in TOKEN_RULES} if token in side else None
            for side in (own, parents)
        )
        if one != other:
            yield differs(FAST, *first_difference(one, other, f"added_tokens {token!r}"))


# Settings and templates ---------------------------------------------------------------------------


def _setting_findings(child: ShippedFiles, parent: ShippedFiles) -> Iterator[CheckpointFinding]:
    own, parents = child.settings(CONFIG), parent.settings(CONFIG)
    for key in SETTINGS:
        is_stated = key in own and key in parents
        if not is_stated and not (key in OFF and own.get(key) and not parents.get(key)):
            continue
        one, other = own[key], parents.get(key)
        if key == "tokenizer_class" and _same_class(str(one), str(other)):
            continue
        if not same_value(one, other):
            yield differs(CONFIG, key, one, other)
    for key in TOKENS:
        one, other = special_token(child, key), special_token(parent, key)
        # Classes and calibration add tokens that a model without them does not need.
        if one != other and not (other is None and key not in ADDED_MATTER):
            yield differs(CONFIG, key, one, other)
        # Some loaders read this file first, where it is there.
        repeated, parents_repeated = _stated(child, SPECIAL, key), _stated(parent, SPECIAL, key)
        if repeated not in (None, one, parents_repeated):
            words = f"it is {value_text(repeated)} here and {value_text(one)} in {CONFIG}"
            yield CheckpointFinding(f"{SPECIAL} {key}", f"{words}: copy it from the parent")
    yield from _decoder_findings(child)
    own_extra, parent_extra = _extra_tokens(child), _extra_tokens(parent)
    if parent_extra - own_extra:
        yield differs(CONFIG, "extra_special_tokens", sorted(own_extra), sorted(parent_extra))


def _decoder_findings(child: ShippedFiles) -> Iterator[CheckpointFinding]:
    """Find added tokens whose ids two files of the tokenizer give to other texts."""
    texts = {rules.get("id"): text for text, rules in added_tokens(child.settings(FAST)).items()}
    for number, rules in section_of(child.settings(CONFIG), "added_tokens_decoder").items():
        token = rules.get("content") if isinstance(rules, Mapping) else None
        text = texts.get(int(number)) if number.isdecimal() else None
        if token is not None and text is not None and token != text:
            words = f"it is {value_text(token)} here and {value_text(text)} in {FAST}"
            where = f"{CONFIG} added_tokens_decoder.{number}"
            yield CheckpointFinding(where, f"{words}: copy both from the parent")


def _same_class(one: str, other: str) -> bool:
    names = {one.removesuffix("Fast"), other.removesuffix("Fast")}
    return len(names) == 1 or bool(names & set(ANY_CLASS))


def special_token(files: ShippedFiles, key: str) -> str | None:
    """Return a special token, which is a text, or a record with one, in one of two files."""
    own = _stated(files, CONFIG, key)
    return _stated(files, SPECIAL, key) if own is None else own


def _stated(files: ShippedFiles, name: str, key: str) -> str | None:
    value = files.settings(name).get(key)
    value = value.get("content") if isinstance(value, Mapping) else value
    return None if value is None else str(value)


def _extra_tokens(files: ShippedFiles) -> set[str]:
    """Return the special tokens without a role, and those that `tokenizer.json` has."""
    tokens = {
        token for token, rules in added_tokens(files.settings(FAST)).items() if rules.get("special")
    }
    for name in (CONFIG, SPECIAL):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = files.settings(name).get(key)
            listed = list(listed.values()) if isinstance(listed, Mapping) else listed
            for token in listed if isinstance(listed, list) else []:
                tokens.add(str(token.get("content") if isinstance(token, Mapping) else token))
    return tokens


def _template_findings(child: ShippedFiles, parent: ShippedFiles) -> Iterator[CheckpointFinding]:
    (first, own), (file, parents) = templates_of(child), templates_of(parent)
    for name, template in parents.items():
        key = f"chat_template {name}".rstrip()
        if name not in own:
            yield CheckpointFinding(
                f"{file} {key}" if file == CONFIG else file,
                f"the chat template is missing here, and the parent has it: copy it from {file}",
            )
        elif own[name] != template:
            lines = [text.splitlines() for text in (own[name], template)]
            length = max(map(len, lines))
            padded = [[*side, *[None] * (length - len(side))] for side in lines]
            number = next(n for n in range(length) if padded[0][n] != padded[1][n])
            yield differs(file, f"{key} line {number + 1}", padded[0][number], padded[1][number])

    for other in TEMPLATES:
        templates = _templates_in(child, other)
        differing = [name for name, text in templates.items() if own.get(name, text) != text]
        if differing and templates != _templates_in(parent, other):
            words = f"it is another one than that of {first}, which not all loaders read"
            yield CheckpointFinding(f"{other} chat_template", f"{words}: remove it")


def templates_of(files: ShippedFiles) -> tuple[str, dict[str, str]]:
    """Return the chat templates by name, and the file of the first that there is."""
    sources = ((name, _templates_in(files, name)) for name in TEMPLATES)
    return next((source for source in sources if source[1]), (TEMPLATES[0], {}))


def _templates_in(files: ShippedFiles, name: str) -> dict[str, str]:
    value: object = None
    if name.endswith(".jinja"):
        value = files.text(name) or None
    else:
        value = files.settings(name).get("chat_template")
    named = value if isinstance(value, list) else [{"name": "", "template": value}]
    return {
        str(entry.get("name")).replace("default", ""): str(entry["template"]).removesuffix("\n")
        for entry in named
        if isinstance(entry, Mapping) and isinstance(entry.get("template"), str)
    }
