"""Two engines in small: random logits of random tokens, written as each kind of file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from qgate.engines.scored import ScoredSample
from qgate.engines.scored import scored as sample_of

SAMPLES, TOKENS, VOCABULARY = 6, 40, 50


@dataclass(frozen=True)
class Scored:
    """Token ids (samples, tokens) and logits that predict the token after each."""

    ids: Tensor
    logits: Tensor

    @property
    def logprobs(self) -> Tensor:
        """Of each token given those before it; of the first there is none."""
        logs = torch.log_softmax(self.logits.double(), -1)
        own = logs[:, :-1].gather(-1, self.ids[:, 1:, None])[..., 0]
        return torch.cat([own.new_full((len(own), 1), torch.nan), own], 1)

    @property
    def best(self) -> Tensor:
        """The most likely token at each position but the first."""
        return self.logits[:, :-1].argmax(-1)


def scored(seed: int = 0, samples: int = SAMPLES, tokens: int = TOKENS) -> Scored:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (samples, tokens), generator=draw)
    return Scored(ids, 2 * torch.randn(samples, tokens, VOCABULARY, generator=draw))


def samples_of(run: Scored) -> list[ScoredSample]:
    """Return samples whose logits are read in parts."""
    return [
        sample_of(str(i), ids.numpy(), None, lambda a, b, i=i: run.logits[i, a - 1 : b - 1])  # type: ignore[misc]
        for i, ids in enumerate(run.ids)
    ]


def moved(run: Scored, size: float = 1e-2, seed: int = 1) -> Scored:
    """The same tokens as another engine scores them."""
    draw = torch.Generator().manual_seed(seed)
    return Scored(run.ids, run.logits + size * torch.randn(run.logits.shape, generator=draw))


def write_npz(path: Path, run: Scored) -> Path:
    np.savez(path, tokens=run.ids.numpy(), logits=run.logits.numpy())
    return path


def write_safetensors(path: Path, run: Scored) -> Path:
    save_file({"input_ids": run.ids, "logits": run.logits}, path)
    return path


def write_torch(path: Path, run: Scored) -> Path:
    torch.save({"token_ids": run.ids, "logits": run.logits}, path)
    return path


def write_ragged(path: Path, run: Scored) -> Path:
    """Write samples of their own, the vocabulary's rows for all tokens but the last."""
    tensors = {}
    for index in range(len(run.ids)):
        tensors[f"tokens.{index}"] = run.ids[index].clone()
        tensors[f"logits.{index}"] = run.logits[index, :-1].clone()
    save_file(tensors, path)
    return path


def _plain(run: Scored, index: int) -> dict[str, object]:
    logprobs = [None, *run.logprobs[index, 1:].tolist()]
    return {"id": f"r{index}", "tokens": run.ids[index].tolist(), "logprobs": logprobs}


def _vllm(run: Scored, index: int) -> dict[str, object]:
    """The first half is the prompt; tables hold the token and the most likely one."""
    ids, half = run.ids[index].tolist(), TOKENS // 2
    logs = torch.log_softmax(run.logits[index].double(), -1)
    tables: list[dict[str, object] | None] = [None]
    for position in range(1, len(ids)):
        row = logs[position - 1]
        best = int(row.argmax())
        order = row.argsort(descending=True).tolist()
        entries = {ids[position], best}
        tables.append(
            {
                str(token): {
                    "logprob": float(row[token]),
                    "rank": order.index(token) + 1,
                    "decoded_token": "x",
                }
                for token in entries
            }
        )
    return {
        "request_id": f"r{index}",
        "prompt_token_ids": ids[:half],
        "prompt_logprobs": tables[:half],
        "outputs": [{"index": 0, "token_ids": ids[half:], "logprobs": tables[half:]}],
    }


def _sglang(run: Scored, index: int) -> dict[str, object]:
    ids, half = run.ids[index].tolist(), TOKENS // 2
    logprobs = [None, *run.logprobs[index, 1:].tolist()]
    entries = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
    best = [None, *([[0.0, int(token), None]] for token in run.best[index])]
    facts = {
        "id": f"r{index}",
        "input_token_logprobs": entries[:half],
        "output_token_logprobs": entries[half:],
        "input_top_logprobs": best[:half],
        "output_top_logprobs": best[half:],
    }
    return {"text": "…", "meta_info": facts}


def _completion(run: Scored, index: int) -> dict[str, object]:
    """A completion of OpenAI's interface; the first token has no log-probability there."""
    ids = run.ids[index].tolist()
    logprobs = [None, *run.logprobs[index, 1:].tolist()]
    tops = [None, *({f"token_id:{int(token)}": 0.0} for token in run.best[index])]
    parts = {
        "tokens": [f"token_id:{token}" for token in ids],
        "token_logprobs": logprobs,
        "top_logprobs": tops,
    }
    return {"id": f"r{index}", "choices": [{"index": 0, "text": "…", "logprobs": parts}]}


def _chat(run: Scored, index: int) -> dict[str, object]:
    ids = run.ids[index].tolist()
    content = [{"token": f"token_id:{ids[0]}", "logprob": 0.0, "top_logprobs": []}]
    for token, value, best in zip(
        ids[1:], run.logprobs[index, 1:].tolist(), run.best[index].tolist(), strict=True
    ):
        top = [{"token": f"token_id:{best}", "logprob": 0.0}]
        content.append({"token": f"token_id:{token}", "logprob": value, "top_logprobs": top})
    return {"id": f"r{index}", "choices": [{"index": 0, "logprobs": {"content": content}}]}


LINES = {
    "plain": _plain,
    "vllm": _vllm,
    "sglang": _sglang,
    "completion": _completion,
    "chat": _chat,
}


def write_lines(path: Path, run: Scored, kind: str = "plain") -> Path:
    lines = [json.dumps(LINES[kind](run, index)) for index in range(len(run.ids))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
