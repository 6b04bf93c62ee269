"""`log_to`: one callback for statistics, alerts and the loss."""

import csv
import re

import pytest
import torch
from torch import nn

import fxprec
from fxprec.errors import ConfigError, FxprecWarning
from fxprec.integrations import log_statistics


class Writer:
    """What TensorBoard's has of it."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, float]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.seen.setdefault(step, {})[name] = value


def run(log, *, steps=6, loud=(), options=None) -> fxprec.Backend:
    """Train; in the steps ``loud`` inputs are so large that nearly all of a tensor overflows."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    call = torch.compile(model, backend="fxprec", options={"recipe": "fp8", "lowering": "eager", **(options or {})})
    for step in range(1, steps + 1):
        torch.manual_seed(step)
        loss = call(torch.randn(8, 16) * (1e4 if step in loud else 1.0)).square().mean()
        loss.backward()
        log(call, loss)
        model.zero_grad()
    return fxprec.backend_of(call)


def test_every_so_many_steps_and_no_other():
    writer = Writer()
    run(fxprec.log_to(writer, every=3))
    assert sorted(writer.seen) == [3, 6]
    assert {"fxprec/overflow_ratio", "fxprec/promoted"} <= writer.seen[3].keys()


def test_an_alert_is_an_event_once_until_it_is_over(tmp_path):
    writer, alerts = Writer(), (("*:output", "overflow_ratio > 0.2"), ("0", "amax >= 1e30"))
    backend = run(
        fxprec.log_to(writer, every=1, alerts=alerts), steps=9, loud=(3, 4, 7), options={"promote_above": None}
    )
    found = [event for event in backend.events if event.kind == "alert"]
    assert [event.step for event in found if event.site.startswith("args.0")] == [3, 7]
    assert re.fullmatch(r"overflow_ratio is 1, alert at > 0\.2", found[0].detail)
    assert [writer.seen[step]["fxprec/alerts"] > 0 for step in range(1, 10)] == [
        False, False, True, True, False, False, True, False, False
    ]  # fmt: skip


def test_a_file_and_nowhere(tmp_path):
    run(fxprec.log_to(tmp_path / "s.csv", every=2))
    rows = csv.DictReader((tmp_path / "s.csv").read_text().splitlines())
    assert {row["step"] for row in rows} == {"2", "4", "6"}
    backend = run(fxprec.log_to(None, every=1, alerts=[("*", "amax > 0")]))
    assert any(event.kind == "alert" for event in backend.events)
    log_statistics(backend, None, 1, alerts=[("*", "amax > 0")])


def test_a_file_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=f"^{tmp_path}: cannot be written: Is a directory; choose a writable path$"):
        run(fxprec.log_to(tmp_path, every=1), steps=1)


def test_an_alert_for_nothing_is_told_once():
    log = fxprec.log_to(None, every=1, alerts=[("layer.9:output", "amax > 0")])
    with pytest.warns(FxprecWarning) as caught:
        run(log)
    said = [str(w.message) for w in caught if "alerts: pattern" in str(w.message)]
    assert len(said) == 1
    assert "alerts: pattern 'layer.9:output' matches no stored tensor" in said[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"every": 0}, "every is 0; give it an int of at least 1"),
        ({"alerts": "amax > 0"}, "alerts is 'amax > 0'; give it a tuple of (pattern, rule)"),
        ({"alerts": [("a",)]}, "alert ('a',); give it (pattern, rule), as"),
        ({"alerts": [("a", "amax")]}, "alert rule 'amax' is not a comparison; write it as 'overflow_ratio > 0.01'"),
        ({"alerts": [("a", "amax > nan")]}, "alert rule 'amax > nan' is not a comparison; write it as"),
        ({"alerts": [("a", "amx > 1")]}, "unknown number 'amx'; did you mean 'amax'?; use one of amax, overflow_ratio"),
        ({"alerts": [("a:outputs", "amax > 1")]}, "did you mean 'output'"),
        ({"to": 3}, "to=int takes no statistics; give TensorBoard's SummaryWriter"),
    ],
)
def test_bad_input_is_one_line(arguments, words):
    with pytest.raises(fxprec.ConfigError) as caught:
        fxprec.log_to(**{"to": None} | arguments)
    assert words in str(caught.value)
