"""Samples of every data source: what is in them, that nothing else is, and what is refused."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from qgate.errors import QgateError
from qgate.models import language
from qgate.models.samples import ByteTokenizer, DataRequest, Samples, check_ids, read_samples
from tests.models.checkpoints import Hostile

BYTES = ByteTokenizer()
LINES = ["first line", "the second, longer one", "grün und 日本"]


class BeginningBytes(ByteTokenizer):
    """Bytes with a BOS, as a tokenizer with one gives them."""

    bos: int | None = 256

    def encode(self, text: str, *, special: bool = False) -> Tensor:
        ids = super().encode(text)
        return torch.cat([torch.tensor([256]), ids]) if special else ids

    def decode(self, ids: Any) -> list[str]:
        return ["<s>" if int(k) == 256 else super(BeginningBytes, self).decode([k])[0] for k in ids]


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(samples: Samples) -> list[str]:
    return [bytes(ids[0].tolist()).decode() for ids in samples.ids]


def read(source: str, tokenizer: Any = BYTES, **fields: Any) -> Samples:
    samples = read_samples(DataRequest(source, **fields), tokenizer)
    for ids in samples.ids:
        assert (ids.dtype, ids.dim(), ids.shape[0]) == (torch.int64, 2, 1)
        assert ids.numel()
        assert ids.is_contiguous()
    assert samples.tokens == sum(ids.numel() for ids in samples.ids)
    assert all(note.endswith(".") for note in samples.notes)
    return samples


def refused(source: str, *words: str, tokenizer: Any = BYTES, **fields: Any) -> None:
    with pytest.raises(QgateError) as caught:
        read_samples(DataRequest(source, **fields), tokenizer)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


# Built-in text -----------------------------------------------------------------------------------


def test_the_built_in_text_gives_windows_that_do_not_overlap() -> None:
    samples = read("builtin")
    assert (len(samples), samples.longest) == (64, 512)
    text = language.text("evaluation", 64 * 512)
    windows = texts(samples)
    assert len(set(windows)) == 64
    assert all(window in text for window in windows)
    assert any("without any BOS" in note for note in samples.notes)
    assert "built-in language" in samples.source
    assert samples.decode is not None
    assert "".join(samples.decode(samples.ids[0][0].tolist())) == windows[0]


def test_more_samples_keep_those_there_were() -> None:
    few, many = read("builtin", num_samples=4), read("builtin", num_samples=9)
    assert texts(few) == texts(many)[:4]
    assert texts(read("builtin", num_samples=4, seed=1)) != texts(few)
    assert read("builtin", seq_len=32).longest == 32


def test_the_built_in_text_gives_as_many_windows_as_are_asked_for() -> None:
    samples = read("builtin", num_samples=300, seq_len=1024)
    assert len({row.numpy().tobytes() for row in samples.ids}) == 300
    assert not any("fewer" in note for note in samples.notes)
    refused("builtin", "are not allowed", "fewer or shorter samples", seq_len=2**26)


def test_fewer_windows_than_asked_are_told(tmp_path: Path) -> None:
    path = written(tmp_path / "short.txt", "word " * 100)
    samples = read(f"custom:{path}", num_samples=10, seq_len=100, format="document")
    assert len(samples) == 5
    assert any("fewer than the 10 asked for" in note for note in samples.notes)
    words = "fewer than the 1000", "--data.seq_len"
    refused(f"custom:{path}", *words, seq_len=1000, format="document")


def test_no_random_state_but_the_own_one_is_used(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "\n".join(f"row {k}" * 9 for k in range(99)))

    def states() -> list[bytes]:
        return [
            repr(random.getstate()).encode(),
            repr(np.random.get_state()).encode(),  # noqa: NPY002
            torch.get_rng_state().numpy().tobytes(),
        ]

    before = states()
    sources = {"builtin": {}, f"custom:{path}": {}, "pile": {"path": path, "seq_len": 16}, f"hf:{path}": {}}  # fmt: skip
    first = [texts(read(source, num_samples=5, **more)) for source, more in sources.items()]
    assert states() == before
    random.seed(1)
    torch.manual_seed(1)
    second = [texts(read(source, num_samples=5, **more)) for source, more in sources.items()]
    assert first == second


# Files -------------------------------------------------------------------------------------------

TABLE = 'n,text\n1,"first line"\n2,"the second, longer one"\n3,grün und 日本\n'
AS_FILES: dict[str, tuple[str, str | bytes]] = {
    "lines": ("a.txt", "\n".join(LINES)),
    "lines with an end": ("a.txt", "\n".join(LINES) + "\n"),
    "lines of windows": ("a.txt", "\r\n".join(LINES) + "\r\n"),
    "a byte order mark": ("a.txt", b"\xef\xbb\xbf" + "\n".join(LINES).encode()),
    "a path with spaces": ("my dätä/a b:c.txt", "\n".join(LINES)),
    "json array of texts": ("a.json", json.dumps(LINES)),
    "json array of objects": ("a.json", json.dumps([{"text": t} for t in LINES], indent=2)),
    "json of columns": ("a.json", json.dumps({"text": LINES, "n": [1, 2, 3]})),
    "json that is lines": ("a.json", "\n".join(json.dumps({"text": t}) for t in LINES)),
    "json lines": ("a.jsonl", "\n\n".join(json.dumps({"n": 1, "text": t}) for t in LINES) + "\n"),
    "json lines of texts": ("a.jsonl", "\n".join(json.dumps(t, ensure_ascii=False) for t in LINES)),
    "json lines in one array": ("a.jsonl", json.dumps([{"text": t} for t in LINES])),
    "json lines with a mark": ("a.jsonl", b"\xef\xbb\xbf" + "\r\n".join(json.dumps({"text": t}) for t in LINES).encode()),
    "csv": ("a.csv", TABLE),
    "csv of windows": ("a.csv", b"\xef\xbb\xbf" + TABLE.replace("\n", "\r\n").encode()),
    "tsv": ("a.tsv", "text\tn\n" + "".join(f"{t}\t1\n" for t in LINES)),
    "gz": ("a.jsonl.gz", gzip.compress("\n".join(json.dumps({"text": t}) for t in LINES).encode())),
}  # fmt: skip


@pytest.mark.parametrize("case", AS_FILES)
def test_the_same_rows_from_every_kind_of_file(case: str, tmp_path: Path) -> None:
    name, content = AS_FILES[case]
    path = written(tmp_path / name, content)
    assert path.is_absolute()
    samples = read(f"custom:{path}")
    assert texts(samples) == LINES
    assert str(path) in samples.source
    assert any("3 samples are used, fewer than the 64" in note for note in samples.notes)
    assert any("3 of 3 samples are shorter than 1024" in note for note in samples.notes)


def test_a_relative_path_and_one_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path / "a.txt", "x\ny")
    for source in ("custom:a.txt", "Custom: ./a.txt", "custom:~/a.txt"):
        assert texts(read(source)) == ["x", "y"]


def test_short_rows_stay_short_and_long_ones_are_cut(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "abc\n" + "0123456789" * 9 + "\nde\n")
    samples = read(f"custom:{path}", seq_len=12)
    assert texts(samples) == ["abc", "012345678901", "de"]
    assert any("2 of 3 samples are shorter than 12" in note for note in samples.notes)


def test_quotes_and_lines_inside_a_csv_field(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'text,n\n"say ""a,b""\nand more",1\n,2\n"x",3\n')
    samples = read(f"custom:{path}")
    assert texts(samples) == ['say "a,b"\nand more', "x"]
    assert any("1 of 3 rows read were empty" in note for note in samples.notes)
    long = written(tmp_path / "long.csv", f"text\n{'x' * 300_000}\n")
    assert read(f"custom:{long}").longest == 1024


def test_empty_and_null_rows_are_left_out_and_told(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": None}, {"text": "  "}, {"text": ""}, {"text": "b"}]
    path = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    samples = read(f"custom:{path}", num_samples=2)
    assert texts(samples) == ["a", "b"]
    text = written(tmp_path / "a.txt", "a\n\n\nb\n\n")
    samples = read(f"custom:{text}")
    assert texts(samples) == ["a", "b"]
    assert "3 of 5 rows read were empty and left out." in samples.notes
    empty = written(tmp_path / "null.jsonl", '{"text": null}\n')
    refused(f"custom:{empty}", "none of its 1 rows has any text")


def test_rows_are_drawn_by_the_seed_and_kept_in_order(tmp_path: Path) -> None:
    rows = [f"row {k:03}" for k in range(200)]
    path = written(tmp_path / "a.txt", "\n".join(rows))
    first = texts(read(f"custom:{path}", num_samples=10))
    assert first == sorted(first)
    assert set(first) <= set(rows)
    assert first != texts(read(f"custom:{path}", num_samples=10, seed=1))
    assert set(first) <= set(texts(read(f"custom:{path}", num_samples=20)))


def test_a_document_is_cut_in_windows(tmp_path: Path) -> None:
    text = "".join(f"line {k:04}\n" for k in range(100))
    path = written(tmp_path / "a.md", text)
    samples = read(f"custom:{path}", format="document", num_samples=5, seq_len=40)
    assert all(len(row) == 40 and row in text for row in texts(samples))
    words = "1000 tokens, fewer than the 1024", "--data.seq_len 1000"
    refused(f"custom:{path}", *words, format="document")
    refused(f"custom:{path}", "ending", "--data.custom.format")


def test_another_column(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"content": "abc", "n": 3}\n')
    assert texts(read(f"custom:{path}", text_column="content")) == ["abc"]
    refused(f"custom:{path}", "no column 'text' in line 1", "content, n", "text_column")
    refused(f"custom:{path}", "no text in 'n' of line 1, but int '3'", text_column="n")


BROKEN: dict[str, tuple[str, str | bytes, list[str]]] = {
    "broken line": ("a.jsonl", '{"text": "a"}\n\n{"text": "b"}\n{"text: "c"}\n', ["broken JSON in line 4", "column"]),
    "broken line in json": ("a.json", '{"text": "a"}\n{"text": "b"}\n\n{"text": }\n', ["broken JSON in line 4"]),
    "broken array": ("a.json", '[{"text": "a"},\n {"text" "b"}]', ["broken JSON", "line 2, column 10"]),
    "no column in a later row": ("a.jsonl", '{"text": "a"}\n{"txt": "b"}\n', ["no column 'text' in line 2", "it has txt"]),
    "no column in an array": ("a.json", '[{"a": "x"}]', ["no column 'text' in item 1", "it has a"]),
    "no column in an object": ("a.json", '{"a": ["x"], "b": 1}', ["no column 'text'", "a, b"]),
    "not text": ("a.json", '[{"text": ["x"]}]', ["no text in 'text' of item 1", "list"]),
    "a number": ("a.json", "3", ["item 1", "int '3'"]),
    "empty array": ("a.json", "[]", ["0 rows"]),
    "deep": ("a.json", "[" * 100000, ["a.json"]),
    "empty": ("a.txt", "", ["is empty"]),
    "blank": ("a.txt", " \n\n", ["is empty"]),
    "empty json": ("a.json", "", ["is empty"]),
    "only a mark": ("a.txt", b"\xef\xbb\xbf", ["is empty"]),
    "latin-1": ("a.txt", b"abc\ncaf\xe9 au lait\n", ["0xe9 at position 7, in line 2", "UTF-8"]),
    "utf-16": ("a.txt", "abc".encode("utf-16"), ["UTF-16", "save it in UTF-8"]),
    "binary": ("a.txt", b"abc\n\0\0", ["not text", "position 4, in line 2"]),
    "header only": ("a.csv", "text,n\n", ["0 rows"]),
    "csv without the column": ("a.csv", "a,b\n1,2\n", ["no column 'text' in its header", "a, b"]),
    "csv with a stray comma": ("a.csv", "text\nhello\nhello, world\n", ["2 fields", "line 3", "quotes"]),
    "csv with an open quote": ("a.csv", 'text\n"abc\n', ["broken CSV"]),
    "no gz": ("a.txt.gz", b"plain", ["a.txt.gz"]),
    "half a gz": ("a.txt.gz", gzip.compress(b"x" * 99999)[:60], ["a.txt.gz"]),
    "no parquet": ("a.parquet", b"plain text, and not a table", ["damaged or no Parquet file"]),
    "empty parquet": ("a.parquet", b"", ["is empty"]),
    "half a character": ("a.jsonl", '{"text": "ok"}\n{"text": "x\\ud800y"}\n', ["row 1", "position 1", "surrogate"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_bad_file_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    name, content, words = BROKEN[case]
    path = written(tmp_path / name, content)
    refused(f"custom:{path}", *words)


def test_what_is_no_file(tmp_path: Path) -> None:
    refused(f"custom:{tmp_path}", "is a folder", "hf:")
    refused(f"custom:{tmp_path}/nope.txt", "there is no file", "nope.txt")
    refused("custom:" + "x" * 5000, "cannot be read")
    loop = tmp_path / "loop.txt"
    loop.symlink_to(loop)
    refused(f"custom:{loop}", "loop.txt")


@pytest.mark.parametrize(
    ("source", "words", "fields"),
    [
        ("wikitext", ["unknown data source 'wikitext'", "mean wikitext2"], {}),
        ("piel", ["mean pile"], {}),
        ("custom", ["custom:FILE"], {}),
        ("custom:", ["nothing after the colon", "custom:FILE"], {}),
        ("hf: ", ["hf:NAME"], {}),
        ("pile:x", ["unknown data source"], {}),
        ("data.txt", ["custom:data.txt"], {}),
        ("", ["unknown data source ''"], {}),
        ("builtin", ["num_samples 0", "from 1"], {"num_samples": 0}),
        ("builtin", ["seq_len -1"], {"seq_len": -1}),
        ("builtin", ["seed -1"], {"seed": -1}),
        ("builtin", ["format 'yaml'", "jsonl"], {"format": "yaml"}),
        ("builtin", ["data.path 'x'", "custom:FILE"], {"path": "x"}),
        ("custom:x", ["data.split 'train'"], {"split": "train"}),
        ("pile", ["data.path 'nope'", "no such file or folder"], {"path": "nope"}),
    ],
)  # fmt: skip
def test_a_request_that_no_source_answers(
    source: str, words: list[str], fields: dict[str, Any]
) -> None:
    refused(source, *words, **fields)


def test_text_needs_a_tokenizer() -> None:
    for source in ("builtin", "pile", "custom:x.txt", "hf:x"):
        refused(source, "no tokenizer", "tokens:FILE.npy", tokenizer=None)


def test_a_bos_is_there_once_for_rows_and_never_for_windows(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "abc\n" + "x" * 99)
    samples = read(f"custom:{path}", BeginningBytes(), seq_len=8)
    assert [ids[0].tolist() for ids in samples.ids] == [[256, *b"abc"], [256, *b"x" * 7]]
    assert any("after one BOS, '<s>'" in note for note in samples.notes)
    for source, more in (("builtin", {}), (f"custom:{path}", {"format": "document", "seq_len": 8})):
        samples = read(source, BeginningBytes(), **more)
        assert not any((ids == 256).any() for ids in samples.ids)


def test_rows_beyond_the_vocabulary_are_named() -> None:
    samples = read("builtin", num_samples=2)
    check_ids(samples, 256, "tiny")
    with pytest.raises(QgateError, match=r"tiny takes token ids from 0 to 9, but sample 0"):
        check_ids(samples, 10, "tiny")


# Long rows ---------------------------------------------------------------------------------------


def test_long_rows_give_windows(tmp_path: Path) -> None:
    rows = [f"{k:03}:" + "".join(f"{j:03}" for j in range(100)) for k in range(50)]
    rows += ["short", ""] * 20
    path = written(tmp_path / "val.jsonl", "\n".join(json.dumps({"text": r}) for r in rows))
    samples = read("pile", path=path, num_samples=20, seq_len=100)
    windows = texts(samples)
    assert [len(window) for window in windows] == [100] * 20
    assert all(any(window in row for row in rows) for window in windows)
    assert len({row.find(window) for window in windows for row in rows if window in row}) > 5
    assert samples.source.startswith(f"pile: {path}")
    assert any("without any BOS" in note for note in samples.notes)


@pytest.mark.parametrize("long", [0, 2])
def test_a_search_for_long_rows_ends(long: int, tmp_path: Path) -> None:
    rows = ["tiny"] * 500 + ["x" * 100] * long
    path = written(tmp_path / "a.txt", "\n".join(rows))
    samples = read("c4", path=path, num_samples=10, seq_len=50)
    assert sorted(map(len, texts(samples))) == [4] * (10 - long) + [50] * long
    assert any(f"only {long} of 5" in note and "shorter rows" in note for note in samples.notes)


def test_wikitext_is_one_text(tmp_path: Path) -> None:
    text = "".join(f" = Title {k} = \n\n text {k}\n" for k in range(50))
    for name in ("wiki.train.raw", "a.txt"):
        path = written(tmp_path / name, text)
        windows = texts(read("wikitext2", path=path, num_samples=6, seq_len=64))
        assert len(windows) == 6
        assert all(window in text for window in windows)


# Token ids ---------------------------------------------------------------------------------------


def test_rows_of_token_ids(tmp_path: Path) -> None:
    table = torch.arange(12).reshape(3, 4)
    np.save(tmp_path / "a.npy", table.numpy().astype(np.uint16))
    torch.save(table.int(), tmp_path / "a.pt")
    save_file({"ids": table}, tmp_path / "a.safetensors")
    for name in ("a.npy", "a.pt", "a.safetensors"):
        samples = read(f"tokens:{tmp_path / name}", None)
        assert [ids[0].tolist() for ids in samples.ids] == table.tolist()
        assert samples.decode is None
        assert any("3 samples are used, fewer than the 64" in note for note in samples.notes)
        assert len(read(f"tokens:{tmp_path / name}", BYTES, num_samples=2, seq_len=3)) == 2
    assert read(f"tokens:{tmp_path / 'a.npy'}").decode is not None


def test_rows_of_different_lengths_and_padded_ones(tmp_path: Path) -> None:
    torch.save([torch.tensor([1, 2, 3]), torch.tensor([4])], tmp_path / "a.pt")
    save_file({"b": torch.tensor([4]), "a": torch.tensor([1, 2, 3])}, tmp_path / "a.safetensors")
    np.save(tmp_path / "a.npy", np.array([[1, 2, 3], [4, -100, -100], [-1, -1, -1]]))
    for name in ("a.pt", "a.safetensors", "a.npy"):
        samples = read(f"tokens:{tmp_path / name}", None)
        assert [ids[0].tolist() for ids in samples.ids] == [[1, 2, 3], [4]]
    assert any("5 negative ids" in note for note in samples.notes)


def test_one_long_row_of_ids_is_cut_in_windows(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(100))
    samples = read(f"tokens:{tmp_path / 'a.npy'}", None, seq_len=30)
    starts = sorted(int(ids[0, 0]) for ids in samples.ids)
    assert starts == [0, 30, 60]
    assert any("100 tokens, 3 windows of 30" in note for note in samples.notes)


def saved(array: Any) -> Callable[[Path], object]:
    return lambda path: np.save(path, np.asarray(array), allow_pickle=True)


def pickled(content: Any) -> Callable[[Path], object]:
    return lambda path: torch.save(content, path)


def bytes_of(content: bytes) -> Callable[[Path], object]:
    return lambda path: written(path, content)


BAD_IDS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "array of objects": ("a.npy", saved(np.array([Hostile()], dtype=object)), "run code"),
    "pickled object": ("a.pt", pickled({"ids": Hostile()}), "run code"),
    "floats": ("a.npy", saved([1.0, 1.0]), "whole numbers"),
    "tensor of floats": ("a.pt", pickled(torch.ones(3)), "float32"),
    "three axes": ("a.npy", saved(np.ones((2, 2, 2), "i8")), "(2, 2, 2)"),
    "negative inside": ("a.npy", saved([[1, 2], [-1, 2]]), "id -1 at position 0 of row 1"),
    "no ids": ("a.npy", saved(np.zeros((0, 4), "i8")), "no token ids"),
    "empty file": ("a.npy", bytes_of(b""), "empty file"),
    "damaged": ("a.safetensors", bytes_of(b"plain text"), "damaged"),
    "other ending": ("a.txt", bytes_of(b"1 2 3"), ".npy, .pt"),
    "missing": ("a.npy", lambda path: path, "there is no file"),
}


@pytest.mark.parametrize("case", BAD_IDS)
def test_a_bad_file_of_token_ids_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, write, word = BAD_IDS[case]
    write(tmp_path / name)
    refused(f"tokens:{tmp_path / name}", word, tokenizer=None)
    assert not (tmp_path / "was-run").exists()


# Properties --------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
ROWS = st.lists(st.none() | TEXT, max_size=30)
FIELD = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1)
ENDINGS = ["a.txt", "a.json", "a.jsonl", "a.csv", "a.txt.gz", "a.parquet", "a.npy", "a.pt"]


@settings(max_examples=80)
@given(ROWS, st.integers(1, 40), st.integers(1, 50), st.integers(0, 3))
def test_samples_hold_only_what_the_rows_have(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[str | None],
    number: int,
    length: int,
    seed: int,
) -> None:
    path = tmp_path_factory.mktemp("rows") / "a.json"
    path.write_text(json.dumps([{"text": row} for row in rows]))
    request = {"num_samples": number, "seq_len": length, "seed": seed}
    full = [row.encode() for row in rows if row is not None and row.strip()]
    if not full:
        refused(f"custom:{path}", "row", **request)
        return
    for source, more in ((f"custom:{path}", {}), ("pile", {"path": path})):
        samples = read(source, **request, **more)
        assert len(samples) == min(number, len(full))
        assert samples.longest <= length
        for ids in samples.ids:
            content = bytes(ids[0].tolist())
            assert any(content in row for row in full)
            assert len(content) == length or content in full
        assert [a.tolist() for a in samples.ids] == [
            a.tolist() for a in read(source, **request, **more).ids
        ]


@settings(max_examples=60)
@given(st.lists(FIELD, min_size=1, max_size=8))
def test_a_table_gives_back_its_fields(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str]
) -> None:
    quoted = ['"' + row.replace('"', '""') + '"' for row in rows]
    path = tmp_path_factory.mktemp("rows") / "a.csv"
    path.write_bytes(("text,n\n" + "".join(f"{row},1\n" for row in quoted)).encode())
    full = [row for row in rows if row.strip()]
    if full:
        assert texts(read(f"custom:{path}", seq_len=10000)) == full


@settings(max_examples=150)
@given(st.binary(max_size=60), st.sampled_from(ENDINGS))
def test_any_bytes_are_samples_or_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    path = written(tmp_path_factory.mktemp("any") / name, content)
    kind = "tokens" if name in ("a.npy", "a.pt") else "custom"
    try:
        read(f"{kind}:{path}")
    except QgateError as error:
        if not re.search(re.escape(name), str(error)):
            assert "surrogate" in str(error)  # noqa: PT017
