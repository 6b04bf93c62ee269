"""Show the progress of planning in one terminal line when planning takes long."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


def is_wanted() -> bool:
    """Return whether progress is shown: by rank 0, unless the logger ``fxprec`` is set to a level above WARNING."""
    return os.environ.get("RANK", "0") == "0" and log.isEnabledFor(logging.WARNING)


@dataclass
class Progress:
    """Logs each message for debugging, and after some seconds shows it on a terminal. The time decides nothing else."""

    quiet_s: float = 3.0
    _began: float = field(default_factory=time.monotonic)
    _is_shown: bool = False

    def show(self, message: str) -> None:
        """Log a message, and show it as `tick` does."""
        log.debug("%s", message)
        self.tick(message)

    def tick(self, message: str) -> None:
        """Show a message that is already logged, with the seconds so far."""
        passed = time.monotonic() - self._began
        if passed > self.quiet_s and sys.stderr.isatty() and is_wanted():
            sys.stderr.write(f"\r\x1b[Kfxprec: {message}, {passed:.0f} s")
            sys.stderr.flush()
            self._is_shown = True

    def end(self) -> None:
        """Clear the line."""
        if self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._is_shown = False
