"""The doctor: its re-runs are the compiled step, its predictions are its re-runs, its advice can be pasted."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fxprec
from benchmarks.doctor import faults
from benchmarks.doctor.networks import NETWORKS, Plain
from fxprec.config.processor import PORTABLE
from fxprec.diagnosis.doctor import Request, recorded
from fxprec.diagnosis.rows import Row
from fxprec.diagnosis.subject import Subject
from fxprec.diagnosis.substitutes import attention_backward
from fxprec.diagnosis.weights import Gradients, floating

PACKED = {"recipe": "fp8", "storage": "packed", "formats": ("e4m3fn",)}


def silent(line: str) -> None:
    pass


def compiled_gradients(model: nn.Module, x: torch.Tensor, loss, options) -> list[torch.Tensor]:
    backend = fxprec.Backend(fxprec.Config(**options, lowering="eager", promote_above=None, cpu=PORTABLE))
    loss(torch.compile(model, backend=backend)(x)).backward()
    return [p.grad for p in model.parameters()]


def damage(model: nn.Module, x: torch.Tensor, loss, compiled: list[torch.Tensor]) -> float:
    exact = torch.autograd.grad(loss(model(x)), list(model.parameters()))
    owners = [name.rpartition(".")[0] for name, _ in model.named_parameters()]
    return Gradients.of(exact, owners).damage(compiled)


@pytest.fixture(scope="module")
def plain():
    return NETWORKS["plain"].make()


@pytest.fixture(scope="module")
def examined(plain) -> fxprec.Diagnosis:
    return fxprec.doctor(plain[0], plain[1], loss=plain[2], options=PACKED)


def test_a_re_run_is_the_step_that_is_compiled_with_these_options(plain):
    model, x, loss = plain
    (graph,) = (make() for make in recorded(Subject.of(model, x, loss), Request.of(PACKED), silent)[1])
    rerun = floating(graph.lab.run(graph.as_planned))
    compiled = compiled_gradients(Subject.of(model, x, loss).fresh(), x, loss, {"recipe": "fp8", "storage": "packed"})
    for ours, theirs in zip(rerun, compiled, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_what_is_predicted_is_what_is_measured(examined):
    assert examined.spearman > 0.75  # four groups: one pair of neighbours swapped is 0.8
    for check in (*examined.checks, *examined.whole):
        assert check.predicted == pytest.approx(check.measured, rel=0.25)
        assert check.predicted_progress == pytest.approx(check.measured_progress, rel=0.2, abs=1e-5)


def test_ranking_and_groups_begin_with_the_worst(examined):
    damages = [row.damage for row in examined.ranking]
    assert damages == sorted(damages, reverse=True)
    assert {row.format for row in examined.ranking} == {"e4m3fn"}
    assert all(row.source.startswith("networks.py:") for row in examined.ranking if row.tensor != "x")
    assert [g.damage for g in examined.groups] == sorted((g.damage for g in examined.groups), reverse=True)


def test_the_model_and_the_random_numbers_stay_as_they_were():
    model, x, loss = NETWORKS["batch norm"].make()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    fxprec.doctor(model, x, loss=loss, options={**PACKED, "reruns": 0})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_recommendation_can_be_pasted_and_holds_what_it_promises():
    model, x, loss = NETWORKS["plain"].make()
    faults.scaled_layer("plain", "second").change(model)
    found = fxprec.doctor(model, x, loss=loss, options={**PACKED, "tolerance": 0.05})
    assert found.ranking[0].module == "second.inner"
    assert "overflow" in found.ranking[0].reason
    assert "e4m3fn ends at 448" in found.ranking[0].reason
    assert found.recommended == {"recipe": "fp8", "storage": "packed", "keep_high": ("second.inner",)}
    planned, recommended = found.whole
    assert planned.measured > 0.1
    assert recommended.measured < 0.05
    assert damage(model, x, loss, compiled_gradients(model, x, loss, found.recommended)) == pytest.approx(
        recommended.measured, rel=0.1
    )


def test_a_scale_for_each_block_is_recommended_where_it_is_enough_and_saves_more():
    """SiLU turns where its input is small, so its input needs small steps beside large elements. A GEMM does not."""
    model, x, loss = NETWORKS["plain"].make()
    model.second = faults.Loud(nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 96)))
    found = fxprec.doctor(
        model, x, loss=loss, options={"recipe": "fp8", "formats": ("int8", "int4"), "tolerance": 0.05}
    )
    assert found.ranking[0].module == "second.inner.0"
    assert found.recommended == {"recipe": "fp8+int8"}
    assert "with a scale for each block" in found.advice.reason
    assert damage(model, x, loss, compiled_gradients(model, x, loss, found.recommended)) == pytest.approx(
        found.whole[1].measured, rel=0.1
    )


def test_where_hardly_anything_could_be_low_the_advice_is_to_stay_in_bf16(plain):
    model, x, loss = plain
    found = fxprec.doctor(model, x, loss=loss, options={**PACKED, "tolerance": 3e-3, "reruns": 0})
    assert found.recommended == {"recipe": "bf16"}
    assert found.advice.reason.startswith("stay in bf16: gradients would be off by 0.0")
    assert "only 0% of the bytes" in found.advice.reason


class LoudOutside(Plain):
    """Computes a tensor of another scale itself; the first layer takes it back."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(faults.LOUD * torch.randn(32, 32))
        self.first.weight.data.div_(faults.LOUD)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.mixing)


