"""Files made worse: bytes, trees of JSON, archives with other contents, by choices out of bytes.

All choices come from one string of bytes, so that Hypothesis shrinks them, a coverage-guided fuzzer
steers them, and a finding is kept as that string.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import struct
import zipfile
from typing import Any

DEEP = "@@deep@@"
DEEP_TEXT = "[" * 60_000 + "]" * 60_000
TWICE = "@@twice@@"
LONG = "x" * 200_000
ODD_TEXTS = (
    "", " ", "\0", "\n", "\r\n::error::x", "a\x1b[31m", "\u202eabc", "\ud800", "💥" * 50, LONG, "nan",
    "inf", "-inf", "1e999", "../outside/secret", "/etc/passwd", "..", ".", "a/b", "C:\\x", "%n%s",
    "{0}", "<script>", "__class__", "=1+1", "float32", "torch", "os", "0", "-1", "1" * 5000, "fp32",
    "plain", "~root", "file:///etc/passwd", "s3://x/y", "(a+)+$", "[", "*", "\\",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 255, 2**31, 2**32 - 1, 2**53, 2**63, 2**64, 10**18, -(10**18),
    10**30, 10**400, 10**4000, 0.5, -0.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"),
    float("-inf"), [], {}, [[]], [{}], {"": None}, [0] * 2000, ["a"] * 50, {"a": {"b": {"c": []}}},
    [None], [1, "a", None, {}], {str(k): k for k in range(200)}, DEEP,
)  # fmt: skip
_SIZES = (0, 1, 7, 8, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1,
          2**63, 2**64 - 1)  # fmt: skip
_TOKENS = (
    b"\0", b"\xff", b"\n", b"\r", b'"', b"{", b"}", b"[", b"]", b",", b":", b"#", b"&a ", b"*a", b"<<: ",
    b"!!python/object/apply:os.system ['touch canary']", b"!!binary ", b"NaN", b"1e999", b"9" * 30,
    b"9" * 5000, b"-1", b"../", b"/", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xff\xfe", b"\x1b[2J",
    b"[" * 3000, b"{" * 3000, b"- " * 2000, b"a: " * 500, b"\t", b"'''", b'"""', b"0x", b"1_0",
    b"2001-99-99", b"%", b"\x80\x04", b".", b"PK\x03\x04", b"\x93NUMPY", b"cos\nsystem\n",
)  # fmt: skip


