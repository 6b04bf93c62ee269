"""The texts of one small model, pass by pass, against tests/golden/texts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.golden_model import make
from tests.helpers import compiled, eager_backend, pipeline

GOLDEN = Path(__file__).parent / "golden" / "texts"
NAMES = ["joint", *(step.name for step in pipeline.PIPELINE)]
WRITTEN_BY = "2.13"  # node names and decompositions belong to a torch version


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("texts")
    model, x = make()
    compiled(model, eager_backend(storage="packed", dump=place, low_ratio=0.5))(x).sum().backward()
    return place / "graph-0"


@pytest.mark.skipif(not torch.__version__.startswith(WRITTEN_BY), reason=f"the golden texts are those of {WRITTEN_BY}")
@pytest.mark.parametrize("name", NAMES)
def test_text_equals_the_golden_file(texts, name):
    """Run with FXPREC_REGENERATE=1 to accept a change."""
    number = f"{NAMES.index(name):02}-{name}"
    title, text = (texts / f"{number}.txt").read_text().split("\n", 1)  # a pass more changes no file but its own
    assert title == f"# {number}"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("FXPREC_REGENERATE") == "1" or not path.exists():
        existed = path.exists()
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        assert existed, f"{name} was missing and is written now: look at it, then run again"
    assert text == path.read_text(encoding="utf-8")


def test_no_golden_file_is_left_of_a_pass_that_is_gone():
    assert {p.stem for p in GOLDEN.iterdir()} == set(NAMES)
