"""What the tests of the passes share: compiling with the eager lowering, and comparing bit for bit."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fxprec
from fxprec.numerics.stats import WIDTH, Counts, Statistics, finish

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/ is not installed

from benchmarks.planned import recorded_works as recorded_works
from fxprec.passes import pipeline


@contextmanager
def one_rank() -> Iterator[None]:
    """A Gloo group of this process alone.

    Whoever drops the group last, such as DDP's reducer, holds the GIL and waits for Gloo's thread. That thread may want
    the GIL still, to drop the last work: it gets it while this one sleeps. Else both wait for good, once in many runs.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        time.sleep(0.05)
        dist.destroy_process_group()


def eager_backend(recipe: Any = "hfp8", **options: Any) -> fxprec.Backend:
    """A backend whose casts run as their reference implementations; a compile takes seconds."""
    return fxprec.Backend(fxprec.Config(**{"recipe": recipe, "lowering": "eager", **options}))


def compiled(function: Callable[..., Any], backend: fxprec.Backend, *, dynamic: bool = False) -> Callable[..., Any]:
    """Compile afresh, unaffected by earlier tests."""
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Take the gradients off a model."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[x.itemsize])


def assert_bits_equal(got: torch.Tensor, wanted: torch.Tensor, what: str = "tensor") -> None:
    """Assert equal shape, dtype and bits; the sign of a zero does not count, NaN equals NaN."""
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), what
    same = (bits(got) == bits(wanted)) | ((got == 0) & (wanted == 0)) | (got.isnan() & wanted.isnan())
    if not same.all():
        first = tuple((~same).nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int((~same).sum())} of {same.numel()} differ; first at {first}: "
            f"{got[first].item()!r}, wanted {wanted[first].item()!r}"
        )


def leave_out(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Take passes out of the pipeline of real storage; without compute-high every reader gets the stored copy."""
    patch.setattr(pipeline, "PIPELINE", tuple(step for step in pipeline.PIPELINE if step.name not in names))


UNMEASURED = Statistics(0.0, 0.0, 0.0)[3:]


def finished(counts: torch.Tensor) -> torch.Tensor:
    """The statistics (7,) float64 that a row of counts amounts to."""
    (found,) = finish(counts.view(1, WIDTH))
    return torch.tensor(found, dtype=torch.float64)


def as_counts(overflow: float, underflow: float, amax: float, *moments: float) -> list[float]:
    """A row of counts, of one element, that amounts to these statistics."""
    rms, share, mean_ln, std_ln = moments or UNMEASURED
    logs = (share * mean_ln, share * (mean_ln**2 + std_ln**2)) if share >= 0 else (0.0, 0.0)
    return list(Counts(overflow, underflow, amax, 1.0, share, rms**2, *logs, 0.0, 0.0))
