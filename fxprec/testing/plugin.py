"""The pytest plugin: fixture ``numerics``, ``--numerics-update``, ``--numerics-report=DIR``.

pytest loads it at every start where fxprec is installed, so nothing heavy is imported before the fixture is used.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fxprec.errors import ConfigError

if TYPE_CHECKING:
    from fxprec.testing.fixture import Numerics

BAD_USE = 2  # exit code if something cannot be compared; 1 means that something differs
_records = pytest.StashKey[list[dict[str, Any]]]()
_claims = pytest.StashKey[dict[Path, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--numerics-update`` and ``--numerics-report``."""
    group = parser.getgroup("numerics", "fxprec: numerics of models")
    group.addoption("--numerics-update", action="store_true", help="rewrite the golden files of the tests run")
    group.addoption("--numerics-report", metavar="DIR", help="leave index.html and numerics.json in DIR")


@pytest.fixture
def numerics(request: pytest.FixtureRequest) -> Numerics:
    """Check a model's numerics: ``numerics.check(factory, inputs, options={...})``."""
    from fxprec.testing.fixture import Numerics

    records: list[dict[str, Any]] = []
    request.node.stash[_records] = records
    claims = request.config.stash.setdefault(_claims, {})
    return Numerics(request.node, update=request.config.getoption("--numerics-update"), records=records, claims=claims)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach a test's measurements to its report."""
    report = yield
    if report.when == "call" and _records in item.stash:
        # Plain JSON data: xdist sends it from the worker that ran the test.
        report.numerics = item.stash[_records]  # type: ignore[attr-defined]
    return report


def pytest_configure(config: pytest.Config) -> None:
    """Collect measurements in the process to which the workers report."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Collector(config.getoption("--numerics-report")), "fxprec-numerics-collector")


class _Collector:
    """Gathers the records of all tests, in the process that reports, not in xdist's workers."""

    def __init__(self, folder: str | None) -> None:
        self.folder = folder
        self.tests: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        records = getattr(report, "numerics", None)
        if records is not None:
            self.tests.append({"test": report.nodeid, "outcome": report.outcome, "checks": records})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        bad = any(check["status"] == "error" for test in self.tests for check in test["checks"])
        if bad and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = BAD_USE
        if self.folder is not None:
            from fxprec.testing.page import write

            try:
                write(Path(self.folder), sorted(self.tests, key=lambda t: str(t["test"])))
            except ConfigError as error:
                print(f"fxprec: error: {error}", file=sys.stderr)
                session.exitstatus = BAD_USE
