"""Loading of models by name: tiny ones, checkpoint folders, and callables of users."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from qgate import devices
from qgate.errors import QgateError, unknown
from qgate.models import huggingface
from qgate.models.language import Part
from qgate.models.mamba.checkpoint import load_checkpoint
from qgate.models.mamba.rotation import ROTATED, rotate
from qgate.models.model import Model
from qgate.models.text import byte_ids, language_windows, windows
from qgate.models.tiny import TINY

SCHEMES = {
    "mamba:PATH": "a Mamba-1 checkpoint folder, of Hugging Face or state-spaces",
    "hf:PATH": "any folder that transformers loads: causal, encoder or image-text",
    "package.module:build": "a callable of yours that returns a qgate.Model",
    "FILE.py:build": "the same, in a file",
}


@dataclass(frozen=True)
class Sampling:
    """The text a model runs on, and how much of it.

    The calibration has its own text, number and length, so that no scale is tuned on what is
    evaluated. `tokens` are token ids (a tensor) used in place of text.
    """

    samples: int = 10
    seqlen: int = 512
    calib_samples: int = 64
    calib_seqlen: int = 512
    seed: int = 0
    text: Path | None = None
    calib_text: Path | None = None
    tokens: Tensor | None = None


Encode = Callable[[str], Tensor]
_MAMBA_BASES: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {ROTATED: rotate}


def load(
    name: str,
    *,
    device: str | torch.device = "cpu",
    sampling: Sampling | None = None,
    build: Callable[..., Model] | None = None,
) -> Model:
    """Load a model by name onto a device, and cut its samples.

    tiny-mamba, tiny-llama, mamba:PATH, hf:PATH, package.module:build, or what `build` makes.
    """
    target = devices.resolve(device)
    sampling = sampling or Sampling()
    if build is not None:
        model = _call_builder(name, build, sampling)
        model.module.to(target)
        return model
    scheme, colon, location = name.strip().partition(":")
    scheme = scheme.lower() if scheme.lower() in ("mamba", "hf") else scheme
    if not colon:
        model = _tiny(name, sampling)
    elif scheme == "mamba":
        folder = checkpoint_folder(location, name)
        inputs, calibration = _samples(sampling, lambda: huggingface.tokenizer(folder))
        model = Model(load_checkpoint(folder), inputs, name, calibration, bases=_MAMBA_BASES)
    elif scheme == "hf":
        model = _hugging_face(name, checkpoint_folder(location, name), sampling)
    else:
        model = _from_callable(name, scheme, location, sampling)
        model.module.to(target)
        return model
    _check_ids(model, sampling)
    model.module.to(target)
    return model


def names() -> list[str]:
    """Return the names of the tiny models, then the forms of other names."""
    return [*(tiny.title for tiny in TINY), *SCHEMES]


def _tiny(name: str, sampling: Sampling) -> Model:
    if name.strip().lower().replace("-", "_") not in TINY.names():
        raise unknown("model", name, names())
    tiny = TINY.get(name)
    network = tiny.load()
    bases = _MAMBA_BASES if tiny.name == "tiny_mamba" else {}
    inputs, calibration = _samples(sampling, lambda: byte_ids)
    return Model(network, inputs, tiny.title, calibration, bases=bases)


def _hugging_face(name: str, folder: Path, sampling: Sampling) -> Model:
    inputs, calibration = _samples(sampling, lambda: huggingface.tokenizer(folder))
    network = huggingface.load_network(folder)
    huggingface.check_length(network, sampling.seqlen, name)

    def calibrated() -> Sequence[Tensor]:
        huggingface.check_length(network, sampling.calib_seqlen, name)
        return calibration()

    part = huggingface.language_part(network)
    return Model(network, inputs, name, calibrated, part=part)


def _from_callable(name: str, module: str, attribute: str, sampling: Sampling) -> Model:
    """Build a model by a user's callable, which gets the fields of the sampling that it names."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        loaded = _from_file(Path(module)) if module.endswith(".py") else import_module(module)
        build = getattr(loaded, attribute)
    except Exception as error:
        raise QgateError(
            f"cannot take {attribute!r} from {module!r} for model {name!r}: {_error_text(error)}. "
            f"A model is {', '.join(names())}; the folder you are in is searched for modules."
        ) from error
    return _call_builder(name, build, sampling)


