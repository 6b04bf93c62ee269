"""Pass weigh-gemms: one answer per GEMM, a person's word before the cost model's."""

from __future__ import annotations

import pytest
import torch
from one_pass import run_pass
from torch import nn

from fxprec import compat
from fxprec.passes.analysis import gemm_costs
from fxprec.passes.analysis.gemm_costs import Answer, Costs, Gpu, Product
from fxprec.passes.weigh_gemms import gemm_nodes, weigh

NAME = "weigh-gemms"
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0))


@pytest.fixture
def on_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_costs, "gpu_of", lambda device: H100)


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 48))


def answers(model: nn.Module, x: torch.Tensor, **options: object) -> tuple[Answer, ...]:
    ran = run_pass(NAME, model, x, **options)
    assert ran.is_unchanged(), "a pass that asks"
    return ran.work.answers


def test_a_cpu_is_not_asked() -> None:
    assert answers(linears(), torch.randn(16, 32), gemms="low") == (Answer(None, "not estimated on cpu"),) * 2


@pytest.mark.usefixtures("on_an_h100")
def test_nor_is_a_simulation() -> None:
    found = answers(linears(), torch.randn(16, 32), storage="simulate")
    assert found == (Answer(None, "not estimated in simulation"),) * 2


def test_codes_asked_for_on_a_cpu_are_said_to_need_a_gpu() -> None:
    (notice,) = run_pass(NAME, linears(), torch.randn(16, 32), gemms="low").work.notices
    assert notice.detail.endswith(
        "2 of 2 GEMMs decode their operands: only GEMMs on a GPU multiply codes; leave gemms out"
    )


@pytest.mark.usefixtures("on_an_h100")
@pytest.mark.parametrize(("word", "pays"), [("low", True), ("high", False)])
def test_a_persons_word_goes_first(word: str, pays: bool) -> None:
    found = answers(linears(), torch.randn(16, 32), gemms=word)
    assert found == (Answer(pays, f"as gemms={word!r} asks"),) * 2


@pytest.mark.usefixtures("on_an_h100")
def test_small_gemms_do_not_pay_and_every_half_is_weighed() -> None:
    ran = run_pass(NAME, linears(), torch.randn(16, 32))
    assert [a.pays for a in ran.work.answers] == [False, False]
    assert [a.why.split(" over")[0] for a in ran.work.answers] == ["2 GEMMs", "3 GEMMs"]
    assert [len(gemm_nodes(op)) for op in ran.work.grouped.gemms] == [2, 3], "the input wants no gradient"


@pytest.mark.usefixtures("on_an_h100")
def test_what_has_no_kernel_stays_high_and_the_user_who_asked_is_told() -> None:
    ran = run_pass(
        NAME, nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), torch.randn(2, 4, 8, 8), gemms="low"
    )
    assert [(a.pays, a.why) for a in ran.work.answers] == [(False, "aten.convolution has no kernel for codes")] * 2
    (notice,) = ran.work.notices
    assert notice.detail.startswith(
        "gemms='low', but 2 of 2 GEMMs decode their operands: aten.convolution has no kernel"
    )


RATES = {"bytes_per_s": 1e12, "bf16_flop_per_s": 1e14, "fp8_flop_per_s": 2e14, "generated_flop_per_s": 2e14}
RATES |= {"generated_special_flop_per_s": 1e13, "fp32_flop_per_s": 1e13}
COSTS = Costs(source="measured", **RATES, launch_s=1e-6, own_host_s=1e-5)


def test_the_faster_way_wins_by_a_margin() -> None:
    large = Product(4096, 4096, 4096, "native")
    assert weigh([large], COSTS).pays
    assert weigh([large], COSTS).why == "1 GEMM over codes 688 us, decoded 1375 us (measured)"
    assert weigh([Product(4096, 4096, 4096, "generated")], COSTS).pays
    assert not weigh([Product(4096, 4096, 4096, "generated", has_special=True)], COSTS).pays, "NaN takes instructions"
    assert not weigh([Product(64, 64, 64, "native", copies=(4096,) * 3)], COSTS).pays, "copies cost launches"


def test_the_hosts_time_counts_where_the_device_would_wait_for_it() -> None:
    """A kernel of ours takes the host 10 us to start; added to the device's time they hid that a product pays."""
    thin = Product(512, 1024, 1024, "generated")
    assert weigh([thin], COSTS).why == "1 GEMM over codes 10 us, decoded 12 us (measured)"
    assert weigh([thin, thin], COSTS).pays, "20 us of the host, and 23 of the device"
    small = Product(128, 1024, 1024, "generated")
    assert weigh([small], COSTS).why == "1 GEMM over codes 10 us, decoded 4 us (measured)"
    assert not weigh([small], COSTS).pays
    assert weigh([small], COSTS, in_cuda_graph=True).why == "1 GEMM over codes 2 us, decoded 4 us (measured)"
    assert weigh([small], COSTS, in_cuda_graph=True).pays, "the graph starts it"


@pytest.mark.usefixtures("on_an_h100")
def test_cuda_graphs_take_the_host_no_time() -> None:
    asked = {"recipe": "hfp8", "storage": "packed"}
    assert [a.why.split(",")[0] for a in answers(linears(), torch.randn(16, 32), **asked)] == HOST
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert [a.why.split(",")[0] for a in answers(linears(), torch.randn(16, 32), **asked)] == DEVICE


HOST = ["2 GEMMs over codes 30 us", "3 GEMMs over codes 45 us"]
DEVICE = ["2 GEMMs over codes 8 us", "3 GEMMs over codes 12 us"]


@pytest.mark.parametrize(
    ("mode", "makes"),
    [("default", False), ("reduce-overhead", True), ("max-autotune", True), ("max-autotune-no-cudagraphs", False)],
)
def test_modes_that_make_cuda_graphs(mode: str, makes: bool) -> None:
    assert compat.makes_cuda_graphs(mode) is makes
