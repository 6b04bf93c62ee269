"""The folder in which a backend dumps its graphs."""

from __future__ import annotations

import os
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fxprec import compat
from fxprec.config import Config

if TYPE_CHECKING:
    from fxprec.report.folder import GraphDump

VARIABLE = "FXPREC_DUMP"
_claimed: Counter[Path] = Counter()


class DumpFolder:
    """The dumps of one backend: ``DIR/graph-0``, ...; the next backend of the process takes ``DIR/model-1``."""

    def __init__(self, path: Path, *, plan_only: bool = False) -> None:
        self.path, self.plan_only = path, plan_only
        self.told: tuple[str, ...] = ()  # what a plan made under fake tensors does not fulfil, and its limits

    @classmethod
    def of(cls, config: Config) -> DumpFolder | None:
        """Return the folder that ``config.dump``, ``FXPREC_DUMP`` or ``TORCH_COMPILE_DEBUG=1`` selects, or None."""
        path = config.dump or os.environ.get(VARIABLE)
        if not path and (debug := compat.debug_folder()):
            path = os.path.join(debug, "fxprec")
        return cls(Path(path)) if path else None

    @cached_property
    def root(self) -> Path:
        """Claim the folder at the first graph and return it, so that a backend that compiles nothing takes no name."""
        root = self.path
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            root = root / f"rank-{torch.distributed.get_rank()}"
        key = root.resolve()
        _claimed[key] += 1
        return root if _claimed[key] == 1 else root / f"model-{_claimed[key] - 1}"

    def graph(self, index: int) -> GraphDump:
        """Return the dump of one compiled graph. Nothing is written yet."""
        from fxprec.report.folder import GraphDump  # imports the code that draws pages, which few runs need

        return GraphDump(self, index)

    @property
    def has_plans(self) -> bool:
        """Whether a graph was planned."""
        return any(self.root.glob("graph-*/plan.json"))

    def forget(self) -> None:
        """Let this process use the folder again, for a command that starts the dump anew."""
        _claimed.pop(self.path.resolve(), None)
