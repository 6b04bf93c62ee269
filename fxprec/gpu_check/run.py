"""Run the items one after another, each in a process with a time limit, and continue after a failure."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fxprec.gpu_check.findings import Findings
from fxprec.gpu_check.items import Item, Mode

Tell = Callable[[str], None]
LIMIT = 180.0  # seconds; on an H200, eight items side by side, the longest took 95

_COMMON = ("torch._dynamo", "torch._inductor.compile_fx", "fxprec.driver.named", "fxprec.driver.joint_compilation")
IMPORTED: dict[Mode, tuple[str, ...]] = {
    "gpu": (),
    "interpreted": (*_COMMON, "fxprec.passes.lowering.lower", "fxprec.runtime.gemm.ops"),
    "compiled": ("fxprec.runtime.gemm.kernels",),
}
"""Modules that all items of a mode import: once, in the process from which the items are forked."""


class Host:
    """The process from which the items of one mode are forked."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # `close` closes it
        environment = os.environ | ({} if mode == "gpu" else {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
        environment.pop("TRITON_INTERPRET", None)
        environment |= {"TRITON_INTERPRET": "1"} if mode == "interpreted" else {}
        command = [sys.executable, "-m", "fxprec.gpu_check.host", *IMPORTED[mode]]
        self._process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment
        )

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process, by force if an item keeps it alive."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:  # an item that no signal ends keeps it alive
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def run(self, item: Item, limit: float, folder: Path, watch: Callable[[Findings], None]) -> Findings:
        """Return the findings of the item's process, with a failure if it did not end within ``limit`` seconds.

        ``watch`` is called a few times a second with the findings so far.
        """
        start, path, log = time.monotonic(), folder / f"{item.name}-{self.mode}.json", folder / "output.txt"

        def found() -> Findings:
            return Findings.read(path, item.name, self.mode)

        def tick() -> bool:
            watch(found())
            return time.monotonic() - start < limit

        log.write_bytes(b"")
        arguments = {"item": item.name, "module": item.module, "mode": self.mode, "path": str(path), "seconds": limit}
        pid = self._ask(json.dumps(arguments | {"log": str(log)}))
        code = None if pid is None else self._answer(tick)
        if code is None and pid is not None and self.is_alive:
            _end(pid)
            if self._answer(lambda: time.monotonic() - start < limit + 5) is None:  # no signal ends it
                self._process.kill()
                self._process.wait()
            return self._lost(found(), log, start, f"was not done after {limit:g} s")
        findings = found()
        if code != 0 or not findings.has_ended:
            return self._lost(findings, log, start, _end_of(code), tells_why=code is None or code > 0)
        return findings

    def _ask(self, line: str) -> int | None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._answer(lambda: self.is_alive)

    def _answer(self, goes_on: Callable[[], bool]) -> int | None:
        """Return the next number that the host writes; None if it ends, or once ``goes_on`` returns False."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                if selector.select(0.2):
                    line = self._process.stdout.readline()
                    return int(line) if line.strip() else None
                if not goes_on():
                    return None

    def _lost(self, findings: Findings, log: Path, start: float, what: str, *, tells_why: bool = False) -> Findings:
        """Add the failure of a process that did not finish; the last line that it printed may give the reason."""
        self._errors.seek(0)
        said = (log.read_bytes() or self._errors.read()).decode(errors="replace").strip()
        findings.output = said[-3000:]
        at = said.rfind("Timeout (")  # its stack begins with where the process was
        where = f" in case {findings.case!r}" if findings.case else ""
        last = said.splitlines()[-1] if said and tells_why else ""
        findings.fail(
            findings.case or "end",
            f"the process {what}{where}{f': {last}' if last else ''}",
            said[at : at + 3000] if at >= 0 else said[-3000:],
        )
        findings.seconds = time.monotonic() - start
        return findings


def _end(pid: int) -> None:
    """End a process and everything that it started, which is its own session."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has just ended, or has no session yet
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def _end_of(code: int | None) -> str:
    if code is None:
        return "could not be started"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else "ended before it was done"


def run_items(
    items: Sequence[Item],
    *,
    dry: bool,
    limit: float = LIMIT,
    watch: Callable[[Item, Findings], None] = lambda item, findings: None,
    done: Callable[[Item, Findings], None] = lambda item, findings: None,
) -> list[Findings]:
    """Return the findings of every item and mode. ``watch`` gets an item's findings so far, ``done`` the final ones.

    If fxprec has no code for the machine, the run ends after the first item.
    """
    found: list[Findings] = []
    modes: tuple[Mode, ...] = ("interpreted", "compiled") if dry else ("gpu",)
    with tempfile.TemporaryDirectory(prefix="fxprec-gpu-check-") as folder:
        for mode in modes:
            mine = [item for item in items if mode in item.modes(dry=dry)]
            if not mine:
                continue
            host = Host(mode)
            try:
                for item in mine:
                    findings = host.run(item, limit, Path(folder), partial(watch, item))
                    found.append(findings)
                    done(item, findings)
                    if findings.refused:
                        return found
                    if not host.is_alive:  # it died with the item, or never started
                        host.close()
                        host = Host(mode)
            finally:
                host.close()
    return found
