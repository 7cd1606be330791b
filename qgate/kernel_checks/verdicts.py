"""The verdict about a kernel that is named in words, as a record with a stable schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from qgate._version import __version__
from qgate.kernel_checks.record import WorstValue

Verdict = Literal["pass", "fail", "inconclusive", "refused"]
STATUSES: dict[Verdict, int] = {"pass": 0, "fail": 1, "inconclusive": 2, "refused": 3}
"""The exit status of each verdict."""


@dataclass
class KernelVerdict:
    """A check of one kernel: the verdict, its cause, and what was compared.

    kind             another number stands for another schema
    verdict          pass: right at all inputs. fail: wrong at one of them. inconclusive: agrees,
                     and a plain defect could not have been seen. refused: nothing was judged
    exit_status      of the command: pass 0, fail 1, inconclusive 2, refused 3
    cause            one sentence: what is wrong, or what agrees
    details          further sentences about the cause
    input            the input that the cause is about; empty if it is about none
    worst            the worst value there
    kernel           the kernel, as it was named
    like             the reference, as it was named
    files            SHA-256 of the file of the kernel and of that of the reference, if it has one
    declared         "argument 0" or "result" to its format, as it was declared
    shapes           for the example and each further input: the shape of each tensor
    dtype            of the example's tensors
    device           where the kernel ran; the reference runs on the CPU
    seed             from which the values and the drawn sizes were made
    conventions      "argument 0", "result" or "arithmetic" to what the kernel follows
    agrees_at        inputs at which the kernel agrees
    left_out         inputs that were not compared, with the reason
    largest          "argument 0" to the largest size that was tried along each of its dimensions
    smallest_defect  by kind: the smallest relative error of that kind that would have failed
    noise            float noise allowed at a typical value, relative to the RMS of the result
    error            relative squared error against unquantized values
    format_error     that of a correct kernel
    calls            of the kernel
    seconds          that the check took, with the start of the kernel's process
    notes            what else a reader should know, a sentence each
    repeat           the command that checks the same values again
    version          of qgate
    """

    verdict: Verdict
    cause: str
    kernel: str
    like: str
    exit_status: int = 0
    kind: Literal["qgate check 1"] = "qgate check 1"
    details: list[str] = field(default_factory=list)
    input: str = ""
    worst: WorstValue | None = None
    files: dict[str, str] = field(default_factory=dict)
    declared: dict[str, str] = field(default_factory=dict)
    shapes: list[list[list[int]]] = field(default_factory=list)
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    conventions: dict[str, str] = field(default_factory=dict)
    agrees_at: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    largest: dict[str, list[int]] = field(default_factory=dict)
    smallest_defect: dict[str, float | None] = field(default_factory=dict)
    noise: float | None = None
    error: float | None = None
    format_error: float | None = None
    calls: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    repeat: str = ""
    version: str = __version__