@pytest.mark.filterwarnings("error")  # a pattern that matches nothing is a warning
def test_the_outermost_module_itself_can_be_held_high(plain):
    _, x, loss = plain
    torch.manual_seed(0)
    model = LoudOutside()
    found = fxprec.doctor(model, x, loss=loss, options={**PACKED, "tolerance": 0.05, "reruns": 0})
    assert (found.ranking[0].module, found.ranking[0].tensor) == ("", "mm")
    assert found.whole[0].measured > 0.1
    assert found.recommended == {"recipe": "fp8", "storage": "packed", "keep_high": (".",)}
    assert found.advice.predicted < 0.05
    compiled = compiled_gradients(Subject.of(model, x, loss).fresh(), x, loss, found.recommended)
    assert damage(model, x, loss, compiled) < 0.05


def test_gradients_with_scales_and_reads_of_all_are_examined_too():
    model, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(32, 16)
    for options in ({"recipe": "fp16"}, {"recipe": "hfp8"}, {"recipe": "fp8", "storage": "simulate"}):
        found = fxprec.doctor(model, x, options={**options, "formats": ("e4m3fn",)})
        assert {row.kind for row in found.ranking} >= {"output", "grad_output"}, options
        assert all(row.module in ("", "0", "1", "2") for row in found.ranking)
        assert found.whole[0].predicted == pytest.approx(found.whole[0].measured, rel=0.35)
        assert not any("scale is wrong" in row.reason for row in found.ranking)


