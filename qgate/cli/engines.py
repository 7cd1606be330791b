"""Compare two engines that scored the same tokens, as a trainer and a rollout engine do.

  qgate engines A B                          per-token differences, KL, flips, and where they begin
  qgate engines A B --max-kl 1e-3 --same-weights --weights CKPT_A CKPT_B

A and B are dumps of `qgate.collect` with the embedding and the head among their sites; .npz,
.safetensors or .pt files of token ids with logits or log-probabilities; or JSON lines as vLLM,
SGLang and servers of OpenAI's interface print them. B is the engine that drew the tokens.
Exit status: 0 if both were compared, 1 if they are beyond a limit given, 2 if files cannot be read
or are not of the same tokens.
"""

from __future__ import annotations

import argparse
import json

from qgate.cli._progress import progress
from qgate.cli._workers import from_one


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("actual", metavar="A", help="the engine to look at")
    add("reference", metavar="B", help="the engine that drew the tokens")
    add("--weights", nargs=2, metavar=("CKPT_A", "CKPT_B"),
        help="the checkpoints that they loaded, to tell whether these are the same")  # fmt: skip
    add("--same-weights", action="store_true", help="fail if weights differ by more than rounding")
    add("--max-kl", type=_from_zero, metavar="NATS", help="fail above this mean KL per token")
    add("--max-logprob", type=_from_zero, metavar="D",
        help="fail if a log-probability differs by more")  # fmt: skip
    add("--max-flips", type=_from_zero, metavar="SHARE",
        help="fail above this share of other most likely tokens, from 0 to 1")  # fmt: skip
    add("--logits", default="", metavar="MODULE", help="the module of dumps that gives logits")
    add("--json", action="store_true", help="print all figures as JSON")
    add("--limit", type=from_one, default=10, metavar="N", help="tokens and weights to list (10)")


def _from_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0")
    return number


def run(args: argparse.Namespace) -> int:
    from qgate.engines.comparison import compare_engines
    from qgate.engines.findings import EngineLimits
    from qgate.engines.texts import result_lines

    limits = EngineLimits(args.max_kl, args.max_logprob, args.max_flips, args.same_weights)
    weights = None if args.weights is None else (args.weights[0], args.weights[1])
    with progress("samples") as report:
        record = compare_engines(
            args.actual, args.reference, head=args.logits, weights=weights, limits=limits,
            progress=report,
        )  # fmt: skip
    if args.json:
        print(json.dumps(record.to_dict(), indent=1))
    else:
        print("\n".join(result_lines(record, args.limit)))
    return int(bool(record.beyond))
