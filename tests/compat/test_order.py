"""The dependencies that keep Inductor's fusions within the order of kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch._inductor.dependencies import WeakDep

from fxprec.compat.order import _chain


@dataclass
class Kernel:
    """What `_chain` asks of a scheduler's node."""

    name: str
    kind: str = ""
    size: int = 4
    waits_for: list[str] = field(default_factory=list)
    reads: str = ""

    @property
    def read_writes(self) -> Any:
        return SimpleNamespace(buffer_names=lambda: {self.name, *self.reads.split()})

    def get_name(self) -> str:
        return self.name

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(get_name=lambda: self.name, mpi_buffer=SimpleNamespace(size_alloc=self.size))]

    def is_extern(self) -> bool:
        return self.kind == "gemm"

    def is_reduction(self) -> bool:
        return self.kind == "sum"

    def add_fake_dep(self, dep: WeakDep) -> None:
        assert dep.is_fake
        self.waits_for.append(dep.name)


def waits(*kernels: Kernel, kept: tuple[str, ...] = ()) -> dict[str, list[str]]:
    _chain(kernels, kept)
    return {kernel.name: kernel.waits_for for kernel in kernels}


def test_no_kernel_goes_ahead_of_a_gemm_and_no_sum_stays_behind_it() -> None:
    """A sum that joined one of a later layer would keep all that it reads until then."""
    found = waits(
        Kernel("loop"),
        Kernel("sum", "sum"),
        Kernel("gemm", "gemm"),
        Kernel("later", "sum"),
        Kernel("gemm 2", "gemm"),
        Kernel("end"),
    )
    assert found == {
        "loop": [],
        "sum": [],
        "gemm": ["sum"],
        "later": ["gemm"],
        "gemm 2": ["gemm", "later"],
        "end": ["gemm 2"],
    }


def test_a_large_result_stands_alone_as_a_gemm_does() -> None:
    small, large = Kernel("small", size=4), Kernel("large", size=1 << 16)
    found = waits(Kernel("sum", "sum"), small, large, Kernel("end"), kept=("small", "large"))
    assert found == {"sum": [], "small": [], "large": ["sum"], "end": ["large"]}


def test_a_loop_has_one_dependency_on_a_gemm_whose_result_it_may_write_over() -> None:
    found = waits(Kernel("gemm", "gemm"), Kernel("reader", reads="gemm"), Kernel("other"))
    assert found == {"gemm": [], "reader": [], "other": ["gemm"]}
    large = Kernel("large", size=1 << 16)
    assert waits(large, Kernel("reader", reads="large"), kept=("large",))["reader"] == ["large"], "it may not be fused"
