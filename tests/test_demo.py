"""The demo: data that never changes, bytes counted as documented, files as promised."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from rich.console import Console
from torch import nn

from fxprec.demo import data, run, tasks
from fxprec.demo.table import result_table
from fxprec.demo.train import Outcome, saved_for_backward
from fxprec.errors import FxprecError
from fxprec.plan import Plan
from fxprec.runtime.events import Event


def test_digits_are_split_once_and_for_all():
    first, second = data.load_digits(), data.load_digits()
    assert torch.equal(first.test_images, second.test_images)
    assert first.train_images.shape == (1438, 1, 8, 8)
    assert first.test_images.shape == (359, 1, 8, 8)
    assert (first.train_images.min(), first.train_images.max()) == (0, 1)


def test_digits_lose_no_image_and_keep_their_labels():
    from sklearn import datasets  # imported here: collecting need not wait for it

    digits = data.load_digits()
    images = torch.cat([digits.train_images, digits.test_images]) * 16
    labels = torch.cat([digits.train_labels, digits.test_labels])
    original = datasets.load_digits()
    ours = sorted((*map(int, image.flatten()), int(label)) for image, label in zip(images, labels, strict=True))
    theirs = sorted((*map(int, image), int(label)) for image, label in zip(original.data, original.target, strict=True))
    assert ours == theirs


def test_missing_scikit_learn_is_one_line_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(FxprecError, match=r"run pip install scikit-learn, or leave them out with --only text"):
        data.load_digits()


def test_every_ascii_character_has_its_code():
    printable = "".join(map(chr, range(32, 127)))
    assert data.encode_text(printable).tolist() == list(range(1, 96))
    assert data.encode_text("\n").tolist() == [96]
    assert data.encode_text("\t\x7f\0").tolist() == [0, 0, 0]
    assert data.encode_text("aéa").tolist()[::2] == [66, 66]
    assert data.encode_text("").tolist() == []
    assert data.VOCAB == 97


def test_text_follows_file_names_and_stops_at_the_bound(tmp_path):
    (tmp_path / "b.py").write_text("b" * 8000)
    (tmp_path / "a.py").write_text("a" * 8000)
    (tmp_path / "c.txt").write_text("c" * 8000)
    text = data.load_text(12_000, tmp_path)
    assert "".join(chr(c + 31) for c in torch.cat([text.train, text.held_out]).tolist()) == "a" * 8000 + "b" * 4000
    assert (len(text.train), len(text.held_out)) == (10_800, 1_200)


def test_standard_library_text_is_a_million_characters_and_always_the_same():
    first, second = data.load_text(), data.load_text()
    assert len(first.train) + len(first.held_out) == data.TEXT_CHARS
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.held_out, second.held_out)
    assert 0 <= first.train.min() <= first.train.max() < data.VOCAB


def test_a_library_without_sources_is_one_line_with_the_way_out(tmp_path):
    with pytest.raises(FxprecError, match=r"holds 0 characters of Python source.*--only digits"):
        data.load_text(folder=tmp_path)


@pytest.mark.parametrize("make", tasks.TASKS.values(), ids=tasks.TASKS.keys())
def test_batches_depend_on_the_seed_alone_and_keep_their_shape(make):
    task = make(steps=1)
    first, again, other = (task.batches(seed) for seed in (0, 0, 1))
    taken = [next(first) for _ in range(30)]
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(taken, again, strict=False))
    assert {(x.shape, y.shape) for x, y in taken} == {(taken[0][0].shape, taken[0][1].shape)}
    assert not torch.equal(taken[0][0], next(other)[0])


def test_text_targets_are_the_inputs_one_later():
    inputs, targets = next(tasks.text_task(steps=1).batches(0))
    assert inputs.shape == targets.shape == (32, 64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_an_untrained_model_scores_like_chance():
    digits, text = tasks.digits_task(steps=1), tasks.text_task(steps=1)
    with torch.no_grad():
        assert digits.evaluate(digits.make_model().eval()) < 0.3
        assert text.evaluate(text.make_model()) == pytest.approx(4.57, abs=0.3)  # ln 97


def test_saved_bytes_count_storages_once_and_no_parameters():
    linear = nn.Linear(8, 4, bias=False)
    x = torch.randn(16, 8, requires_grad=True)
    with saved_for_backward(linear) as saved:
        y = linear(x)  # saves x and the weight
        z = y.exp()  # saves its result
        (z * z.view(4, 16).view(16, 4)).sum()  # saves z and a view of z
    assert sum(saved.values()) == (16 * 8 + 16 * 4) * 4


def outcome(task: str = "digits", recipe: str = "fp32", **changes: object) -> Outcome:
    values = {"task": task, "metric": "accuracy", "recipe": recipe, "score": 0.98765, "saved_bytes": 2_000_000}
    values |= {"compile_seconds": 12.3, "train_seconds": 4.5, "steps": 10, "plans": (), "events": (), "notices": ()}
    return Outcome(**(values | changes))


def test_table_compares_saved_bytes_with_fp32_of_the_same_model():
    events = (Event(3, "promotion", "relu", ""), Event(4, "scale", "relu", ""), Event(5, "promotion", "bn", ""))
    rows = [
        outcome(),
        outcome(recipe="fp8", saved_bytes=500_000, events=events),
        outcome("text", "fp8", metric="loss", score=1.8765),
    ]
    console = Console(width=80)
    with console.capture() as shown:
        console.print(result_table(rows))
    lines = [" ".join(line.split()) for line in shown.get().splitlines()]
    assert "digits fp32 98.77% - - 2.00 1.00 0 12.3 4.5" in lines
    assert "digits fp8 98.77% - - 0.50 0.25 2 12.3 4.5" in lines
    assert "text fp8 1.877 - - 2.00 - 0 12.3 4.5" in lines


def test_out_that_cannot_be_a_folder_is_one_line(tmp_path):
    taken = tmp_path / "file"
    taken.write_text("")
    options = run.DemoOptions(out=taken, quick=True, only="text")
    with pytest.raises(FxprecError, match=r"--out .*file: cannot be written: File exists; choose a writable folder"):
        run.run_demo(options, Console(quiet=True))


def test_no_compiler_is_said_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("fxprec.compat.cxx_compiler", lambda: None)
    with pytest.raises(FxprecError, match=r"no C\+\+ compiler found.*set CXX"):
        run.run_demo(run.DemoOptions(out=tmp_path, quick=True), Console(quiet=True))


@pytest.mark.inductor
def test_quick_demo_trains_and_leaves_plan_and_log(tmp_path):
    out = tmp_path / "demo"
    console = Console(width=120)
    with console.capture() as shown:
        outcomes = run.run_demo(run.DemoOptions(out=out, quick=True, only="digits"), console)
    assert [o.recipe for o in outcomes] == ["fp32", "fp8"]
    fp32, fp8 = outcomes
    assert fp32.score > 0.9
    assert abs(fp32.score - fp8.score) < 0.05
    assert fp8.saved_bytes < 0.35 * fp32.saved_bytes
    assert fp8.low_ratio("achieved") >= fp8.low_ratio("requested") == 1.0
    assert Plan.load(out / "digits-fp8.plan.json").to_dict() == fp8.plans[0].to_dict()
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if line["kind"] == "step" and line["recipe"] == "fp8"] == [
        1,
        *range(10, 61, 10),
    ]
    assert [line["score"] for line in log if line["kind"] == "result"] == [o.score for o in outcomes]
    assert "digits fp8" in " ".join(shown.get().split())