class Choices:
    """Numbers out of a string of bytes; nothing but zeros once it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def below(self, count: int) -> int:
        """From 0 to one less than `count`."""
        need = 1 if count <= 256 else 2 if count <= 65_536 else 4
        chunk = self._data[self._at : self._at + need]
        self._at += need
        return int.from_bytes(chunk, "little") % max(count, 1)

    def of(self, listed: Any) -> Any:
        return listed[self.below(len(listed))]

    @property
    def rest(self) -> bytes:
        return self._data[self._at :]

    @property
    def more(self) -> bool:
        return self._at < len(self._data)


def mutated(name: str, data: bytes, choices: Choices) -> bytes:
    """A file of that name with up to four things done to it."""
    for _ in range(1 + choices.below(4)):
        data = _once(name, data, choices)
        if not choices.more:
            break
    return data


def _once(name: str, data: bytes, choices: Choices) -> bytes:
    if choices.below(4) == 0:
        return _bytes(data, choices)
    ending = name.rpartition(".")[2]
    try:
        if ending in ("json", "ipynb"):
            return text_of(_tree(json.loads(data), choices), choices)
        if ending in ("jsonl", "ndjson"):
            return _lines(data, choices)
        if ending == "safetensors":
            return _safetensors(data, choices)
        if ending == "onnx":
            mutation = importlib.import_module("tests.campaigns.fuzzing.onnx_mutation")
            return bytes(mutation.mutated_model(data, choices))
        if ending == "npy":
            return _npy(data, choices)
        if ending in ("npz", "pt", "pth", "bin", "zip") and zipfile.is_zipfile(io.BytesIO(data)):
            return _zip(data, choices)
        if ending in ("toml", "yaml", "yml", "txt", "csv", "tsv"):
            return _text(data, choices)
    except Exception:
        return _bytes(data, choices)
    return _bytes(data, choices)


# Bytes -------------------------------------------------------------------------------------------


def _bytes(data: bytes, choices: Choices) -> bytes:
    kind, size = choices.below(10), len(data)
    at = choices.below(size + 1)
    end = min(size, at + 1 + choices.below(256))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[end:]
    if kind == 2:
        return data[:end] + data[at:end] * (1 + choices.below(64)) + data[end:]
    if kind == 3:
        return data[:at] + choices.of(_TOKENS) + data[at:]
    if kind == 4:
        return data[:at] + choices.of(_TOKENS) + data[end:]
    if kind == 5:
        wide = choices.of((1, 2, 4, 8))
        put = (choices.of(_SIZES) % 256**wide).to_bytes(wide, choices.of(("little", "big")))
        return data[:at] + put + data[at + wide :]
    if kind == 6 and at < size:
        return data[:at] + bytes([data[at] ^ (1 << choices.below(8))]) + data[at + 1 :]
    if kind == 7:
        return data[at:] + data[:at]
    if kind == 8:
        numbers = list(re.finditer(rb"[0-9]+", data))
        if numbers:
            number = choices.of(numbers)
            put = str(choices.of(ODD[3:24])).encode()
            return data[: number.start()] + put + data[number.end() :]
    return data[:at] + choices.rest[:64] + data[end:]


def _text(data: bytes, choices: Choices) -> bytes:
    """Lines of a text moved about, and values in them replaced."""
    lines = data.split(b"\n")
    at = choices.below(len(lines))
    kind = choices.below(6)
    if kind == 0:
        lines.insert(choices.below(len(lines) + 1), lines[at])
    elif kind == 1:
        del lines[at]
    elif kind == 2:
        lines[at] = b"  " * (1 + choices.below(4)) + lines[at]
    elif kind == 3:
        lines[at] = lines[at] + choices.of(_TOKENS)
    elif kind == 4:
        head, sign, _ = lines[at].partition(choices.of((b": ", b" = ", b" ", b",")))
        put = json.dumps(choices.of((*ODD_TEXTS, *ODD))).encode()
        lines[at] = head + sign + put.replace(b'"@@deep@@"', DEEP_TEXT[:6000].encode())
    else:
        return _bytes(data, choices)
    return b"\n".join(lines)


# JSON --------------------------------------------------------------------------------------------


def _places(tree: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    paths = [place]
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree[:40])
        if isinstance(tree, list)
        else ()
    )
    for key, value in items:
        paths += _places(value, (*place, key))
    return paths


def _tree(tree: Any, choices: Choices) -> Any:
    """A value of a tree replaced, taken out, doubled or put elsewhere; the tree is one's own."""
    places = _places(tree)
    path = choices.of(places)
    if not path:
        return choices.of(ODD)
    holder = tree
    for key in path[:-1]:
        holder = holder[key]
    last, kind = path[-1], choices.below(8)
    if kind == 0:
        del holder[last]
    elif kind == 1:
        holder[last] = [holder[last]]
    elif kind == 2 and isinstance(holder, dict):
        holder[choices.of(ODD_TEXTS)] = holder.pop(last)
    elif kind == 3 and isinstance(holder, dict):
        holder[f"{TWICE}{last}"] = choices.of(ODD)
    elif kind == 4:
        other = tree
        for key in choices.of(places):
            other = other[key]
        holder[last] = json.loads(json.dumps(other))
    elif kind == 5:
        holder[last] = choices.of(ODD_TEXTS)
    else:
        holder[last] = choices.of(ODD)
    return tree


