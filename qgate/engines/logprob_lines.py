"""Read JSON lines of log-probabilities as vLLM, SGLang and OpenAI's interface print them.

One line is one request. Token texts are no ids, since two tokens may have one text: a line without
ids is refused with the setting that brings them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from qgate.engines.scored import MISSING, EngineRun, ScoredSample
from qgate.errors import QgateError, first_line
from qgate.storage.foreign import read_foreign_text
from qgate.storage.locations import user_location
from qgate.text import shortened

ENDINGS = (".jsonl", ".json", ".ndjson")
TOKEN_ID = "token_id:"
LARGEST = 1 << 31
LAYOUTS = (
    "{tokens, logprobs}; vLLM's {prompt_token_ids, prompt_logprobs, outputs}; SGLang's {meta_info: "
    "{input_token_logprobs, output_token_logprobs}}; or choices of OpenAI's interface"
)


class Scores:
    """Tokens of one request with their log-probabilities, put together part by part."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.best: list[int] = []

    def add(self, token: object, logprob: object, best: object = MISSING) -> None:
        """Add one token; a log-probability of None stands for one that was not given."""
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < LARGEST:
            raise ValueError(f"token {token!r} is no token id")
        if logprob is None:
            value = math.nan
        elif isinstance(logprob, bool) or not isinstance(logprob, int | float):
            raise ValueError(f"the log-probability of token {token} is {logprob!r}")
        else:
            value = float(logprob)
        if value > 1e-3:
            raise ValueError(f"the log-probability of token {token} is {value}, above 0")
        self.ids.append(token)
        self.logprobs.append(value)
        self.best.append(best if isinstance(best, int) and 0 <= best < LARGEST else MISSING)

    def sample(self, name: str) -> ScoredSample:
        return ScoredSample(
            name,
            np.array(self.ids, np.int64),
            np.array(self.logprobs, np.float64),
            np.array(self.best, np.int64),
        )


def read_logprob_lines(spec: str) -> EngineRun:
    """Read one sample per line and choice; an error names the line."""
    location = user_location(spec)
    try:
        text = read_foreign_text(location, "log-probabilities")
    except UnicodeDecodeError:
        raise QgateError(f"{spec!r} is no text in UTF-8, so it has no JSON lines.") from None
    except OSError as error:
        raise QgateError(f"{spec!r} cannot be read: {error.strerror or error}.") from None
    samples: list[ScoredSample] = []
    for number, line in _lines(spec, text):
        try:
            samples += _samples(line)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
            raise QgateError(f"{spec!r}, line {number}: {_reason(error)}.") from None
    names = [sample.name for sample in samples]
    if "" in names or len(set(names)) < len(names):
        samples = [replace(sample, name=str(i)) for i, sample in enumerate(samples)]
    return EngineRun(spec, tuple(samples))


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing"
    return shortened(first_line(error), 300)


