"""Processes of kernels as forks of one that has loaded torch and nothing of qgate.

Loading torch takes seconds and a check a tenth of one. All else is as `qgate check` does it: the same
program, the same streams, the same environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qgate.cli import main
from qgate.kernel_checks.starting import OWN_CODE, SOURCE

SERVER = """
import os, signal, socket, sys
import torch, torch.nn.functional
torch.randn(4, 4) @ torch.randn(4, 4)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
source, number = sys.argv[1], int(sys.argv[2])
server = socket.socket(fileno=number)
while True:
    data, descriptors, _, _ = socket.recv_fds(server, 1 << 16, 2)
    if not data:
        break
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        server.close()
        os.chdir(data.decode())
        for target, descriptor in enumerate(descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        torch.set_num_threads(1)
        exec(compile(source, NAME, "exec"), {"__name__": NAME})
        os._exit(0)
    for descriptor in descriptors:
        os.close(descriptor)
    server.send(str(pid).encode())
"""


class WarmKernels:
    """Starts processes in the place of `qgate.kernel_checks.starting.start_process`."""

    def __init__(self) -> None:
        self.socket, other = socket.socketpair()
        source = SOURCE.read_text(encoding="utf-8")
        program = SERVER.replace("NAME", repr(OWN_CODE))
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("QGATE_", "PYTEST_"))
        }
        self.server = subprocess.Popen(
            [sys.executable, "-c", program, source, str(other.fileno())],
            pass_fds=[other.fileno()],
            env=environment,
        )
        other.close()

    def start(self, _quiet: bool) -> WarmProcess:
        """Start one process in the folder where we are."""
        requests, answers = os.pipe(), os.pipe()
        socket.send_fds(self.socket, [str(Path.cwd()).encode()], [requests[0], answers[1]])
        pid = int(self.socket.recv(32))
        os.close(requests[0])
        os.close(answers[1])
        return WarmProcess(pid, requests[1], answers[0])

    def close(self) -> None:
        self.socket.close()
        self.server.wait()


class WarmProcess:
    """What `RemoteKernel` needs of a process."""

    def __init__(self, pid: int, requests: int, answers: int) -> None:
        self.pid = pid
        self.stdin: Any = os.fdopen(requests, "wb")
        self.stdout: Any = os.fdopen(answers, "rb")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, 9)

    def wait(self) -> int:
        return 3


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Run `qgate check --json`; its exit status is that of the verdict, and nothing else is printed."""
    status = main(["check", *words, "--json"])
    out, err = capsys.readouterr()
    verdict: dict[str, Any] = json.loads(out)
    assert err == ""
    assert status == verdict["exit_status"]
    assert status == ("pass", "fail", "inconclusive", "refused").index(verdict["verdict"])
    return verdict
