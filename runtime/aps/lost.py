"""Name the rank that is lost when an exchange ends in an error.

torch.distributed's own error says that a connection closed or timed out, but not whose. So each rank has a thread that
watches the job's store. When one rank has failed, all ranks that still run answer, even those that wait inside of a
collective. A rank that does not answer is lost. If all answer, a rank that reports no error of its own has stalled. The
first rank that knows reports the result to all others: by nodes a rank may wait for a failed rank, and fail long after.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from fxprec.errors import LostRankError
from fxprec.numerics import native

EVERY, GRACE = 0.5, 4.0  # seconds between looks at the store, and seconds that ranks have to answer


class RollCall:
    """The answers of a process group's ranks, for the one state that made the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        found = native.inductor().process_group_store()
        known: tuple[int, int, Any] = found if found is not None else (0, 1, None)
        self._rank, _, self._store = known
        self._ranks = dist.get_process_group_ranks(group)
        self._prefix = f"fxprec/aps/{group.group_name}"
        self._stopped = threading.Event()
        self._said: list[int] | None = None
        """Ranks that another rank has reported as lost."""
        if self._store is not None:
            args = weakref.ref(self), self._stopped
            thread = threading.Thread(target=_watch, args=args, name="fxprec-aps-roll-call", daemon=True)
            thread.start()
            self.stop = weakref.finalize(self, _end, thread, self._stopped)  # also before the interpreter ends

    def lost(self, error: BaseException) -> LostRankError:
        """Return an error that names the ranks whose loss made this rank's exchange fail, within 3 * `GRACE`."""
        said = str(error).partition("\n")[0][:200]
        way_out = f"restart the job from a checkpoint ({said})"
        try:
            absent = self._absent()
        except Exception as cause:  # its type depends on how the store's connection ended
            if self._said is None:
                return LostRankError(
                    f"exchange of gradients failed: rank 0 is lost, or rank {self._rank} is cut off from it: its store "
                    f"cannot be reached ({cause!s:.80}); {way_out}"
                )
            absent = self._said  # rank 0, which has the store, has ended since
        who = f"rank {', '.join(map(str, absent))} does not answer" if absent else "all ranks answer, so a link is lost"
        return LostRankError(f"exchange of gradients failed: {who}; {way_out}")

    def _absent(self) -> list[int]:
        """Return the ranks that do not answer or, if all do, those that report no error of their own."""
        if self._said is not None:
            return self._said
        for what in ("failed", "here"):
            self._store.set(self._key(what, self._rank), "1")
        self._store.set(f"{self._prefix}/any", "1")
        absent = self._without("here", self._ranks) or self._without("failed", self._ranks)
        self._store.set(f"{self._prefix}/lost", ",".join(map(str, absent)))
        self._store.set(self._key("told", self._rank), "1")
        if self._rank == 0:  # the store ends with rank 0
            self._without("told", [r for r in self._ranks if r not in absent])
        return absent

    def _without(self, what: str, ranks: Iterable[int]) -> list[int]:
        """Return the ranks whose key does not appear within `GRACE`."""
        until = time.monotonic() + GRACE
        while absent := [r for r in ranks if not self._store.check([self._key(what, r)])]:
            if time.monotonic() > until:
                return absent
            time.sleep(EVERY / 2)
        return []

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"

    def answer(self) -> bool:
        """Answer if a rank has failed; return whether nothing is left to answer."""
        try:
            if self._store.check([f"{self._prefix}/any"]):
                self._store.set(self._key("here", self._rank), "1")
            if not self._store.check([f"{self._prefix}/lost"]):
                return False
            said = self._store.get(f"{self._prefix}/lost").decode()
            self._said = [int(rank) for rank in said.split(",") if rank]
            self._store.set(self._key("told", self._rank), "1")
        except Exception:  # the store has ended with its rank or with the process group
            pass
        return True


def _watch(whose: weakref.ref[RollCall], stopped: threading.Event) -> None:
    """Answer until the state is freed."""
    while not stopped.wait(EVERY):
        roll_call = whose()
        if roll_call is None or roll_call.answer():
            return
        del roll_call


def _end(thread: threading.Thread, stopped: threading.Event) -> None:
    stopped.set()
    if thread is not threading.current_thread():
        thread.join(2 * EVERY)
