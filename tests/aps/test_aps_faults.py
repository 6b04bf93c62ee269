"""A rank that dies in the exchange: the others end with torch.distributed's own error within its timeout."""

from __future__ import annotations

import time

from aps_checks import dies
from aps_ranks import run_ranks


def test_the_others_end_with_an_error_when_a_rank_is_killed() -> None:
    start = time.monotonic()
    ends = run_ranks(3, dies, timeout=6)
    assert time.monotonic() - start < 60
    assert ends[1] is None
    for message in (ends[0], ends[2]):
        assert message.startswith(("RuntimeError", "DistBackendError", "DistNetworkError")), message
        assert any(word in message for word in ("Connection", "Timed out", "timed out", "gloo")), message