def text_of(tree: Any, choices: Choices) -> bytes:
    """JSON, with what its writer cannot write: depth, and a key that is there twice."""
    text = json.dumps(tree, ensure_ascii=choices.below(2) == 0)
    text = text.replace(f'"{DEEP}"', DEEP_TEXT).replace(TWICE, "")
    return text.encode("utf-8", "surrogatepass")


def _lines(data: bytes, choices: Choices) -> bytes:
    lines = data.split(b"\n")
    at = choices.below(len(lines))
    kind = choices.below(6)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(choices.below(len(lines) + 1), lines[at])
    elif kind == 2:
        lines[at] = lines[at][: choices.below(len(lines[at]) + 1)]
    else:
        lines[at] = text_of(_tree(json.loads(lines[at]), choices), choices)
    return b"\n".join(lines)


# Containers --------------------------------------------------------------------------------------


def _safetensors(data: bytes, choices: Choices) -> bytes:
    """The header as a tree; sometimes with a length that lies."""
    length = int.from_bytes(data[:8], "little")
    header = text_of(_tree(json.loads(data[8 : 8 + length]), choices), choices)
    size = len(header) if choices.below(6) else choices.of(_SIZES)
    return struct.pack("<Q", size) + header + data[8 + length :]


def _npy(data: bytes, choices: Choices) -> bytes:
    """Another header: a shape, a type, an order, or no literal at all."""
    length = int.from_bytes(data[8:10], "little")
    header = data[10 : 10 + length].decode("latin-1")
    kind = choices.below(5)
    if kind == 0:
        shape = choices.of(("(10**9,)", "(1000000000000,)", "(-1,)", "(2, -8)", "()", "('a',)", "(4, 4", "(0,)",
                            "(True,)", "(1000000000, 1000000000)", "(4611686018427387904, 4)", "[16]"))  # fmt: skip
        header = re.sub(r"\(.*\)", lambda _: shape, header)
    elif kind == 1:
        put = choices.of(("|O", "<f16", "<c16", "<M8[s]", "|V8", "|S1000000", "<U9", "|b1", ">f4", "x", "<f4,<f4",
                          "|i1", "<u8", "<f2"))  # fmt: skip
        header = re.sub(r"'descr': '[^']*'", f"'descr': '{put}'", header)
    elif kind == 2:
        put = choices.of(("__import__('os').system('touch canary')", "(" * 500, "[" * 5000, "{", "1e999", "-" * 3000,
                          "'" + "a" * 20000 + "'", "\n\t\f", "{'a': 1}"))  # fmt: skip
        header = header[: choices.below(len(header))] + put
    elif kind == 3:
        header = header.replace("False", choices.of(("True", "1", "None", "[]")))
    else:
        return _bytes(data[: 10 + length], choices) + data[10 + length :]
    raw = header.encode("latin-1")[:65000]
    return data[:8] + struct.pack("<H", len(raw)) + raw + data[10 + length :]


def _zip(data: bytes, choices: Choices) -> bytes:
    """A member made worse and packed anew, so that checksums hold; or the directory itself."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(entry, archive.read(entry)) for entry in archive.infolist()[:200]]
    at = choices.below(len(members))
    kind = choices.below(8)
    buffer = io.BytesIO()
    packing = choices.of((zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(buffer, "w", packing) as archive:
        for number, (entry, content) in enumerate(members):
            name, put = entry.filename, content
            if number == at:
                if kind == 0:
                    continue
                if kind == 1:
                    name = choices.of(
                        ("../x.npy", "/x.npy", "a\\b", "x" * 3000, ".npy", "archive/data/0", "é")
                    )
                elif kind < 6:
                    put = _once(name if "." in name else "x.pkl", content, choices)
                elif kind == 6:
                    put = content * 50
            archive.writestr(name, put)
            if number == at and kind == 7:
                archive.writestr(name, choices.rest[:100])
    packed = buffer.getvalue()
    if kind == 5 and choices.below(2):
        return _bytes(packed, choices)
    return packed
