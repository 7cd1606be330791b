"""What collecting costs a training step, in turn with the same step without it.

    python benchmarks/collect.py [--rounds 5] [--layers 8] [--width 512] [--tokens 512] [--batch 4]

The loop is a transformer, forward, backward and an SGD step. `plain` is the loop alone;
`statistics` and `tensors` are qgate's levels, every step collected and the dump closed; `saving` is
the plain way: each of the same tensors is cloned, gets its statistics and is given to `torch.save`
before the loop goes on. Folders are removed between rounds, outside the time taken.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

import qgate
from qgate.collecting.recorder import Recorder


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, 64)).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        context = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(context.transpose(1, 2).flatten(2))
        return x + self.fc2(gelu(self.fc1(self.norm2(x))))


class Saving:
    """The same tensors as qgate keeps, saved at once, with statistics as one writes them first."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        folder.mkdir()

    def keep(
        self, _call: object, _operation: str, _phase: str, name: str, x: Tensor, *_: object
    ) -> None:
        host = x.detach().cpu().clone()
        wide = host.float()
        told = {
            "min": wide.min().item(), "max": wide.max().item(), "mean": wide.mean().item(),
            "std": wide.std().item(), "inf": torch.isinf(wide).sum().item(),
            "nan": torch.isnan(wide).sum().item(),
        }  # fmt: skip
        path = self.folder / f"{self.count:04d}_{name}.pt"
        torch.save({"tensor": host, "tensor_info": told, "metadata": {"name": name}}, path)
        self.count += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rounds", 5), ("layers", 8), ("width", 512), ("tokens", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1, help="steps of a round, all collected")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    model = nn.Sequential(*[Layer(args.width) for _ in range(args.layers)]).to(args.device, dtype)
    x = torch.randn(args.batch, args.tokens, args.width, device=args.device, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def loop() -> None:
        for _ in range(args.steps):
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()
        if args.device != "cpu":
            torch.cuda.synchronize()

    def collected(level: str) -> Callable[[Path], None]:
        def run(folder: Path) -> None:
            with qgate.collect(model, folder, level=level, iterations=args.steps):  # type: ignore[arg-type]
                loop()

        return run

    def saved(folder: Path) -> None:
        saving = Saving(folder)
        with mock.patch.object(Recorder, "keep", lambda _self, *args: saving.keep(*args)):
            collector = qgate.collect(model, folder / "dump", iterations=args.steps).start()
            loop()
            collector.stop()
            collector.wait()

    ways: dict[str, Callable[[Path], None]] = {
        "plain": lambda _: loop(),
        "statistics": collected("statistics"),
        "tensors": collected("tensors"),
        "saving": saved,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    sizes: dict[str, tuple[int, float]] = {}
    for count in range(args.rounds + 1):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as home:
                folder = Path(home) / "dump"
                start = time.perf_counter()
                way(folder)
                taken = time.perf_counter() - start
                files = [path for path in folder.rglob("*") if path.is_file()]
                sizes[name] = (len(files), sum(path.stat().st_size for path in files) / 1e6)
                shutil.rmtree(folder, ignore_errors=True)
            if count:
                times[name].append(taken / args.steps)
    plain = times["plain"]
    rows = []
    for name, taken in times.items():
        ratios = [t / p for t, p in zip(taken, plain, strict=True)]
        more = [t - p for t, p in zip(taken, plain, strict=True)]
        ratio, overhead = statistics.median(ratios), statistics.median(more)
        median = statistics.median(taken)
        rows.append([name, min(taken), median, ratio, min(ratios), overhead, *sizes[name]])
    headers = ["way", "best s", "median s", "ratio", "best ratio", "overhead s", "files", "MB"]
    print(tabulate(rows, headers=headers, floatfmt=".3f"))
    lag = statistics.median(
        (s - p) / (t - p) for s, t, p in zip(times["saving"], times["tensors"], plain, strict=True)
    )
    print(f"\nsaving costs {lag:.2f} times what tensors cost; torch {torch.__version__}, ", end="")
    print(f"{args.threads} threads, {args.device}, {args.dtype}")


if __name__ == "__main__":
    main()