def _call_builder(name: str, build: Callable[..., Model], sampling: Sampling) -> Model:
    if not callable(build):
        raise QgateError(f"{name!r} is {type(build).__name__}, not a callable returning a Model.")
    parameters = inspect.signature(build).parameters
    arguments = {
        f.name: getattr(sampling, f.name) for f in fields(sampling) if f.name in parameters
    }
    try:
        model = build(**arguments)
    except QgateError:
        raise
    except Exception as error:
        raise QgateError(f"model {name!r} cannot be built: {_error_text(error)}.") from error
    if not isinstance(model, Model):
        raise QgateError(f"{name!r} returned {type(model).__name__}, not a qgate.Model.")
    if model.name == "model":
        model.name = name
    return model


def _from_file(file: Path) -> ModuleType:
    """Import a file; its own folder is searched for its imports."""
    file = file.expanduser().resolve()
    own_name = f"qgate_model_file_{file.stem}"
    for loaded in (sys.modules.get(file.stem), sys.modules.get(own_name)):
        if loaded is not None and Path(str(getattr(loaded, "__file__", ""))).resolve() == file:
            return loaded
    spec = importlib.util.spec_from_file_location(own_name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(f"there is no file {str(file)!r}")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _error_text(error: Exception) -> str:
    """Describe an error of a user's code, with the line that raised it."""
    text = f"{type(error).__name__}: {error}"
    steps = traceback.extract_tb(error.__traceback__)
    last = next((s for s in reversed(steps) if "importlib" not in s.filename), None)
    own = last is not None and Path(last.filename).parent != Path(__file__).parent
    return f"{text} ({last.filename}:{last.lineno})" if own and last is not None else text


def checkpoint_folder(text: str, name: str) -> Path:
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise QgateError(f"model {name!r}: there is no folder {text!r}.")
    if not (folder / "config.json").is_file():
        raise QgateError(
            f"model {name!r}: the folder {text!r} has no config.json; a checkpoint is a folder "
            "with config.json and model.safetensors (or pytorch_model.bin)."
        )
    return folder


def _samples(
    sampling: Sampling, encoder: Callable[[], Encode]
) -> tuple[list[Tensor], Callable[[], Sequence[Tensor]]]:
    """Cut the samples of the evaluation, and return a callable that cuts those of the calibration.

    Given tokens are shared: the first half evaluates, the second calibrates. A text that is not
    given is the built-in language, as much of it as the samples need.
    """
    parts: dict[Part, Tensor] = {}
    if sampling.tokens is not None:
        ids = sampling.tokens
        if ids.dim() != 1 or ids.is_floating_point() or not len(ids):
            raise QgateError(
                f"tokens are one row of whole numbers, not {ids.dtype} {tuple(ids.shape)}."
            )
        ids, half = ids.long(), len(ids) // 2
        parts = {"evaluation": ids[:half], "calibration": ids[half:]}
        if sampling.calib_text is not None:
            parts = {"evaluation": ids}
    encode = encoder() if len(parts) < 2 else byte_ids
    if sampling.text is not None and "evaluation" not in parts:
        parts["evaluation"] = encode(_read(sampling.text))
    if sampling.calib_text is not None:
        parts["calibration"] = encode(_read(sampling.calib_text))

    def cut(part: Part, samples: int, seqlen: int) -> list[Tensor]:
        if part in parts:
            return windows(parts[part], samples, seqlen, sampling.seed)
        return language_windows(part, encode, samples, seqlen, sampling.seed)

    return (
        cut("evaluation", sampling.samples, sampling.seqlen),
        lambda: cut("calibration", sampling.calib_samples, sampling.calib_seqlen),
    )


def _check_ids(model: Model, sampling: Sampling) -> None:
    """Refuse ids beyond the embedding: the error of torch is obscure, and fatal on a GPU."""
    table = getattr(model.module, "get_input_embeddings", lambda: None)()
    embeddings = (m for m in model.module.modules() if isinstance(m, torch.nn.Embedding))
    rows = getattr(table or next(embeddings, None), "num_embeddings", None)
    ids = sampling.tokens if sampling.tokens is not None else torch.cat(list(model.inputs), -1)
    low, high = int(ids.min()), int(ids.max())
    if rows is not None and not 0 <= low <= high < rows:
        raise QgateError(
            f"{model.name} takes token ids from 0 to {rows - 1}, but those given go from {low} to "
            f"{high}. Give ids that the tokenizer of this very model made."
        )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise QgateError(f"{str(path)!r} is not text in UTF-8: {error}.") from None
    except OSError as error:
        raise QgateError(f"the text {str(path)!r} cannot be read: {error.strerror}.") from None
