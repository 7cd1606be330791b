"""The same mode built again, in this process and in another: every site has to have its bits."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qgate.engine import Failure, Workers, started
from qgate.models import Model
from qgate.modes import Calibration, Mode, Quantized, apply
from qgate.relations.recording import leaf_sites, record
from qgate.relations.ways import rows_of

LARGEST = 2**32
"""Bytes of parameters above which a model is not built a second time."""


@dataclass(frozen=True)
class Rebuilding:
    """A mode that is built anew: `build` makes the model."""

    build: Callable[[], Model]
    mode: Mode
    calibration: Calibration | None
    threads: int

    def quantized(self) -> Quantized:
        """Build the model and return it in the mode."""
        return apply(self.mode, self.build(), self.calibration)


def digests(tensors: dict[str, list[Tensor]]) -> dict[str, str]:
    """Return a digest of the bits of the tensors of each site."""
    return {site: _digest(listed) for site, listed in tensors.items()}


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()


@contextlib.contextmanager
def digests_elsewhere(rebuilding: Rebuilding) -> Iterator[Callable[[], dict[str, str]]]:
    """Start to build the mode in another process; yield what waits for the digests of a run.

    What keeps a process from starting is raised by the wait, as what goes wrong in it.
    """
    with contextlib.ExitStack() as end:
        result: Callable[[], dict[str, str] | Failure] | Exception
        try:
            result = end.enter_context(started(_digests_of, rebuilding, Workers(jobs=2)))
        except Exception as error:
            result = error

        def wait() -> dict[str, str]:
            if isinstance(result, Exception):
                raise result
            answer = result()
            if isinstance(answer, Failure):
                raise RuntimeError(answer.reason)
            return answer

        yield wait


def _digests_of(rebuilding: Rebuilding) -> dict[str, str]:
    torch.set_num_threads(rebuilding.threads)
    quantized = rebuilding.quantized()
    whole = rows_of(quantized.model).whole
    return digests(record(quantized.model, leaf_sites(quantized.model), whole).tensors)


def parameter_bytes(model: Model) -> int:
    """Return the size of all parameters."""
    return sum(tensor.nbytes for tensor in model.module.parameters())
