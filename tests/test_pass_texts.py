"""What each pass does to one small model, against tests/golden/texts: a folder a case, a text a pass.

A text is the difference that a pass makes: to the graph, and to what is decided about it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.golden_cases import CASES, PARTITION, TRACED, Case, texts_of
from tests.helpers import pipeline

GOLDEN = Path(__file__).parent / "golden" / "texts"
WRITTEN_BY = "2.13"  # node names and decompositions belong to a torch version


@pytest.fixture(scope="module")
def texts() -> dict[str, dict[str, str]]:
    return {case.name: texts_of(case) for case in CASES}


@pytest.mark.skipif(not torch.__version__.startswith(WRITTEN_BY), reason=f"the golden texts are those of {WRITTEN_BY}")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_texts_equal_the_golden_files(texts, case: Case):
    """Run with FXPREC_REGENERATE=1 to accept a change."""
    shown, folder = case.kept(texts[case.name]), GOLDEN / case.name
    accepts = os.environ.get("FXPREC_REGENERATE") == "1"
    if accepts:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {path.stem: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    missing = {} if accepts else shown.keys() - kept.keys()
    for name in shown if accepts else missing:
        (folder / f"{name}.txt").write_text(shown[name], encoding="utf-8")
    assert not missing, "written now: look at them, then run again"
    for name in kept:
        assert shown.get(name) == kept[name], f"{case.name}/{name}.txt"


def test_every_pass_does_something_in_a_case(texts):
    lists = [
        steps
        for steps in vars(pipeline).values()
        if isinstance(steps, tuple) and hasattr(next(iter(steps), None), "apply")
    ]
    assert pipeline.PIPELINE in lists
    shown = {name for case in CASES for name in case.kept(texts[case.name])}
    assert {step.name for steps in lists for step in steps} == shown - {TRACED, PARTITION}


def test_no_two_texts_say_the_same(texts):
    said = [text.partition("\n")[2] for case in CASES for text in case.kept(texts[case.name]).values()]
    assert len(set(said)) == len(said)


def test_a_case_without_a_graph_of_its_own_starts_from_that_of_real(texts):
    others = [case.name for case in CASES if TRACED not in case.kept(texts[case.name])]
    assert {texts[name][TRACED] for name in others} == {texts["real"][TRACED]}


def test_no_folder_is_left_of_a_case_that_is_gone():
    assert {path.name for path in GOLDEN.iterdir()} == {case.name for case in CASES}
