"""The audit of comparisons in tests: `pytest -p qgate.audit` in any project.

It tells of every comparison of floating tensors that a test makes which wrong values would have
passed too. Below are its hooks, in the order in which pytest calls them. It loads neither torch nor
numpy: a project that uses one of them loads it, and is watched from then on.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qgate.audits.advice import joined_record
from qgate.audits.record import AuditRecord, is_weak
from qgate.audits.texts import summary_lines
from qgate.audits.watching import listening, watch_projects
from qgate.storage.files import replacing
from qgate.text import for_terminal

if TYPE_CHECKING:
    from qgate.audits.session import AuditSession

_PLUGIN = "qgate-audit"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("qgate audit")
    group.addoption("--audit-json", metavar="FILE", help="write the places of the audit to FILE")
    group.addoption(
        "--audit-strict",
        action="store_true",
        help="exit with status 1 if a place accepts wrong values and no test failed",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Watch before a conftest imports anything."""
    _start(early_config)


def pytest_configure(config: pytest.Config) -> None:
    """Watch from here if a conftest named this plugin."""
    _start(config)


def _start(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin(_PLUGIN):
        config.pluginmanager.register(AuditHooks(config), _PLUGIN)


class AuditHooks:
    """The hooks of one run, registered when its watching begins."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._session: AuditSession | None = None
        self._parts: list[AuditRecord] = []
        self._notes: list[str] = []
        self._record: AuditRecord | None = None
        self._test: pytest.Item | None = None
        watching = contextlib.ExitStack()
        watching.enter_context(listening(self._hear))
        config.add_cleanup(watching.close)

    def _hear(self, compared: Any) -> None:
        if self._test is not None:
            self._audit().hear(compared)

    def _audit(self) -> AuditSession:
        """Return the session, whose numerics are loaded with the first comparison."""
        if self._session is None:
            session = importlib.import_module("qgate.audits.session")
            self._session = session.AuditSession(str(self._config.rootpath))
        if self._test is not None and self._session.test != self._test.nodeid:
            self._session.test = self._test.nodeid
            self._session.test_files = _files_of(self._test)
        return self._session

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Wrap functions such as `calc_diff`, once the files that define them are imported."""
        root = f"{self._config.rootpath}/"
        files = {str(item.path) for item in session.items}
        watch_projects(lambda file: file in files or file.startswith(root))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):  # type: ignore[no-untyped-def]
        before, self._test = self._test, item
        try:
            return (yield)
        finally:
            self._test = before

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """Take what a worker of pytest-xdist heard, or note that it went down."""
        part = (getattr(node, "workeroutput", None) or {}).get(_PLUGIN)
        if part is not None:
            self._parts.append(part)
        elif error:
            self._notes.append(f"worker {node.gateway.id} went down: its comparisons are missing")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        own = [] if self._session is None else [self._session.record()]
        if hasattr(self._config, "workerinput"):
            self._config.workeroutput[_PLUGIN] = own[0] if own else None  # type: ignore[attr-defined]
            return
        self._record = joined_record([*own, *self._parts], self._notes)
        if file := self._config.getoption("audit_json"):
            path = Path(self._config.invocation_params.dir, file)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self._record, indent=1) + "\n"
            with replacing(path) as part:
                part.write_text(text, encoding="utf-8", newline="\n")
        strict = self._config.getoption("audit_strict")
        if strict and session.exitstatus == 0 and any(map(is_weak, self._record["places"])):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._record is not None:
            terminalreporter.write_sep("=", "qgate audit")
            for line in summary_lines(self._record):
                terminalreporter.write_line(for_terminal(line))


def _files_of(item: pytest.Item) -> frozenset[str]:
    """Return the file that pytest collected a test from, and the one that defines it."""
    code = getattr(getattr(item, "obj", None), "__code__", None)
    return frozenset({str(item.path)} | ({code.co_filename} if code else set()))