def test_a_function_whose_exponential_overflows_has_a_sensitivity():
    """Backward recomputes SiLU as x / (1 + exp(-x)); below -88 its derivative is not inf / inf."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 4)), torch.randn(32, 8)
    model[0].weight.data.mul_(100)
    assert -448 < model[0](x).min().item() < -88
    found = fxprec.doctor(model, x, options={"recipe": "fp8", "formats": ("e4m3fn",)})
    assert {row.tensor for row in found.ranking} == {"args.0", "addmm"}
    for check in (*found.checks, *found.whole):
        assert check.predicted == pytest.approx(check.measured, rel=0.25)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3)), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        torch._dynamo.graph_break()
        return self.last(hidden)


def test_dropout_that_is_recomputed_and_graph_breaks():
    found = fxprec.doctor(Checkpointed(), torch.randn(32, 16), options=PACKED)
    assert {row.graph for row in found.ranking} == {0, 1}
    planned = [check for check in found.whole if check.name.startswith("as planned")]
    assert len(planned) == 2
    assert all(check.predicted == pytest.approx(check.measured, rel=0.3) for check in planned)


def test_attention_backward_written_out_is_torchs():
    q, k, v, grad = (torch.randn(2, 3, 10, 8) for _ in range(4))
    for causal, mask in ((True, None), (False, torch.randn(2, 3, 10, 10))):
        ops = torch.ops.aten
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask)
        given = (grad, q, k, v, out, lse, 0.0, causal)
        theirs = ops._scaled_dot_product_flash_attention_for_cpu_backward(*given, attn_mask=mask)
        for ours, wanted in zip(attention_backward(*given, attn_mask=mask), theirs, strict=True):
            torch.testing.assert_close(ours, wanted)


def test_what_is_saved_is_json_and_a_page_whose_names_are_text(examined, tmp_path):
    page = examined.save(tmp_path).read_text(encoding="utf-8")
    data = json.loads((tmp_path / "diagnosis.json").read_text(encoding="utf-8"))
    assert data["recommended"] == {"recipe": "fp8", "storage": "packed"}
    assert [row["tensor"] for row in data["ranking"]] == [row.tensor for row in examined.ranking]
    assert "{{" not in page
    assert page.count("<script") == 2  # its data and its own
    assert "default-src 'none'" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")  # a name, not fetched
    row = examined.ranking[0]
    bad = Row(**{**vars(row), "module": "<img src=x onerror=alert(1)>"})
    assert "<img" not in replace(examined, ranking=(bad,), model="<img>").save(tmp_path).read_text(encoding="utf-8")
    bad = Row(**{**vars(row), "reason": "</script><script>alert(1)</script>"})
    assert replace(examined, ranking=(bad,)).save(tmp_path).read_text(encoding="utf-8").count("<script") == 2


def test_options_that_json_has_no_words_for_are_saved_by_name(examined, tmp_path):
    options = {"policy": returns_a_vector, "plan": Path("plan.json")}
    replace(examined, advice=replace(examined.advice, options=options)).save(tmp_path)
    saved = json.loads((tmp_path / "diagnosis.json").read_text())["recommended"]
    assert saved == {"policy": f"{__name__}:returns_a_vector", "plan": "plan.json"}


def returns_a_vector(output: torch.Tensor) -> torch.Tensor:
    return output.sum(0)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("model", torch.randn(4, 16)), {}, "model is str; give a torch.nn.Module, not compiled"),
        ((None, None), {}, "args holds no batch; give the model's inputs: a tensor, a tuple or a dict"),
        ((None, ()), {}, "args holds no batch"),
        (
            (None, torch.randn(4, 3)),
            {},
            "does not run on its batch, uncompiled either: RuntimeError: .*; give the arguments that model",
        ),
        ((None, torch.randn(4, 16)), {"formats": ()}, r"formats is \(\); give it a tuple of format names"),
        ((None, torch.randn(4, 16)), {"formats": ("e9m9",)}, "formats: .*e9m9"),
        ((None, torch.randn(4, 16)), {"recip": "fp8"}, "unknown option 'recip'; did you mean 'recipe'"),
        ((None, torch.randn(4, 16)), {"recipe": "fp32"}, "holds everything in float32: nothing to diagnose"),
        ((None, torch.randn(4, 16)), {"tolerance": "small"}, "tolerance is 'small'; give it a damage above 0"),
        (
            (None, torch.randn(4, 16), returns_a_vector),
            {},
            r"loss returned shape \(8,\); let it return a tensor of one",
        ),
        ((None, torch.randn(4, 16), lambda y: y.detach().sum()), {}, "the loss has no gradient; compute it of"),
        ((None, torch.randn(4, 16), 3), {}, "loss is int; give a function of the model's output"),
    ],
)
def test_bad_input_is_one_line_that_teaches(arguments, options, words):
    model, args, *loss = arguments
    with pytest.raises(fxprec.ConfigError, match=words):
        fxprec.doctor(model or nn.Linear(16, 8), args, loss=loss[0] if loss else None, options=options)


def test_a_model_without_parameters_to_train_or_already_compiled():
    with pytest.raises(fxprec.ConfigError, match="no parameter of the model requires a gradient"):
        fxprec.doctor(nn.Linear(16, 8).requires_grad_(False), torch.randn(4, 16))
    with pytest.raises(fxprec.ConfigError, match="model is compiled already; give"):
        fxprec.doctor(torch.compile(nn.Linear(16, 8)), torch.randn(4, 16))


def test_a_step_with_options_of_a_dump_is_examined_without_them():
    """Without ``dump_tensors`` its own options contradict the rest."""
    dump = {"dump": "folder", "dump_tensors": ("*",), "dump_every": 10, "dump_limit": 0}
    request = Request.of({"recipe": "fp8", **dump})
    assert request.base == {"recipe": "fp8"}
    assert not any(getattr(request.config, name) for name in dump)
