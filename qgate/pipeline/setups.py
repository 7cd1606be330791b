"""A model with its samples and its calibration, from the options of a command or a test run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from qgate.dumps.tensor_files import read_tensors
from qgate.errors import QgateError
from qgate.models import Model, Sampling, load
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

Progress = Callable[[int, int], None]
_WHOLE = ("torch.int64", "torch.int32", "torch.int16", "torch.int8", "torch.uint8", "torch.uint16")


@dataclass(frozen=True)
class ModelSetup:
    """Which model, on which device and text, and how its static scales are made.

    `build` makes a model that qgate does not know by name; `modes` are there beside qgate's.
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
        """Which modes fit, as far as the name tells."""
        first = self.model.partition(":")[0].strip().lower().replace("_", "-")
        return {"tiny-mamba": "mamba", "mamba": "mamba", "tiny-llama": "other", "hf": "other"}.get(
            first
        )

    def family_of(self, model: Model) -> str:
        """Which modes fit a model that is loaded."""
        return family_of(model)

    def check_modes(self, wanted: str) -> None:
        """Refuse modes that cannot be meant, before a large model is read."""
        family = self.family()
        if family is not None:
            select(wanted, family, model=self.model)

    def load(self) -> Model:
        """The model with its samples."""
        sampling = self.sampling
        if self.tokens is not None and sampling.text is not None:
            raise QgateError(
                f"both token ids ({str(self.tokens)!r}) and a text ({str(sampling.text)!r}) were "
                "given to run on; give one of them."
            )
        if self.tokens is not None:
            sampling = Sampling(**{**vars(sampling), "tokens": read_token_ids(self.tokens)})
        return load(self.model, device=self.device, sampling=sampling, build=self.build)

    def select(self, wanted: str, model: Model) -> list[Mode]:
        """The modes meant, for this model."""
        return modes_of(model, wanted, self.modes)

    def select_fitting(self, wanted: str, model: Model) -> tuple[list[Mode], dict[str, str]]:
        """The modes meant that fit this model, and why the others do not."""
        return fitting_modes(model, wanted, self.modes)

    def calibrate(self, model: Model, progress: Progress | None = None) -> Calibration:
        """The static scales: from the file if it fits, else measured (and written there)."""
        return calibrated(model, self.settings, self.calibration, progress=progress)

    def quantize(self, mode: Mode, model: Model, progress: Progress | None = None) -> Quantized:
        """The model in a mode; scales are only made where the mode has static ones."""
        return apply(mode, model, self.calibrate(model, progress) if mode.calibrated else None)


def read_token_ids(path: Path) -> Tensor:
    """One row of token ids from a .npy, .npz, .pt or .safetensors file."""
    stored = list(read_tensors(str(path)))
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