def _lines(spec: str, text: str) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Parse lines; a file that is one JSON array has one request per entry."""
    if text.lstrip().startswith("["):
        entries = _parsed(spec, 1, text)
        numbered = list(enumerate(entries if isinstance(entries, list) else [entries], 1))
    else:
        lines = enumerate(text.splitlines(), 1)
        numbered = [(number, _parsed(spec, number, line)) for number, line in lines if line.strip()]
    for number, entry in numbered:
        if not isinstance(entry, dict):
            raise QgateError(f"{spec!r}, line {number}: {shortened(str(entry), 60)} is no object.")
        yield number, entry


def _parsed(spec: str, number: int, line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise QgateError(f"{spec!r}, line {number} is no JSON: {first_line(error)}.") from None


def _samples(line: Mapping[str, object]) -> Iterator[ScoredSample]:
    name = str(line.get("id", line.get("request_id", "")))
    if "meta_info" in line:
        yield _sglang(line)
    elif "outputs" in line or "prompt_logprobs" in line:
        yield from _vllm(line, name)
    elif "choices" in line:
        choices = _list(line["choices"])
        for number, choice in enumerate(choices):
            suffix = f"/{number}" if len(choices) > 1 else ""
            yield _choice(_mapping(choice), name and name + suffix)
    elif "logprobs" in line:
        yield _plain(line, name)
    else:
        raise ValueError(f"it has {', '.join(list(line)[:8])}; what can be read is {LAYOUTS}")


def _plain(line: Mapping[str, object], name: str) -> ScoredSample:
    ids = next((line[key] for key in ("tokens", "token_ids", "input_ids") if key in line), None)
    if ids is None:
        raise ValueError("it has logprobs without tokens: token ids are needed")
    scores = Scores()
    for token, logprob in _paired(_list(ids), _list(line["logprobs"])):
        scores.add(token, logprob)
    return scores.sample(name)


def _paired(
    tokens: Sequence[object], logprobs: Sequence[object]
) -> Iterable[tuple[object, object]]:
    if len(tokens) != len(logprobs):
        raise ValueError(f"it has {len(tokens)} tokens and {len(logprobs)} log-probabilities")
    return zip(tokens, logprobs, strict=True)


def _sglang(line: Mapping[str, object]) -> ScoredSample:
    """Read entries [log-probability, token id, text]."""
    facts = _mapping(line["meta_info"])
    scores = Scores()
    for part in ("input", "output"):
        entries = _list(facts.get(f"{part}_token_logprobs"))
        tops = _list(facts.get(f"{part}_top_logprobs")) or [None] * len(entries)
        for entry, top in zip(entries, tops, strict=False):
            logprob, token = _list(entry)[:2]
            best = _list(_list(top)[0])[1] if top else MISSING
            scores.add(token, logprob, best)
    if not scores.ids:
        raise ValueError("meta_info has no token log-probabilities; ask for return_logprob")
    return scores.sample(str(facts.get("id", "")))


def _vllm(line: Mapping[str, object], name: str) -> Iterator[ScoredSample]:
    """Read tables from token id to {logprob, rank} for the prompt and for each output."""
    outputs = [_mapping(output) for output in _list(line.get("outputs"))] or [{}]
    for number, output in enumerate(outputs):
        scores = Scores()
        _add_tables(scores, line.get("prompt_token_ids"), line.get("prompt_logprobs"))
        _add_tables(scores, output.get("token_ids"), output.get("logprobs"))
        if not scores.ids:
            raise ValueError("it has no token ids with log-probabilities; ask for logprobs=0")
        suffix = f"/{number}" if len(outputs) > 1 else ""
        yield scores.sample(name and name + suffix)


def _add_tables(scores: Scores, ids: object, tables: object) -> None:
    if ids is None:
        if tables:
            raise ValueError("it has log-probabilities without token ids")
        return
    tokens = _list(ids)
    for token, entry in _paired(tokens, _list(tables) or [None] * len(tokens)):
        table = {int(key): _mapping(value) for key, value in _mapping(entry or {}).items()}
        own = table.get(token) if isinstance(token, int) else None
        if entry and own is None:
            raise ValueError(f"the log-probabilities of token {token!r} do not hold it")
        best = next((key for key, value in table.items() if value.get("rank") == 1), MISSING)
        scores.add(token, None if own is None else own["logprob"], best)


def _choice(choice: Mapping[str, object], name: str) -> ScoredSample:
    """Read a choice of OpenAI's interface, whose tokens are ids only where asked for."""
    scores = Scores()
    prompt = choice.get("prompt_token_ids")
    if prompt is not None or choice.get("prompt_logprobs"):
        _add_tables(scores, prompt, choice.get("prompt_logprobs"))
    logprobs = _mapping(choice.get("logprobs") or {})
    if "content" in logprobs:
        content = [_mapping(entry) for entry in _list(logprobs["content"])]
        texts: Sequence[object] = [entry["token"] for entry in content]
        values: Sequence[object] = [entry["logprob"] for entry in content]
        tops = [_list(entry.get("top_logprobs")) for entry in content]
        best = [_mapping(top[0])["token"] if top else None for top in tops]
    else:
        texts, values = _list(logprobs.get("tokens")), _list(logprobs.get("token_logprobs"))
        tables = [_mapping(top or {}) for top in _list(logprobs.get("top_logprobs"))]
        tables = tables or [{}] * len(texts)
        best = [max(table, key=lambda t: table[t], default=None) for table in tables]  # type: ignore[arg-type,return-value]
    ids = choice.get("token_ids")
    tokens = _list(ids) if ids is not None else [_token_id(text) for text in texts]
    if not tokens:
        raise ValueError("the choice has no log-probabilities; ask for logprobs=1")
    for (token, value), top in zip(_paired(tokens, values), best, strict=True):
        is_id = isinstance(top, str) and top.startswith(TOKEN_ID)
        scores.add(token, value, _token_id(top) if is_id else MISSING)
    return scores.sample(name)


def _token_id(text: object) -> int:
    if not isinstance(text, str) or not text.startswith(TOKEN_ID):
        raise ValueError(
            f"its tokens are texts such as {shortened(str(text), 40)!r}, not ids; ask the server "
            "for return_tokens_as_token_ids (vLLM) or for token_ids"
        )
    return int(text.removeprefix(TOKEN_ID))


def _list(value: object) -> Sequence[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise TypeError(f"{shortened(str(value), 60)} is no list")
    return value


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{shortened(str(value), 60)} is no object")
    return value
