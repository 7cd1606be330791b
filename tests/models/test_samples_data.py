"""Samples from data sets of the datasets library and folders of them, through real tokenizers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qgate.models import language
from qgate.models.huggingface import FolderTokenizer, tokenizer
from qgate.models.samples import DataRequest, read_samples
from tests.models.checkpoints import Hostile, byte_level_tokenizer
from tests.models.test_samples import read, refused, texts

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("no_network")

ROWS = ["first row", "", None, "the second, longer row", "grün und 日本"]
FULL = [row for row in ROWS if row]


def table(rows: list[Any], column: str = "text") -> Any:
    return datasets.Dataset.from_dict({"n": list(range(len(rows))), column: rows})


# Data sets on disk -------------------------------------------------------------------------------


def parquet(folder: Path) -> str:
    table(ROWS).to_parquet(folder / "a.parquet")
    return f"custom:{folder / 'a.parquet'}"


def saved(folder: Path) -> str:
    table(ROWS).save_to_disk(folder / "saved")
    return f"hf:{folder / 'saved'}"


def saved_with_a_format(folder: Path) -> str:
    """One whose rows come out as arrays, and without their text."""
    table(ROWS).with_format("numpy", columns=["n"]).save_to_disk(folder / "saved")
    return f"hf:{folder / 'saved'}"


def saved_splits(folder: Path) -> str:
    splits = {"train": table(["of the training"]), "validation": table(ROWS)}
    datasets.DatasetDict(splits).save_to_disk(folder / "saved")
    return f"hf:{folder / 'saved'}"


def hub_copy(folder: Path) -> str:
    (folder / "copy" / "data").mkdir(parents=True)
    table(["of the training"]).to_parquet(folder / "copy/data/train-00000-of-00001.parquet")
    table(ROWS[:3]).to_parquet(folder / "copy/data/validation-00000-of-00002.parquet")
    table(ROWS[3:]).to_parquet(folder / "copy/data/validation-00001-of-00002.parquet")
    (folder / "copy" / "README.md").write_text("# a data set")
    (folder / "copy" / "dataset_infos.json").write_text("{}")
    return f"hf:{folder / 'copy'}"


def json_folder(folder: Path) -> str:
    (folder / "j").mkdir()
    (folder / "j" / "val.jsonl").write_text("\n".join(json.dumps({"text": r}) for r in ROWS))
    (folder / "j" / "train.jsonl").write_text('{"text": "of the training"}')
    (folder / "j" / "requirements.txt").write_text("nothing")
    return f"hf:{folder / 'j'}"


WAYS = [parquet, saved, saved_with_a_format, saved_splits, hub_copy, json_folder]


@pytest.mark.parametrize("make", WAYS, ids=lambda make: make.__name__)
def test_the_same_rows_from_every_kind_of_copy(
    make: Callable[[Path], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = make(tmp_path)
    capfd.readouterr()
    samples = read(source)
    assert texts(samples) == FULL
    assert "2 of 5 rows read were empty and left out." in samples.notes
    assert str(tmp_path) in samples.source
    if source.startswith("hf:"):
        assert texts(read("hf:some/name", path=source[3:])) == FULL
        short = read("pile", path=source[3:], seq_len=4, num_samples=2)
        assert [len(ids[0]) for ids in short.ids] == [4, 4]
    assert capfd.readouterr() == ("", "")


def test_a_split_and_a_subset_by_name(tmp_path: Path) -> None:
    for make in (saved_splits, hub_copy, json_folder):
        (tmp_path / make.__name__).mkdir()
        source = make(tmp_path / make.__name__)
        assert texts(read(source, split="train")) == ["of the training"]
        refused(source, "'test'", "train", split="test")
    source = hub_copy(tmp_path)
    assert texts(read(source, subset="data")) == FULL
    refused(source, "no subset 'en'", "its folders are data", subset="en")
    refused(source, "no subset '../x'", subset="../x")


def test_a_known_data_set_has_its_usual_part(tmp_path: Path) -> None:
    for subset, word in (("wikitext-2-raw-v1", "wanted "), ("wikitext-103-v1", "other ")):
        (tmp_path / subset).mkdir()
        table([word * 9, "", word * 9]).to_parquet(
            tmp_path / subset / "train-00000-of-00001.parquet"
        )
        table(["test " * 50]).to_parquet(tmp_path / subset / "test-00000-of-00001.parquet")
    windows = texts(read("wikitext2", path=tmp_path, seq_len=20))
    assert len(windows) == 6
    whole = "wanted " * 9 + "\n\n\n\n" + "wanted " * 9
    assert all(window in whole for window in windows)
    refused(f"hf:{tmp_path}", "wikitext-103-v1, wikitext-2-raw-v1", "--data.subset", split="train")


def test_columns_of_tables(tmp_path: Path) -> None:
    for make in (parquet, saved):
        source = make(tmp_path)
        refused(source, "no column 'body'", "n, text", text_column="body")
        refused(source, "'n'", "text", text_column="n")
    table(FULL, "body").to_parquet(tmp_path / "b.parquet")
    assert texts(read(f"custom:{tmp_path / 'b.parquet'}", text_column="body")) == FULL
    table([]).to_parquet(tmp_path / "none.parquet")
    refused(f"custom:{tmp_path / 'none.parquet'}", "none.parquet")


def test_folders_that_say_too_little(tmp_path: Path) -> None:
    refused(f"hf:{tmp_path}", "no file to read", ".parquet")
    (tmp_path / "a.csv").write_text("text\nx\n")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}')
    refused(f"hf:{tmp_path}", "several formats: csv, jsonl", "--data.custom.format")
    assert texts(read(f"hf:{tmp_path}", format="csv")) == ["x"]
    refused(f"hf:{tmp_path}", "no file of the format 'parquet'", format="parquet")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "state.json").write_text("{}")
    refused(f"hf:{tmp_path / 'broken'}", "saved to disk")


def test_no_code_of_a_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "evil"
    folder.mkdir()
    (folder / "evil.py").write_text("open('was-run', 'w')")
    import pickle

    (folder / "train.pkl").write_bytes(pickle.dumps(Hostile()))
    refused(f"hf:{folder}", "no file to read")
    (folder / "train.jsonl").write_text('{"text": "x"}')
    assert texts(read(f"hf:{folder}")) == ["x"]
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("source", ["pile", "wikitext2", "c4", "redpajama", "hf:some/name"])
def test_no_network_names_the_local_copy(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **more: Any) -> Any:
        assert "trust_remote_code" not in more
        raise ConnectionError(f"Couldn't reach {args[0]!r}\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr(datasets, "get_dataset_split_names", fail)
    refused(
        source, "cannot be loaded (ConnectionError: Couldn't reach", "--data.path FILE or FOLDER"
    )


def test_what_the_hub_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []

    def load(*args: Any, **more: Any) -> Any:
        requests.append((args, {name: value for name, value in more.items() if value is not None}))
        return table(["x" * 3000] * 70)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_, **__: ["train", "test"])
    for source in ("pile", "wikitext2", "c4", "redpajama", "hf:some/name"):
        assert len(read(source)) == 64
    shard = "en/c4-train.00000-of-01024.json.gz"
    assert requests == [
        (("mit-han-lab/pile-val-backup", None), {"split": "validation"}),
        (("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "train"}),
        (("allenai/c4", None), {"split": "train", "data_files": {"train": shard}}),
        (("togethercomputer/RedPajama-Data-1T-Sample", None), {"split": "train", "revision": "refs/convert/parquet"}),
        (("some/name", None), {"split": "test"}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("Config name is missing.\nPlease pick one among: a, b", "--data.subset"),
        ("BuilderConfig 'x' not found. Available: ['a']", "--data.subset"),
        ("Unknown split \"x\". Should be one of ['train'].", "--data.split"),
        ("Dataset scripts are no longer supported, but found x.py", "its own code"),
    ],
)
def test_the_way_out_fits_what_went_wrong(
    text: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError(text)

    monkeypatch.setattr(datasets, "load_dataset", fail)
    refused("hf:some/name", word, text.split("\n")[0][:20], split="x")


def test_without_the_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = parquet(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused("pile", "pip install 'pytest-qgate[data]'", "--data.path")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    refused(source, "needs pyarrow", "pip install 'pytest-qgate[data]'")


def test_a_text_that_zstandard_has_packed(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    with arrow.output_stream(str(tmp_path / "val.jsonl.zst"), compression="zstd") as stream:
        stream.write("\n".join(json.dumps({"text": r}) for r in ROWS).encode())
    assert texts(read(f"custom:{tmp_path / 'val.jsonl.zst'}")) == FULL
    (tmp_path / "bad.jsonl.zst").write_bytes(b"plain")
    refused(f"custom:{tmp_path / 'bad.jsonl.zst'}", "bad.jsonl.zst")


# Tokenizers --------------------------------------------------------------------------------------


def save_tokenizer(folder: Path, *, puts: bool) -> FolderTokenizer:
    """A byte-level tokenizer with a BOS, which puts it before a text by itself or does not."""
    from tokenizers import processors

    inner = byte_level_tokenizer(400)
    if puts:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)
    return tokenizer(folder)


@pytest.mark.parametrize("puts", [True, False], ids=["puts it", "leaves it"])
def test_a_row_begins_with_one_bos(puts: bool, tmp_path: Path) -> None:
    words = save_tokenizer(tmp_path / "words", puts=puts)
    assert words.bos == 0
    path = tmp_path / "a.txt"
    path.write_text("the first line\n<s>a line with its own\n<s><s>twice\na <s> inside\n")
    samples = read_samples(DataRequest(f"custom:{path}"), words)
    heads = [ids[0, :2].tolist() for ids in samples.ids]
    assert all(head[0] == 0 and head[1] != 0 for head in heads)
    assert [int((ids == 0).sum()) for ids in samples.ids] == [1, 1, 1, 2]
    assert "each sample is the beginning of a row after one BOS, '<s>'." in samples.notes
    assert "1 of 4 samples have '<s>' in their text as well." in samples.notes
    for request in (DataRequest(), DataRequest(f"custom:{path}", format="document", seq_len=4)):
        windows = read_samples(request, words)
        assert any("without any BOS" in note for note in windows.notes)
    assert not any((ids == 0).any() for ids in read_samples(DataRequest(), words).ids)


def test_a_tokenizer_whose_files_say_no_bos(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "words", puts=False)
    file = tmp_path / "words" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"add_bos_token": False}))
    words = tokenizer(tmp_path / "words")
    (tmp_path / "a.txt").write_text("the first line\n")
    samples = read_samples(DataRequest(f"custom:{tmp_path / 'a.txt'}"), words)
    assert int(samples.ids[0][0, 0]) != 0
    assert any("without the BOS '<s>'" in note for note in samples.notes)


def test_the_marks_of_an_encoder(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "first", "line", "##s"]
    encoder = transformers.BertTokenizer(vocab={word: k for k, word in enumerate(words)})
    encoder.save_pretrained(tmp_path / "words")
    (tmp_path / "a.txt").write_text("the first lines\nthe\n")
    samples = read_samples(
        DataRequest(f"custom:{tmp_path / 'a.txt'}"), tokenizer(tmp_path / "words")
    )
    assert [ids[0].tolist() for ids in samples.ids] == [[2, 5, 6, 7, 8, 3], [2, 5, 3]]
    assert samples.decode is not None
    assert samples.decode([2, 5, 8]) == ["[CLS]", "the", "##s"]
    assert any("after one BOS, '[CLS]'" in note for note in samples.notes)


def test_each_token_has_its_text(tmp_path: Path) -> None:
    words = save_tokenizer(tmp_path / "words", puts=True)
    content = "def parse(self, text):\n    return 1"
    ids = words(content)
    assert "".join(words.decode(ids.tolist())) == content
    assert " self" not in words.decode([0])
    assert words.decode([0]) == ["<s>"]
    pieces = words.decode(words("日").tolist())
    assert len(pieces) == 3
    assert all(piece and "\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert words.decode([10**6]) == [str(10**6)]
    assert words.decode([]) == []


def test_a_space_that_a_vocabulary_marks_is_not_lost(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    mark = "\N{LOWER ONE EIGHTH BLOCK}"
    vocabulary = {"<unk>": 0, f"{mark}niz": 1, "ia": 2}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    fast.save_pretrained(tmp_path)
    words = tokenizer(tmp_path)
    assert words.bos is None
    assert words.decode([1, 2]) == [" niz", "ia"]


def test_a_very_long_row_is_cut_as_if_it_were_read_whole(tmp_path: Path) -> None:
    words = save_tokenizer(tmp_path / "words", puts=True)
    text = language.text("evaluation", 2**16).replace("\n", " ")
    (tmp_path / "a.txt").write_text(text)
    samples = read_samples(DataRequest(f"custom:{tmp_path / 'a.txt'}", seq_len=50), words)
    assert samples.ids[0][0].tolist() == words.encode(text, special=True)[:50].tolist()
