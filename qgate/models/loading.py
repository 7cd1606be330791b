"""Loading of models by name: tiny ones, checkpoint folders, and callables of users."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qgate import devices
from qgate.errors import QgateError, unknown
from qgate.interruptions import raise_interruption, raised_by_users
from qgate.loading import LateModule
from qgate.models.language import Part
from qgate.models.mamba.rotation import ROTATED, rotate
from qgate.models.model import Model
from qgate.models.naming import FOLDER_SCHEMES, check_name, split_name
from qgate.models.text import byte_ids, check_numbers, check_vocabulary, language_windows, windows
from qgate.models.tiny import TINY
from qgate.storage.foreign import read_foreign_text
from qgate.text import listed

if TYPE_CHECKING:
    from qgate.models import huggingface as huggingface
    from qgate.models import huggingface_inputs as huggingface_inputs
    from qgate.models.mamba import checkpoint as checkpoint
else:
    checkpoint = LateModule("qgate.models.mamba.checkpoint")
    huggingface_inputs = LateModule("qgate.models.huggingface_inputs")
    huggingface = LateModule("qgate.models.huggingface")


SCHEMES = {
    "mamba:PATH": "a Mamba-1 checkpoint folder, of Hugging Face or state-spaces",
    "hf:PATH": "any folder that transformers loads and that is fed text, images or sound",
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

    def check_texts(self) -> None:
        """Refuse files that are no text, before a model is loaded."""
        for path in filter(None, (self.text, self.calib_text)):
            _read(path)


Encode = Callable[[str], Tensor]
# The text of each sample of a part; None in samples without text.
Texts = Callable[[Part], Sequence[Tensor | None]]
_MAMBA_BASES: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {ROTATED: rotate}


def load(
    model: str,
    /,
    *,
    name: str | None = None,
    device: str | torch.device = "cpu",
    sampling: Sampling | None = None,
    build: Callable[..., Model] | None = None,
) -> Model:
    """Load a model onto a device, and cut its samples; `name` is how results and baselines call it.

    tiny-mamba, tiny-llama, tiny-moe, mamba:PATH, hf:PATH, package.module:build, or what `build`
    makes.
    """
    if name is not None:
        check_name(name, model)
    target = devices.resolve(device)
    sampling = sampling or Sampling()
    loaded = _by_scheme(model, sampling) if build is None else _call_builder(model, build, sampling)
    # Builders set it for speed; it would make zeros of small values in figures and references.
    torch.set_flush_denormal(False)
    loaded.name = loaded.name if name is None else name
    loaded.module.to(target)
    return loaded


def _by_scheme(model: str, sampling: Sampling) -> Model:
    located, own_name = split_name(model)
    scheme, colon, location = located.strip().partition(":")
    name = model if own_name is None else own_name
    if not colon:
        return _tiny(model, sampling)
    if scheme.lower() not in FOLDER_SCHEMES:
        return _from_callable(model, scheme, location, sampling)
    folder = checkpoint_folder(location, model)
    if scheme.lower() == "hf":
        return _hugging_face(name, folder, sampling)
    inputs, calibration = _samples(sampling, lambda: huggingface.tokenizer(folder))
    loaded = Model(
        checkpoint.load_checkpoint(folder), inputs, name, calibration, bases=_MAMBA_BASES
    )
    _check_ids(loaded, sampling)
    return loaded


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
    loaded = Model(network, inputs, tiny.title, calibration, bases=bases)
    _check_ids(loaded, sampling)
    return loaded


def _hugging_face(name: str, folder: Path, sampling: Sampling) -> Model:
    network = huggingface.load_network(folder)
    names = huggingface_inputs.fed_names(network)
    if names != (huggingface_inputs.TEXT,):
        return model_of_signals(name, folder, network, names, sampling)
    inputs, calibration = _samples(sampling, lambda: huggingface.tokenizer(folder))
    huggingface.check_length(network, sampling.seqlen, name)

    def calibrated() -> Sequence[Tensor]:
        huggingface.check_length(network, sampling.calib_seqlen, name)
        return calibration()

    part = huggingface.language_part(network)
    loaded = Model(network, inputs, name, calibrated, part=part)
    _check_ids(loaded, sampling)
    return loaded


def model_of_signals(
    name: str, folder: Path, network: torch.nn.Module, names: Sequence[str], sampling: Sampling
) -> Model:
    """Make a model that is fed images or sound, alone or beside text."""
    if huggingface_inputs.TEXT in names:
        texts = _framed_texts(folder, network, sampling)
    else:
        _refuse_text(name, f"is fed {listed(names, 4)}", sampling)
        texts = _no_texts(sampling)
    feed = huggingface_inputs.NetworkFeed(network, folder, tuple(names), sampling.seed)

    def fed(part: Part) -> list[Any]:
        return [feed.sample(part, index, ids) for index, ids in enumerate(texts(part))]

    model = Model(network, fed("evaluation"), name, lambda: fed("calibration"))
    if huggingface_inputs.TEXT in names:
        _check_ids(model, sampling)
    feed.prepare(model)
    return model


def _no_texts(sampling: Sampling) -> Texts:
    check_numbers(sampling.samples, sampling.seqlen)
    counts = {"evaluation": sampling.samples, "calibration": sampling.calib_samples}
    return lambda part: [None] * counts[part]


def _framed_texts(folder: Path, network: torch.nn.Module, sampling: Sampling) -> Texts:
    """Cut texts that are no longer than the positions of a network.

    The tokens that begin and end a text frame each, unless they are given as token ids.
    """
    most = huggingface.positions(network) or sys.maxsize
    seqlen, calib_seqlen = (min(n, most) for n in (sampling.seqlen, sampling.calib_seqlen))
    tokenizer = functools.cache(functools.partial(huggingface.tokenizer, folder))
    cut = replace(sampling, seqlen=seqlen, calib_seqlen=calib_seqlen)
    inputs, calibration = _samples(cut, tokenizer)

    def texts(part: Part) -> Sequence[Tensor]:
        rows = inputs if part == "evaluation" else calibration()
        return rows if sampling.tokens is not None else [tokenizer().frame(ids) for ids in rows]

    return texts


def _refuse_text(name: str, reason: str, sampling: Sampling, taken: Collection[str] = ()) -> None:
    """Refuse a text that no sample would have."""
    texts = {"text", "tokens", "calib_text"} - {*taken}
    useless = sorted(field for field in texts if getattr(sampling, field) is not None)
    if useless:
        options = " and ".join(f"--{n.replace('_', '-')}" for n in useless)
        raise QgateError(
            f"{options} would change nothing, as {name} {reason}: leave out {options}."
        )


def _from_callable(name: str, module: str, attribute: str, sampling: Sampling) -> Model:
    """Build a model by a user's callable, which gets the fields of the sampling that it names."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        loaded = _from_file(Path(module)) if module.endswith(".py") else import_module(module)
    except raised_by_users() as error:
        raise_interruption()
        raise QgateError(
            f"cannot take {attribute!r} from {module!r} for model {name!r}: {_error_text(error)}. "
            "Modules are searched in the folder you are in. Names of models are "
            f"{', '.join(names())}."
        ) from error
    build = getattr(loaded, attribute, None)
    if build is None:
        functions = [
            function
            for function, value in vars(loaded).items()
            if inspect.isfunction(value) and value.__module__ == loaded.__name__
        ]
        allowed = functions or ["a function that returns a qgate.Model"]
        raise QgateError(f"model {name!r}: {unknown(f'function of {module}', attribute, allowed)}")
    return _call_builder(name, build, sampling)


