"""The object that the fixture ``numerics`` returns."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fxprec.errors import ConfigError, FxprecError, NumericsError

if TYPE_CHECKING:
    from torch import Tensor

    from fxprec.testing.check import Outcome
    from fxprec.testing.training import Batches, Curve, MakeOptimizer, TargetLoss


class Numerics:
    """Checks of one test. Golden files are in a folder named after the test module, as with pytest-regressions."""

    def __init__(
        self, node: pytest.Item, *, update: bool, records: list[dict[str, Any]], claims: dict[Path, str]
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch, about uses of its own
            import fxprec.testing.check  # noqa: F401
        self._node, self._update, self._records, self._claims = node, update, records, claims
        self._count = 0

    def check(
        self,
        factory: Callable[[], Any],
        inputs: object = None,
        *,
        options: Mapping[str, object] | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        k: float | None = None,
        floor: float | None = None,
        sqnr: float | None = 20.0,
        reference: str = "bf16",
        seed: int = 0,
        name: str | None = None,
        golden: bool = True,
    ) -> Outcome:
        """Check one training step of ``factory()`` on ``inputs``; see `verify` and `Thresholds` for other parameters.

        ``name`` is the golden file's, by default the test's; ``golden=False`` checks the rules only. The first run
        writes the file and fails.
        """
        from fxprec.testing.check import Thresholds, verify

        with self._one_line("check", name) as (path, record):
            limits = Thresholds(k=k, floor=floor, sqnr=sqnr, reference=reference)
            place = path if golden else None
            outcome = verify(
                factory,
                inputs,
                options=options,
                loss=loss,
                thresholds=limits,
                seed=seed,
                golden=place,
                update=self._update,
            )
            record["rows"] = [row.to_dict() for row in outcome.rows]
            record["findings"] = [finding.to_dict() for finding in outcome.findings]
            outcome.raise_if_wrong()
            self._fail_if_first(outcome.wrote)
        return outcome

    def check_training(
        self,
        factory: Callable[[], object],
        batches: Batches,
        *,
        steps: int = 20,
        seeds: int = 5,
        options: Mapping[str, object] | None = None,
        loss: TargetLoss | None = None,
        optimizer: MakeOptimizer | None = None,
        name: str | None = None,
    ) -> Curve:
        """Check that a short training run's loss stays in the band of ``seeds`` runs; see `verify_training`."""
        from fxprec.testing.training import verify_training

        with self._one_line("training", name) as (path, record):
            curve = verify_training(
                factory,
                batches,
                steps=steps,
                seeds=seeds,
                options=options,
                loss=loss,
                optimizer=optimizer,
                golden=path,
                update=self._update,
            )
            record |= curve.to_dict()
            curve.raise_if_wrong()
            self._fail_if_first(curve.wrote)
        return curve

    def check_identical(self, before: object, after: object) -> None:
        """Check that two tensors, modules, plans or nests of these are equal bit for bit; see `assert_identical`."""
        from fxprec.testing.identical import assert_identical

        with self._one_line("identical", None):
            assert_identical(before, after)

    @contextmanager
    def _one_line(self, kind: str, name: str | None) -> Iterator[tuple[Path, dict[str, object]]]:
        """Record one check; let the test fail with its message, without a traceback."""
        __tracebackhide__ = True
        record: dict[str, Any] = {"kind": kind, "status": "passed"}
        self._records.append(record)
        message = ""
        try:
            yield self._path(name, record), record
        except NumericsError as error:
            record["status"], message = "failed", str(error)
        except FxprecError as error:
            record["status"], message = "error", f"fxprec: error: {' '.join(str(error).split())}"
        if message:
            record["message"] = message
            raise pytest.fail.Exception(message, pytrace=False) from None

    def _path(self, name: str | None, record: dict[str, object]) -> Path:
        self._count += 1
        stem = re.sub(r"\W", "_", name or self._node.name) + (f"-{self._count}" if self._count > 1 and not name else "")
        path = self._node.path.parent / self._node.path.stem / f"{stem}.json"
        owner = self._claims.setdefault(path, self._node.nodeid)
        record["name"] = stem
        if owner != self._node.nodeid:
            raise ConfigError(f"{path.name} is the golden file of {owner} too; give one of them another name=")
        return path

    def _fail_if_first(self, wrote: Path | None) -> None:
        if wrote is not None and not self._update:
            raise NumericsError(f"no golden file yet: wrote {wrote}; read it, commit it, and run again")
