"""The tile of a product is measured once for a GPU's name, sizes, dtypes and formats, and kept for other processes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton")

from fxprec.numerics import kept_text
from fxprec.numerics.formats import parse
from fxprec.runtime.gemm import matmul, tuning
from fxprec.runtime.gemm.launch import noting
from fxprec.runtime.gemm.tiles import TILES, Tile

FASTEST = TILES[4]
TRIALS = len(TILES)


class Gpu:
    """Stands for a GPU: launches are noted by tile, and take as long as a tile has elements beside the fastest's."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.name, self.tiles, self.timed, self.failing = "H100", [], 0, frozenset[Tile]()
        patch.setattr(torch.cuda, "get_device_name", lambda device: self.name)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(kept_text, "_path", lambda name: folder / name)
        patch.setattr(matmul, "matmul_kernel", self)
        patch.setattr(triton.testing, "do_bench", self._seconds)
        self.next_process()

    def next_process(self) -> None:
        tuning._tiles.clear()
        self.tiles.clear()
        self.timed = 0

    def __getitem__(self, grid: Any) -> Any:
        return self._started

    def _started(self, *args: Any, **options: Any) -> None:
        (tile,) = (t for t in TILES if matmul.tile_flags(t).items() | {("num_warps", t.warps)} <= options.items())
        if tile in self.failing:
            raise triton.runtime.errors.OutOfResources(300, 227, "shared memory")
        self.tiles.append(tile)

    def _seconds(self, run: Any, return_mode: str) -> float:
        run()
        self.timed += 1
        return 1.0 if self.tiles[-1] == FASTEST else 2.0

    def multiply(self, m: int = 64, n: int = 96, k: int = 32, a: str = "1-4-3+4", **options: Any) -> None:
        with FakeTensorMode():
            codes = [torch.empty(size, dtype=torch.uint8, device="cuda:0") for size in ((m, k), (n, k))]
            operands = matmul.Operand(codes[0], parse(a)), matmul.Operand(codes[1].t(), parse("1-5-2"))
            matmul.matmul(*operands, **options)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    return Gpu(monkeypatch, tmp_path)


def test_the_fastest_is_found_at_the_first_run_and_kept_for_other_processes(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="fxprec"):
        gpu.multiply()
    assert gpu.timed == TRIALS
    assert gpu.tiles[-1] == FASTEST
    assert f"timed {TRIALS} tiles" in caplog.text
    gpu.multiply()
    assert gpu.timed == TRIALS
    gpu.next_process()
    gpu.multiply()
    assert (gpu.timed, gpu.tiles) == (0, [FASTEST])


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ({"m": 33}, False),
        ({"m": 65}, True),
        ({"n": 48}, True),
        ({"k": 64}, True),
        ({"a": "1-5-2"}, True),
        ({"dtype": torch.bfloat16}, True),
    ],
    ids=["as many rows, in powers of two", "more rows", "columns", "depth", "format", "dtype"],
)
def test_what_a_tile_is_kept_for(gpu: Gpu, changed: dict[str, Any], again: bool) -> None:
    gpu.multiply()
    gpu.next_process()
    gpu.multiply(**changed)
    assert gpu.timed == (TRIALS if again else 0)


def test_another_gpu_of_the_same_capability_measures_for_itself(gpu: Gpu) -> None:
    gpu.multiply()
    gpu.next_process()
    gpu.name = "H20"
    gpu.multiply()
    assert gpu.timed == TRIALS


@pytest.mark.parametrize("text", ["", "{}", "no json\n0"], ids=["empty", "no digest", "damaged"])
def test_a_damaged_file_is_measured_again(gpu: Gpu, tmp_path: Path, text: str) -> None:
    gpu.multiply()
    gpu.next_process()
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    gpu.multiply()
    assert gpu.timed == TRIALS


def test_a_tile_that_is_tried_no_more_is_not_taken(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.multiply()
    gpu.next_process()
    monkeypatch.setattr(tuning, "TILES", tuple(t for t in TILES if t != FASTEST))
    gpu.multiply()
    assert gpu.timed == TRIALS


def test_a_tile_that_cannot_start_is_not_taken_and_where_none_can_the_kernel_is_named(gpu: Gpu) -> None:
    gpu.failing = frozenset({FASTEST})
    gpu.multiply()
    assert gpu.tiles[-1] not in gpu.failing
    gpu.next_process()
    gpu.failing = frozenset(TILES)
    with pytest.raises(triton.runtime.errors.OutOfResources):
        gpu.multiply(n=48)


def test_trials_do_not_count_what_they_round(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trial adds to the counters, which a later kernel reads."""
    order: list[str] = []
    monkeypatch.setattr(torch.Tensor, "zero_", lambda x: order.append("zero") or x)
    started = gpu._started
    monkeypatch.setattr(gpu, "_started", lambda *args, **options: (order.append("start"), started(*args, **options)))
    gpu.multiply()
    assert order == ["start"] * TRIALS + ["zero", "start"]


def test_only_a_known_tile_is_compiled_ahead(gpu: Gpu) -> None:
    for known in (False, True):
        with noting() as found:
            gpu.multiply()
        assert len(found[0]) == (1 if known else TRIALS)
        gpu.multiply()
    (alone,) = found[0]
    assert dict(alone.options).items() >= matmul.tile_flags(FASTEST).items()
