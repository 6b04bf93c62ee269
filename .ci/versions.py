"""The tests on other versions of torch, each in an environment of its own under build/versions, and one table.

``python .ci/versions.py [2.11 2.14 ...]`` runs the tests without Inductor. ``--smoke`` runs a few, one or two of each
kind that depends on the version; with ``--by-date`` on one version that the date chooses, and where that cannot be
installed (no network, no room) it says so and that is no failure. ``--install`` does nothing else, and
``--installed`` takes what it left. Standard library only.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import time
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = ROOT / "build" / "versions"
DEFAULT = "2.13"
"""The version of the whole gate: .ci/run installs it."""
OTHERS = ("2.11", "2.14", "2.15")
ROOM = 14 * 2**30
"""Bytes free on the disk; a CUDA build with its libraries takes 6 GB, and as much again while pip unpacks it."""
INSTALL_SECONDS = 900
TEST_SECONDS = 600
WHOLE = "whole"
"""A file in an environment whose installation came to its end."""
QUICK = ("-m", "not inductor and not full")
SMOKE = (  # by what they ask of torch; -m "not full" is pytest's default, so Inductor's are among them
    "tests/test_versions.py",
    "tests/test_backend_surface.py",  # torch.compile's ways to name a backend
    "tests/test_uncompiled_frames.py",  # Dynamo's frames, limits and breaks
    "tests/test_recompile_limit.py",
    "tests/test_recomputation.py",  # the partitioner, checkpoints
    "tests/test_promotion.py",  # compile_fx outside of Dynamo
    "tests/test_codec_text.py",  # what make_fx traces
    "tests/generated/test_ahead.py",  # Triton's compiler, and its language
    "tests/test_backend_identity.py::test_the_default_lowering_agrees_with_the_eager_reference",  # Inductor
)


class NotInstalledError(Exception):
    """An environment cannot be had; the message says why in a line."""


@dataclass(frozen=True)
class Counts:
    """What a run of the tests came to."""

    passed: int
    failed: int
    skipped: int
    names: tuple[str, ...]
    """Of the tests that failed."""

    @classmethod
    def read(cls, report: Path) -> Counts:
        """Read pytest's JUnit file; one that is not there is a run that broke off."""
        if not report.exists():
            return cls(0, 1, 0, ("(pytest broke off)",))
        cases = list(ElementTree.parse(report).iter("testcase"))
        failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
        skipped = sum(c.find("skipped") is not None for c in cases)
        names = tuple(f"{c.get('classname')}::{c.get('name')}" for c in failed)
        return cls(len(cases) - len(failed) - skipped, len(failed), skipped, names)


@dataclass(frozen=True)
class Row:
    """A version's line in the table."""

    asked: str
    torch: str
    triton: str
    counts: Counts
    seconds: float


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    wanted = [of_today()] if options.by_date else options.versions
    rows, missing = [], []
    for version in wanted:
        try:
            python = kept(version) if options.installed else installed(version)
            if not options.install:
                rows.append(run(version, python, smoke=options.smoke))
        except NotInstalledError as error:
            missing.append(f"torch {version} was not tried: {error}")
        finally:
            if options.by_date and not options.install:  # a CI machine keeps no 6 GB of it
                shutil.rmtree(ENVIRONMENTS / version, ignore_errors=True)
    print_table(rows)
    print("\n".join(missing))
    return int(any(row.counts.failed for row in rows) or (bool(missing) and not options.by_date))


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the tests on other versions of torch.")
    parser.add_argument("versions", nargs="*", default=["2.11", DEFAULT, "2.14", "2.15"], help="such as 2.15")
    parser.add_argument("--smoke", action="store_true", help="a few tests, for a minute")
    parser.add_argument("--by-date", action="store_true", help="one version, another each day; may be missing")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--install", action="store_true", help="install only")
    which.add_argument("--installed", action="store_true", help="run what --install installed")
    return parser.parse_args(arguments)


def of_today() -> str:
    return OTHERS[datetime.date.today().toordinal() % len(OTHERS)]


def run(version: str, python: Path, *, smoke: bool) -> Row:
    """Run the tests on an installed version."""
    print(f"== torch {version}", flush=True)
    began = time.monotonic()
    counts = tested(python, ENVIRONMENTS / version, smoke=smoke)
    return Row(version, found(python, "torch"), found(python, "triton"), counts, time.monotonic() - began)


def installed(version: str) -> Path:
    """Make a fresh environment and return its Python. Raises `NotInstalledError`."""
    folder = ENVIRONMENTS / version
    free = shutil.disk_usage(ROOT).free
    if free < ROOM:
        raise NotInstalledError(f"{free / 2**30:.0f} GiB are free on the disk, {ROOM / 2**30:.0f} are wanted")
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    only = folder / "constraints.txt"  # in place of constraints the machine may have on torch
    only.write_text(f"torch=={version}.*\n", encoding="utf-8")
    python = folder / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "-e", f"{ROOT}[test]"]
    environment = {**os.environ, "PIP_CONSTRAINT": str(only)}
    try:
        done = subprocess.run(command, env=environment, timeout=INSTALL_SECONDS, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        raise NotInstalledError(f"pip took more than {INSTALL_SECONDS} s") from None
    if done.returncode:
        told = [line.strip() for line in done.stderr.splitlines() if line.strip().startswith("ERROR:")]
        raise NotInstalledError(told[-1].removeprefix("ERROR: ") if told else f"pip ended with {done.returncode}")
    (folder / WHOLE).touch()
    return python


def kept(version: str) -> Path:
    """Return the Python of an environment that is there. Raises `NotInstalledError`."""
    python = ENVIRONMENTS / version / "bin" / "python"
    if not (ENVIRONMENTS / version / WHOLE).exists():  # torch may be there without what pip installs after it
        raise NotInstalledError("its installation, above, did not end well")
    return python


def tested(python: Path, folder: Path, *, smoke: bool) -> Counts:
    """Run pytest, whose output goes by, and count."""
    report = folder / "report.xml"
    selected = SMOKE if smoke else QUICK
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-n",
        "2",
        f"--junitxml={report}",
        "-p",
        "no:cacheprovider",
        *selected,
    ]
    # Inductor's cache asks for torch's version, but not for its build.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    try:
        subprocess.run(command, cwd=ROOT, env=environment, timeout=TEST_SECONDS if smoke else None, check=False)
    except subprocess.TimeoutExpired:
        return Counts(0, 1, 0, (f"(no end within {TEST_SECONDS} s)",))
    return Counts.read(report)


def found(python: Path, name: str) -> str:
    """Return the installed version of a package, or "-"."""
    code = f"from importlib import metadata; print(metadata.version({name!r}))"
    try:
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no environment
        return "-"
    return done.stdout.strip() or "-"


def print_table(rows: Sequence[Row]) -> None:
    if not rows:
        return
    head = ("torch", "Triton", "passed", "failed", "skipped", "seconds")
    print("\n{:14} {:8} {:>7} {:>7} {:>8} {:>8}".format(*head))
    for row in rows:
        c = row.counts
        print(f"{row.torch:14} {row.triton:8} {c.passed:7} {c.failed:7} {c.skipped:8} {row.seconds:8.0f}")
    for row in rows:
        for name in row.counts.names:
            print(f"  {row.asked}: {name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