def _call_builder(name: str, build: Callable[..., Model], sampling: Sampling) -> Model:
    if not callable(build):
        raise QgateError(f"{name!r} is {type(build).__name__}, not a callable returning a Model.")
    parameters = inspect.signature(build).parameters
    _refuse_text(name, "has no such parameter", sampling, parameters)
    arguments = {
        f.name: getattr(sampling, f.name) for f in fields(sampling) if f.name in parameters
    }
    try:
        model = build(**arguments)
    except QgateError:
        raise
    except raised_by_users() as error:
        raise_interruption()
        raise QgateError(f"model {name!r} cannot be built: {_error_text(error)}.") from error
    if not isinstance(model, Model):
        raise QgateError(
            f"{name!r} returned {type(model).__name__}, not a qgate.Model: "
            "let it return qgate.Model(module, inputs, NAME), with a list of example inputs."
        )
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


def _error_text(error: BaseException) -> str:
    """Describe an error of a user's code, with the line that raised it."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        text += ", the end of the program; move it under `if __name__ == '__main__':`"
    steps = traceback.extract_tb(error.__traceback__)
    last = next((s for s in reversed(steps) if "importlib" not in s.filename), None)
    own = last is not None and Path(last.filename).parent != Path(__file__).parent
    return f"{text} ({last.filename}:{last.lineno})" if own and last is not None else text


def checkpoint_folder(text: str, name: str) -> Path:
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise QgateError(
            f"model {name!r}: there is no folder {text!r}. qgate downloads no models: download it, "
            "and give the path of its folder."
        )
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
    table = None
    with contextlib.suppress(NotImplementedError):  # of networks with several kinds of input
        table = getattr(model.module, "get_input_embeddings", lambda: None)()
    embeddings = (m for m in model.module.modules() if isinstance(m, torch.nn.Embedding))
    rows = getattr(table or next(embeddings, None), "num_embeddings", None)
    texts = [
        sample[huggingface_inputs.TEXT] if isinstance(sample, Mapping) else sample
        for sample in model.inputs
    ]
    ids = sampling.tokens if sampling.tokens is not None else torch.cat(texts, -1)
    if rows is not None:
        check_vocabulary(ids, rows, model.name, "those given go")


def _read(path: Path) -> str:
    try:
        return read_foreign_text(path, "texts")
    except UnicodeDecodeError as error:
        raise QgateError(f"{str(path)!r} is not text in UTF-8: {error}.") from None
    except OSError as error:
        raise QgateError(f"the text {str(path)!r} cannot be read: {error.strerror}.") from None
