"""List what is pinned: groups of commands that run one after the other in a folder of their own."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.golden import inputs

ROOT = Path(__file__).resolve().parents[2]
STORED = Path(__file__).resolve().parent / "stored"


@dataclass(frozen=True)
class Step:
    """One command, the case that it is, and which of the files it writes are pinned.

    `keep` and `leave` are patterns of names below the folder of the group; names of files that are
    not pinned are. `strip` is a folder that golden names leave out. `columns` is the width of the
    terminal.
    """

    case: str
    command: tuple[str, ...]
    keep: tuple[str, ...] = ("*",)
    leave: tuple[str, ...] = ()
    strip: str = ""
    columns: int = 100

    @property
    def shown(self) -> tuple[str, ...]:
        return self.command

    def keeps(self, name: str) -> bool:
        is_matched = any(fnmatch.fnmatch(name, pattern) for pattern in self.keep)
        return is_matched and not any(fnmatch.fnmatch(name, pattern) for pattern in self.leave)

    def golden_name(self, name: str) -> str:
        """The name of the golden file; a description does not end like what it describes."""
        name = name.removeprefix(f"{self.strip}/") if self.strip else name
        return name if name.endswith((".jsonl", ".txt", ".md", ".csv", ".log")) else f"{name}.txt"


@dataclass(frozen=True)
class Group:
    """Steps that share a process and a folder; `prepare` fills the folder."""

    steps: tuple[Step, ...]
    prepare: Callable[[Path], None] = lambda _folder: None


def step(
    case: str,
    line: str,
    *,
    keep: Sequence[str] = ("*",),
    leave: Sequence[str] = (),
    strip: str = "",
) -> Step:
    """A step from a command line without quotes."""
    return Step(case, tuple(line.split()), tuple(keep), tuple(leave), strip)


def sweep(case: str, more: str) -> Step:
    """A sweep into a folder named like the case; its logs repeat the console."""
    line = f"qgate sweep {more} --output-dir {case}"
    return step(case, line, leave=["*.log"], strip=case)


FORMATS = Group(
    (
        step("help", "help"),
        step("help-suites", "pytest --help"),
        step("formats", "qgate show formats"),
        step("formats-unknown", "qgate show formats mxpf8"),
        step("vectors", "qgate show vectors int4", leave=["*.npz"]),
        *(
            step(f"formats-{name}", f"qgate show formats {name} --plot {name}.png")
            for name in ("fp4_e2m1", "hif8", "mxfp4_e2m1", "nvfp4", "hif4", "int8")
        ),
        step("modes", "qgate show modes"),
        step("modes-tiny-llama", "qgate show modes essential --model tiny-llama"),
    )
)

CHECKPOINTS = Group(
    (
        step("checkpoint", "qgate checkpoint checkpoints/child --parent checkpoints/parent"),
        step("checkpoint-alone", "qgate checkpoint checkpoints/child"),
        step("checkpoint-wrong", "qgate checkpoint checkpoints/wrong --parent checkpoints/parent"),
        step(
            "checkpoint-page",
            "qgate checkpoint checkpoints/wrong --parent checkpoints/parent --output-dir page",
        ),
        step("checkpoint-json", "qgate checkpoint checkpoints/wrong --json"),
        step("checkpoint-refused", "qgate checkpoint checkpoints/parent"),
    ),
    lambda folder: inputs.write_checkpoints(folder / "checkpoints"),
)

ENGINES = Group(
    (
        step("engines", "qgate engines engines/trainer.npz engines/rollout.npz"),
        step("engines-beyond", "qgate engines engines/trainer.npz engines/rollout.npz --max-kl 0"),
        step("engines-json", "qgate engines engines/trainer.npz engines/rollout.npz --json"),
        step(
            "engines-page",
            "qgate engines engines/trainer.npz engines/rollout.npz --output-dir page",
        ),
    ),
    lambda folder: inputs.write_engines(folder / "engines"),
)

ONE = "--granularity tensor --no-plots"
ZOO = "zoo/zoo.safetensors"
ODD = " ".join(f"{ZOO}:{name}" for name in ("holes", "constant", "zeros", "small", "large"))
SWEEPS = Group(
    (
        sweep("sweep-usual", f"{ZOO}:usual"),
        sweep("sweep-outlier-fp4", f"{ZOO}:outlier_channel --elem-format fp4_e2m1"),
        sweep("sweep-hif8", f"{ZOO}:outlier_channel {ZOO}:heavy --elem-format hif8 {ONE}"),
        sweep("sweep-int8", f"{ZOO}:spiked --elem-format int8 {ONE} --verbose"),
        sweep(
            "sweep-fp32",
            f"zoo/heavy_fp32.npy zoo/more_fp32.npz --elem-format fp8_e5m2 {ONE}",
        ),
        sweep(
            "sweep-two",
            "zoo/usual_fp16.pt --elem-format fp8_e4m3,fp6_e3m2 --granularity block --no-plots",
        ),
        sweep("sweep-odd", f"{ODD} {ONE}"),
        sweep("sweep-wide", f"{ZOO}:wide --elem-format fp8_e4m3 --via bf16 {ONE}"),
        sweep(
            "sweep-documented", f"{ZOO}:usual --set sweep_alignment=documented {ONE} --num-levels 5"
        ),
        step("sweep-refused", f"qgate sweep {ZOO}:usual --elem-format nvfp4 --output-dir refused"),
    ),
    lambda folder: inputs.write_zoo(folder / "zoo"),
)

DUMPS = Group(
    (
        step("dumps-ls", "qgate dumps ls dumps/faulty --limit 60"),
        step("dumps-ls-json", "qgate dumps ls dumps/faulty --json --where layer=1,rank=0,sample=0"),
        step("dumps-info", "qgate dumps info dumps/faulty"),
        step("dumps-info-json", "qgate dumps info dumps/faulty --json"),
        step("dumps-verify", "qgate dumps verify dumps/faulty"),
        step("dumps-compare", "qgate dumps compare dumps/faulty dumps/clean --relative-mse 1e-4 --limit 12"),
        step("dumps-compare-json", "qgate dumps compare dumps/faulty dumps/clean --json --where layer=2,sample=0"),
        step("dumps-compare-same", "qgate dumps compare dumps/clean dumps/clean --limit 3"),
        step("dumps-watch", "qgate dumps watch dumps/clean --expect 96 --timeout 0"),
        step("dumps-watch-missing", "qgate dumps watch dumps/clean-rank0 --expect 500 --timeout 0"),
        step("dumps-merge", "qgate dumps merge dumps/clean-rank0 dumps/clean-rank1 --output merged", keep=[]),
        step("dumps-merge-compare", "qgate dumps compare merged dumps/clean --limit 3"),
        step("dumps-export", "qgate dumps export dumps/faulty --output exported --where layer=1,sample=0,rank=0"),
        step("dumps-verify-damaged", "qgate dumps verify damaged"),
        step("dumps-ls-unknown", "qgate dumps ls dumps/faulty --where name=wieght"),
        step("draw-quick", "qgate dumps draw dumps/faulty --quick --output-dir quick", strip="quick"),
        step("draw", "qgate dumps draw dumps/faulty --output-dir drawn", strip="drawn"),
        step("draw-compare", "qgate dumps draw dumps/faulty dumps/clean --compare hifp8,mxfp8 --output-dir compared", strip="compared",
             keep=["*.txt", "compared/comparisons/*", "*.html", "compared/quant_comparison/*"]),
        step("draw-again", "qgate dumps draw drawn/analysis.json --output-dir again --no-plots", strip="again",
             keep=["*.txt", "*.html"]),
        step("collect", "qgate collect --dir collected --quant-type mxfp8 -- train.py", keep=[]),
        step("collect-ls", "qgate dumps ls collected --json"),
        step("init", "qgate init product --ci github", keep=[]),
    ),
    lambda folder: _prepare_dumps(folder),
)  # fmt: skip


def _prepare_dumps(folder: Path) -> None:
    inputs.write_dumps(folder / "dumps")
    inputs.write_program(folder / "train.py")
    (folder / "product").mkdir()
    shutil.copytree(folder / "dumps" / "clean-rank0", folder / "damaged")
    shard = folder / "damaged" / "rank00000" / "tensors-000000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


SHORT = "--samples 2 --seqlen 64"
CALIBRATED = f"{SHORT} --calib-samples 2 --calib-seqlen 64"
SET = f"{SHORT} --set calib_samples=2 --set calib_seqlen=64"


def _model_steps(model: str, modes: tuple[str, str], calibrated: str) -> tuple[Step, ...]:
    first, second = modes
    short = f"--data.num_samples 2 --data.seq_len 64 --visualization.save_dir activations-{model}"
    plot_options = "--sensitivity.enabled true --visualization.enabled.distribution true"
    return (
        step(
            f"capture-{model}",
            f"qgate layers capture --model {model} --mode {first},{second} {calibrated} --output-dir captured-{model}",
            strip=f"captured-{model}",
        ),
        step(f"compare-{model}", f"qgate layers compare {first} --output-dir captured-{model}"),
        step(
            f"compare-all-{model}",
            f"qgate layers compare --all --output-dir captured-{model}",
            strip=f"captured-{model}",
        ),
        step(
            f"activations-{model}",
            f"qgate activations --model {model} {short} {plot_options}",
            strip=f"activations-{model}",
        ),
    )


MAMBA_MODEL = Group(
    (
        *_model_steps("tiny-mamba", ("2-1", "fp16"), SET),
        step("calibrate", f"qgate layers calibrate --model tiny-mamba {SET} --calibration scales.json"),
        step("activations-layers", "qgate activations --model tiny-mamba --list-layers in_proj"),
        step("activations-config", "qgate activations --write-config"),
    )
)  # fmt: skip
LLAMA_MODEL = Group(_model_steps("tiny-llama", ("mxfp4", "hif8"), SHORT))


def suites(case: str, more: str, keep: Sequence[str] = ("*/results.jsonl",)) -> Step:
    """A run of suites; `qgate report` reads the golden file of its records."""
    line = f"pytest -q --baselines accepted {more}"
    return step(case, line, keep=keep, strip="qgate-out")


def _prepare_suites(folder: Path) -> None:
    shutil.copytree(
        ROOT / "suites", folder / "suites", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "conftest.py", folder)


MAMBA = f"--model tiny-mamba {CALIBRATED} --layers first"
CANARY = "suites/test_canary.py"
LLAMA = f"--model tiny-llama {SHORT} --layers first"
OF_MODES = " ".join(f"suites/test_{name}.py" for name in ("layer_outputs", "gradients", "task"))
OF_FORMATS = " ".join(
    f"suites/test_{name}.py" for name in ("scaling", "overflow", "activations", "reference")
)
MAMBA_SUITES = Group(
    (
        suites(
            "suites-mamba-new",
            f"{OF_MODES} --mode 2-1 {MAMBA} --update-baselines --no-report",
            keep=(),
        ),
        suites("suites-mamba", f"{OF_MODES} {CANARY} --mode 2-1,2-4 {MAMBA}"),
        step("baselines-accept", "qgate baselines accept --baselines accepted"),
        step("baselines-list", "qgate baselines list --baselines accepted"),
        step("baselines-verify", "qgate baselines verify --baselines accepted"),
        step("baselines-prune", "qgate baselines prune --baselines accepted --mode 2-4 --dry-run"),
        suites("suites-formats", "suites/test_formats.py --format hif8,mxfp4,nvfp4", keep=()),
    ),
    _prepare_suites,
)
LLAMA_SUITES = Group(
    (
        suites(
            "suites-llama-new",
            f"{OF_MODES} {OF_FORMATS} --mode mxfp4 {LLAMA} --format mxfp4,hif8 --update-baselines --no-report",
            keep=(),
        ),
        suites("suites-llama", f"{OF_MODES} {OF_FORMATS} --mode mxfp4 {LLAMA} --format mxfp4,hif8"),
    ),
    _prepare_suites,
)


def _prepare_faulty(folder: Path) -> None:
    (folder / "suites").mkdir()
    for name in ("layer_outputs", "gradients", "outputs"):
        shutil.copy(ROOT / "suites" / f"test_{name}.py", folder / "suites")
    shutil.copy(ROOT / "conftest.py", folder)
    shutil.copy(Path(inputs.__file__).with_name("faulty_models.py"), folder / "net.py")


def _faulty(case: str, model: str, columns: int = 80, more: str = "") -> Step:
    line = f"pytest -q suites --mode mine --model net.py:{model} {more}"
    return Step(case, tuple(line.split()), keep=(), columns=columns)


FAULTS = Group(
    (
        *(
            _faulty(f"fault-new-{model}", model, more="--update-baselines --no-report")
            for model in ("stack", "filters", "attention")
        ),
        *(
            _faulty(f"fault-{model}", model)
            for model in ("stack", "stack_one", "stack_two", "filters_one", "attention_one")
        ),
        *(
            _faulty(f"fault-{model}-40", model, 40)
            for model in (
                "stack",
                "stack_two",
                "filters",
                "filters_one",
                "attention",
                "attention_one",
            )
        ),
        _faulty("fault-stack_two-x", "stack_two", more="-x"),
        _faulty("fault-filters_one-k", "filters_one", more="-k test_outputs"),
        _faulty("fault-filters-first", "filters", more="--layers first"),
    ),
    _prepare_faulty,
)


def _prepare_dump_suites(folder: Path) -> None:
    _prepare_suites(folder)
    inputs.write_dumps(folder / "dumps")


ON_DUMPS = "suites/test_dump_overflow.py suites/test_dump_distributions.py --dump-name golden --format fp8_e4m3"
DUMP_SUITES = Group(
    (
        suites(
            "suites-dump-new",
            f"{ON_DUMPS} --dump dumps/clean --update-baselines --no-report",
            keep=(),
        ),
        suites("suites-dump", f"{ON_DUMPS} --dump dumps/faulty"),
    ),
    _prepare_dump_suites,
)


def _prepare_results(folder: Path) -> None:
    for case in ("suites-mamba", "suites-llama", "suites-dump"):
        shutil.copytree(STORED / case, folder / case.removeprefix("suites-"))
    inputs.write_worse_results(folder / "mamba", folder / "worse")


REPORTS = Group(
    (
        step(
            "report",
            "qgate report mamba --output report.html --output report.md --output gates.csv --output gates.json --plots all",
        ),
        step(
            "report-compare",
            "qgate report before=mamba after=worse --output compared.html --output compared.md --exit-code",
        ),
        step("report-llama", "qgate report llama --output llama.html"),
        step("report-dump", "qgate report dump --output dump.html --output dump.md"),
        step("report-merge", "qgate report mamba llama --merge merged"),
    ),
    _prepare_results,
)

GROUPS = {
    "formats": FORMATS,
    "checkpoints": CHECKPOINTS,
    "engines": ENGINES,
    "sweeps": SWEEPS,
    "dumps": DUMPS,
    "mamba": MAMBA_MODEL,
    "llama": LLAMA_MODEL,
    "suites of mamba": MAMBA_SUITES,
    "suites of llama": LLAMA_SUITES,
    "suites of dumps": DUMP_SUITES,
    "faults": FAULTS,
    "reports": REPORTS,
}
