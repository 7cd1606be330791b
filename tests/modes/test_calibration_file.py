"""The file of static scales: written whole, believed only if it is of this model and readable."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qgate import Model, QgateError, modes
from qgate.modes import Calibration, CalibrationSettings, calibrated, load_calibration, measure
from tests.modes.test_calibration import DEFAULT, mamba

Stored = tuple[Model, Path, Calibration]


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    model, path = mamba(), tmp_path / "deep" / "er" / "scales.json"
    return model, path, calibrated(model, DEFAULT, path)


@pytest.fixture
def unmeasured(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """From here on nothing may be measured."""

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr("qgate.modes.calibration.measure", measured)


def test_a_file_is_what_was_measured(stored: Stored) -> None:
    model, path, calibration = stored
    assert load_calibration(path) == calibration == measure(model, DEFAULT)
    assert calibration.weights == model.weights_hash()
    assert calibration.versions["torch"] == torch.__version__
    record = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (record["qgate"], record["version"]) == ("calibration", 1)
    assert [p.name for p in path.parent.iterdir()] == ["scales.json"]


@pytest.mark.usefixtures("unmeasured")
def test_a_file_that_fits_is_used_and_kept(stored: Stored) -> None:
    model, path, calibration = stored
    before = path.stat()
    assert calibrated(model, CalibrationSettings(0.9995), path) == calibration
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_whole_numbers_of_settings_are_the_same_settings(tmp_path: Path) -> None:
    model, path = mamba(), tmp_path / "c.json"
    calibration = calibrated(model, CalibrationSettings(1), path)
    assert calibrated(model, CalibrationSettings(1.0), path) == calibration


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("what", "model", "chosen", "words"),
    [
        ("weights", {"module": mamba(seed=1).module}, DEFAULT, ()),
        ("calibration samples", {"calibration": mamba().calibration[:-1]}, DEFAULT, ()),  # type: ignore[index]
        ("settings", {}, CalibrationSettings(0.99), ("0.9995", "0.99")),
        ("settings", {}, CalibrationSettings(arithmetic="fp16"), ("fp32", "fp16")),
    ],
)
def test_a_file_of_something_else_is_refused(
    what: str,
    model: dict[str, Any],
    chosen: CalibrationSettings,
    words: tuple[str, ...],
    stored: Stored,
) -> None:
    original, path, _ = stored
    content = path.read_bytes()
    with pytest.raises(QgateError) as caught:
        calibrated(replace(original, **model), chosen, path)
    text = str(caught.value)
    assert f"made with other {what} (" in text
    assert all(word in text for word in (str(path), "random", "Delete the file", *words))
    assert path.read_bytes() == content


def edit(*keys: str, value: Any) -> Callable[[str], str]:
    def act(text: str) -> str:
        record = inner = json.loads(text)
        for key in keys[:-1]:
            inner = inner[next(iter(inner)) if key == "*" else key]
        if value is None:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value
        return json.dumps(record)

    return act


FIRST, U = ("scales", "*"), ("scales", "backbone.layers.0.mixer.x_proj:input")


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], "JSONDecodeError"),
        (lambda _: "", "JSONDecodeError"),
        (lambda _: "[1, 2]", "TypeError"),
        (lambda _: "null", "TypeError"),
        (lambda _: '{"qgate": "results"}', "KeyError"),
        (edit("version", value=2), "version 2, and this qgate reads version 1"),
        (edit("weights", value=None), "weights"),
        (edit("settings", "percentile_alpha", value=7), "percentile alpha"),
        (edit("settings", "later", value=1), "later"),
        (edit(*FIRST, "scale", value=float("nan")), "nan"),
        (edit(*FIRST, "scale", value=0.0), "0.0 is no number above zero"),
        (edit(*FIRST, "scale", value=-0.5), "-0.5"),
        (edit(*FIRST, "scale", value=float("inf")), "inf"),
        (edit(*FIRST, "scale", value="0.1"), "'0.1'"),
        (edit(*FIRST, "scale", value=None), "scale"),
        (edit(*FIRST, "observer", value="mean"), "'mean'"),
        (edit(*U, "wide", value=float("nan")), "nan"),
        (edit(*U, "wide", value=None), "None"),
    ],
)
def test_a_file_that_is_no_calibration_is_an_error(
    change: Callable[[str], str], words: str, stored: Stored
) -> None:
    model, path, _ = stored
    path.write_text(change(path.read_text()))
    with pytest.raises(QgateError) as caught:
        calibrated(model, DEFAULT, path)
    assert words in str(caught.value)
    if "alpha" not in words:
        assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_binary_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QgateError, match="no calibration of qgate"):
        load_calibration(path)


@pytest.mark.usefixtures("unmeasured")
def test_a_scale_that_is_missing_is_named_when_it_is_needed(stored: Stored) -> None:
    model, path, _ = stored
    path.write_text(edit(*U, value=None)(path.read_text()))
    calibration = calibrated(model, DEFAULT, path)
    with pytest.raises(
        QgateError, match=r"no scale for site 'backbone\.layers\.0\.mixer\.x_proj:input'"
    ):
        modes.apply(modes.find_mode("2-1", "mamba"), model, calibration)


@pytest.mark.parametrize("old", [None, b"yesterday's"])
def test_an_interrupted_write_leaves_what_was_there(
    old: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.json"
    calibration = measure(mamba((4,)), DEFAULT)
    if old:
        path.write_bytes(old)

    def cut(self: Path, text: str, **_: object) -> None:
        self.write_bytes(text[:100].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(KeyboardInterrupt):
        calibration.save(path)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == (
        [("c.json", old)] if old else []
    )


@pytest.mark.usefixtures("unmeasured")
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    files_before = sorted(tmp_path.iterdir())
    with pytest.raises((QgateError, OSError), match="file"):
        calibrated(mamba(), DEFAULT, tmp_path / "file" / "c.json")
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    with pytest.raises(QgateError, match=r"cannot write .*c\.json.* not writable"):
        calibrated(mamba(), DEFAULT, tmp_path / "c.json")
    assert sorted(tmp_path.iterdir()) == files_before
