"""Two hundred texts that somebody could name a tensor, a model or a test."""

from __future__ import annotations

_ENDINGS = ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
_CONTROLS = [chr(code) for code in (*range(9), *range(14, 28), 31, 127, 128, 0x9B, 0x9D, 0xAD)]
_DIRECTIONS = [
    chr(code) for code in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
]
_UNSEEN = ["\u200b", "\u200d", "\u2060", "\ufeff", "\ufffe", "\uffff", "\u00a0", "\u3000", "\ue000"]
_SURROGATES = ["\ud800", "\udfff", "\udc80", "x\ud83dy"]
_ESCAPES = [
    "\x1b[31mred\x1b[0m", "\x1b[2J", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\x", "\x9b31m",
    "\x1bP1$r\x1b\\", "\x1b[1A\x1b[K", "\x08\x08\x08ok",
]  # fmt: skip
_FORMULAS = [
    "=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "=HYPERLINK(\"http://x\")", "\t=1", "\r=1",
    "＝1+1", "＋1", "－1", "＠x", "=1;2", "-", "=", '"=1"', "',=1",
]  # fmt: skip
_COMMANDS = [
    "::error::x", "::error file=a,line=1::x", " ::set-output name=a::b", "\n::warning::x",
    "##[error]x", "##vso[task.setvariable]x", "a%0A::error::b", "%0D%0A", "%25", "100 %", "a:b,c=d",
    "::add-mask::x", "::stop-commands::x", "\u2028::error::x", "\r::error::x",
]  # fmt: skip
_MARKUP = [
    "<script>alert(1)</script>", "</td></tr></table>", "<!--", "-->", "]]>", "<![CDATA[x]]>",
    "&amp;", "&lt;b&gt;", "&#x27;", "&", "<", ">", '"', "'", '" onload="x', "' onload='x",
    "<img src=x onerror=alert(1)>", "</style>", "</script>", "<?xml?>", "<!DOCTYPE x>", "&x;",
    "<a href='javascript:x'>", "`", "``", "```", "`a|b`", "|", "a|b", "\\|", "\\", "\\\\|", "||",
    "| --- |", "|a|b|c|", "**x**", "_x_", "~~x~~", "# x", "- x", "1. x", "> x", "[a](b)",
    "![a](b)", "[a]: b", "@user", "#1", "GH-1", ":smile:", "$x$", "$$x$$", "http://x.y", "www.x.y",
    "https://a|b`c<d>", "@a|b", "x`@y`z", "a://`b`|c", "{{ x }}", "{% x %}", "${x}", "%s", "%(x)s",
]  # fmt: skip
_NAMES = [
    f"layers.{name_part}.weight"
    for name_part in [*_DIRECTIONS[:4], "::error::", "<b>", "|", "`", "=1"]
]
_LONG = ["x" * 100_000, "|" * 5_000, "<" * 5_000, "\x1b" * 5_000, "\u202e" * 1_000, "é" * 10_000]
_OTHER = ["", " ", "  x  ", "é", "日本語", "🎉", "a\u0301", "\x00", "a\x00b", "None", "nan", "CON",
          "../../etc", "C:\\x", "a,b;c", 'a"b', "\t", "x\ty", "\\n", "\\x1b[31m"]  # fmt: skip
_SINGLE = [*_ENDINGS, *_CONTROLS, *_DIRECTIONS, *_UNSEEN, *_SURROGATES]

HOSTILE = list(
    dict.fromkeys(
        [
            *(f"a{char}b" for char in _SINGLE),
            *_ESCAPES, *_FORMULAS, *_COMMANDS, *_MARKUP, *_NAMES, *_LONG, *_OTHER,
            "".join([*_SINGLE, *_ESCAPES, *_FORMULAS, *_COMMANDS, *_MARKUP]),
        ]
    )
)  # fmt: skip

# The names that one dump, baseline, checkpoint or model has together; `FORGED` begins a line that
# only a name can have made.
FORGED = "FORGED"
TOGETHER = [
    f"a\n::error::{FORGED}", f"::error file=x,line=1::{FORGED}", f"  ::warning::{FORGED}",
    f"##[error]{FORGED}", f"a\n##[group]{FORGED}", f"##vso[task.setvariable variable=x]{FORGED}",
    f"a\n##vso[task.complete]{FORGED}", f"a\r::set-output name=x::{FORGED}", f"a\r\n{FORGED}",
    f"a\n{FORGED} 12 passed", f"\n\n{FORGED}", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07",
    "\x1b[2J\x1b[H", "\x9b31mred", "\u202egnp.exe\u202c", "\u2066left\u2069", "a\x08\x08b", "bell\x07",
    f"tab\tstop\v{FORGED}", f"next\x85{FORGED}\u2028{FORGED}", "del\x7f\x00nul",
]  # fmt: skip
