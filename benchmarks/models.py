"""The forward pass of tiny-mamba in FP32 and in a mode, in turn with transformers' PyTorch Mamba.

    python benchmarks/models.py [--rounds 7] [--batch 8] [--tokens 512] [--threads N] [--device cpu]

transformers runs the same weights, with each of the scans that its config offers and that need
nothing but PyTorch; outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

import _turns
import torch
from tabulate import tabulate
from torch import nn

from qgate import models, modes


def peer(model: models.Model, associative: bool) -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    config = model.module.config
    theirs = MambaForCausalLM(
        MambaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layer,
            state_size=config.d_state,
            conv_kernel=config.d_conv,
            time_step_rank=config.dt_rank,
            use_cache=False,
            use_associative_scan=associative,
        )
    )
    theirs.load_state_dict(model.module.state_dict())
    return theirs.to(model.device).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--modes", default="2-1,0,2-4,3,6-1,fp16,mxfp8,int8")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    sampling = models.Sampling(samples=args.batch, seqlen=args.tokens, calib_samples=8)
    model = models.load("tiny-mamba", device=args.device, sampling=sampling)
    ids = torch.cat(list(model.inputs)).to(model.device)
    scales = modes.measure(model, modes.CalibrationSettings())
    rotated = model.in_basis("rotated")
    candidates: dict[str, Callable[[], object]] = {
        "fp32": lambda: model.module(ids),
        "fp32 rotated": lambda: rotated.module(ids),
    }
    for mode in modes.select(args.modes, "mamba"):
        quantized = modes.apply(mode, model, scales).model
        candidates[mode.name] = lambda quantized=quantized: quantized.module(ids)
    peers = {
        f"transformers, {'associative' if on else 'loop'}": peer(model, on) for on in (False, True)
    }
    with torch.no_grad():
        for name, theirs in list(peers.items()):
            try:
                apart = (theirs(ids).logits - model.module(ids)).abs().max().item()
            except Exception as error:  # a scan that this build of torch cannot run is no peer
                print(f"{name} does not run here: {type(error).__name__}")
                continue
            assert apart < 1e-3, (name, apart)
            candidates[name] = lambda theirs=theirs: theirs(ids)
        times = _turns.seconds(candidates, args.rounds)
    fastest = min(
        (name for name in times if name.startswith("transformers")),
        key=lambda name: statistics.median(times[name]),
    )
    rows = [
        [
            name,
            f"{statistics.median(spent) * 1e3:.0f}",
            f"{_turns.median_ratio(spent, times['fp32']):.2f}",
            f"{_turns.median_ratio(spent, times[fastest]):.2f}",
        ]
        for name, spent in times.items()
    ]
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, {args.threads} threads, "
        f"{args.device}; {args.batch} x {args.tokens} tokens"
    )
    print(tabulate(rows, headers=["", "ms", "/ fp32", f"/ {fastest}"], disable_numparse=True))


if __name__ == "__main__":
    main()
