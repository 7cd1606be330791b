"""A bench that takes what an earlier run of this process measured of the same model and mode.

Runs of `pytest suites` in tests differ in options, files and reports, and measure the same few modes
of the tiny models again and again, which is most of their time. A mode of a project is shared where
its rules are the same. A model, text or scales of a test's own are measured anew, and so is
everything in a test that asks for the fixture `measured_anew`. Of what was measured with pictures a
bench without them takes the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from qgate.capture import Capture
from qgate.devices import resolve
from qgate.gate.measured import Measured
from qgate.gate.measuring.bench import Bench
from qgate.models import Model
from qgate.models.naming import TINY_NAMES
from qgate.modes import Mode, Quantized
from qgate.modes.setups import ModelSetup


@dataclass
class Computed:
    """What was computed of one model with one text."""

    model: Model | None = None
    captures: dict[tuple[str, str, str], Capture] = field(default_factory=dict)
    quantized: dict[Mode, Quantized] = field(default_factory=dict)
    measured: dict[tuple[Mode, bool], dict[str, dict[str, Any]]] = field(default_factory=dict)


_COMPUTED: dict[Any, Computed] = {}
_BY_NAME = ("_quantized", "_segments", "_logits", "_measured")


class SharedBench(Bench):
    """A bench whose passes of shipped models in shipped modes are made once in a process."""

    @property
    def computed(self) -> Computed | None:
        setup = self.setup
        if setup.model not in TINY_NAMES or setup.build:
            return None
        if setup.calibration is not None or setup.tokens is not None:
            return None
        if setup.sampling.text is not None or setup.sampling.calib_text is not None:
            return None
        # A test may refuse that a model is loaded at all.
        ways = ModelSetup.load, ModelSetup.calibrate
        modes = tuple(setup.modes.values())
        key = (
            setup.model,
            resolve(setup.device),
            repr(setup.sampling),
            setup.settings,
            modes,
            *ways,
        )
        return _COMPUTED.setdefault((*key, self.reference_mode), Computed())

    @property
    def model(self) -> Model:
        computed = self.computed
        if self._model is None and computed is not None:
            self._captures = computed.captures
            if computed.model is not None:
                self.progress(f"loading {self.setup.model}")
                self._model = computed.model
            computed.model = super().model
        return super().model

    def quantized(self, mode: Mode) -> Quantized:
        computed = self.computed
        if mode.name not in self._quantized and computed is not None:
            if mode in computed.quantized:
                self._quantized[mode.name] = computed.quantized[mode]
            computed.quantized[mode] = super().quantized(mode)
        return super().quantized(mode)

    def measure(self, mode: Mode) -> list[Measured]:
        computed = self.computed
        if mode.name in self._measured or computed is None:
            return super().measure(mode)
        key = mode, self.pictures
        pictured = computed.measured.get((mode, True))
        if pictured is not None and key not in computed.measured:
            rows = [replace(row, pictures=()) for row in pictured["_measured"][mode.name]]
            computed.measured[key] = {**pictured, "_measured": {mode.name: rows}}
        if key in computed.measured:
            self.progress(f"mode {mode.name} of {self.model.name}")
            for name, of in computed.measured[key].items():
                getattr(self, name).update(of)
            return self._measured[mode.name]
        before = {name: {*getattr(self, name)} - {mode.name} for name in _BY_NAME}
        rows = super().measure(mode)
        computed.measured[key] = {
            name: {k: v for k, v in getattr(self, name).items() if k not in before[name]}
            for name in _BY_NAME
        }
        return rows
