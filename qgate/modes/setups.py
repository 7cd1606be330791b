"""A model with its samples and its calibration, from the options of a command or a test run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from qgate.errors import QgateError
from qgate.loading import LateModule
from qgate.models import Model, Sampling, load
from qgate.models.naming import TINY_NAMES
from qgate.modes import (
    Calibration,
    CalibrationSettings,
    Mode,
    Quantized,
    apply,
    calibrated,
    family_of,
    fitting_modes,
    modes_of,
    select,
)

if TYPE_CHECKING:
    from qgate.dumps import tensor_files as tensor_files
else:
    tensor_files = LateModule("qgate.dumps.tensor_files")


Progress = Callable[[int, int], None]
_WHOLE = ("torch.int64", "torch.int32", "torch.int16", "torch.int8", "torch.uint8", "torch.uint16")


@dataclass(frozen=True)
class ModelSetup:
    """A model by name, its device, its text and the settings of its static scales.

    `build` makes a model that has no name in qgate; `modes` are added to qgate's.
    """

    model: str = "tiny-mamba"
    device: str = "cpu"
    sampling: Sampling = field(default_factory=Sampling)
    tokens: Path | None = None
    calibration: Path | None = None
    settings: CalibrationSettings = field(default_factory=CalibrationSettings)
    build: Callable[..., Model] | None = None
    modes: Mapping[str, Mode] = field(default_factory=dict)

    def family(self) -> str | None:
        """Return the family of modes that fit, None if the name does not tell."""
        first = self.model.partition(":")[0].strip().lower().replace("_", "-")
        mamba = first in ("tiny-mamba", "mamba")
        is_other = first == "hf" or first in TINY_NAMES
        return "mamba" if mamba else "other" if is_other else None

    def family_of(self, model: Model) -> str:
        """Return the family of modes that fit a loaded model."""
        return family_of(model)

    def check_modes(self, query: str) -> None:
        """Refuse modes that cannot fit, before a large model is read."""
        family = self.family()
        if family is not None:
            select(query, family, model=self.model)

    def load(self) -> Model:
        """Load the model with its samples."""
        sampling = with_tokens(self.sampling, self.tokens)
        return load(self.model, device=self.device, sampling=sampling, build=self.build)

    def select(self, query: str, model: Model) -> list[Mode]:
        """Return the selected modes for this model."""
        return modes_of(model, query, self.modes)

    def select_fitting(self, query: str, model: Model) -> tuple[list[Mode], dict[str, str]]:
        """Return the selected modes that fit this model, and why others do not."""
        return fitting_modes(model, query, self.modes)

    def calibrate(self, model: Model, progress: Progress | None = None) -> Calibration:
        """Read the static scales from the file, or measure them and write it."""
        return calibrated(model, self.settings, self.calibration, progress=progress)

    def quantize(self, mode: Mode, model: Model, progress: Progress | None = None) -> Quantized:
        """Return the model in a mode; only static scales need a calibration."""
        return apply(mode, model, self.calibrate(model, progress) if mode.calibrated else None)


def with_tokens(sampling: Sampling, tokens: Path | None) -> Sampling:
    """Return a sampling of the token ids in a file, if there is one."""
    if tokens is None:
        return sampling
    if sampling.text is not None:
        raise QgateError(
            f"both token ids ({str(tokens)!r}) and a text ({str(sampling.text)!r}) were "
            "given to run on; give one of them."
        )
    return replace(sampling, tokens=read_token_ids(tokens))


def read_token_ids(path: Path) -> Tensor:
    """Read one row of token ids from a .npy, .npz, .pt or .safetensors file."""
    stored = list(tensor_files.read_tensors(str(path)))
    if len(stored) != 1:
        raise QgateError(
            f"{str(path)!r} holds {len(stored)} tensors; token ids are one row of one."
        )
    ids = stored[0].tensor
    if str(ids.dtype) not in _WHOLE or ids.dim() > 2 or not ids.numel():
        raise QgateError(
            f"{str(path)!r} holds {ids.dtype} {tuple(ids.shape)}; token ids are whole numbers in "
            "one row."
        )
    return ids.reshape(-1).long()
