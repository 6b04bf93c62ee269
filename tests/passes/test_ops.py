"""Tables of operators name what torch has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import fxprec
from fxprec.passes.analysis import ops
from fxprec.passes.analysis.ops import existing

SOURCES = [Path(fxprec.__file__).parent / "passes", Path(fxprec.__file__).parent / "plan"]


def test_a_name_that_torch_lacks_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"^torch \S+ has no operator select_scatter\.int, iota in torch\.ops\.aten$"):
        existing(torch.ops.aten, "add.Tensor select_scatter.int iota")


def test_under_a_torch_newer_than_tried_the_rest_of_a_table_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "torch_version", lambda: (2, 16))
    assert existing(torch.ops.aten, "add.Tensor iota") == {torch.ops.aten.add.Tensor}


def texts() -> set[str]:
    """Return the texts in the source that look like an operator's name, ``"aten.add"`` or ``"aten.add.Tensor"``."""
    trees = (ast.parse(file.read_text()) for folder in SOURCES for file in folder.rglob("*.py"))
    constants = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {text for text in constants if isinstance(text, str) and re.fullmatch(r"(aten|prims)(\.\w+){1,2}", text)}


def test_operators_named_by_a_text_exist() -> None:
    names = texts()
    assert len(names) > 50
    missing = []
    for name in names:
        namespace, packet, *overload = name.split(".")
        found = getattr(getattr(torch.ops, namespace), packet, None)
        if found is None or (overload and overload[0] not in found.overloads()):
            missing.append(name)
    assert not missing
