"""The table of operators names what torch has, once, and is the only one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fxprec
from fxprec.ir.operators import TABLE, names
from fxprec.ir.operators.names import collected, existing, row

ROOT = Path(fxprec.__file__).parent
FOLDERS = [*(ROOT / name for name in ("passes", "runtime")), *(p for p in ROOT.iterdir() if not p.is_symlink())]
TABLE_FOLDER = ROOT / "ir" / "operators"
CODE = {"_COMPARED", "_OWN", "_REWRITES", "EXPRESSIONS", "REDUCTIONS", "IMPLEMENTATIONS"}
"""What passes and lowering write in the place of each operator: code, beside which the operators stand."""
MOST_PAIRS = 15


def test_a_name_that_torch_lacks_is_an_error() -> None:
    with pytest.raises(
        LookupError, match=r"^torch \S+ has no operator select_scatter\.int, iota, prims\.addmm, ad\.\*$"
    ):
        existing("add.Tensor add.* prims.iota select_scatter.int iota prims.addmm ad.*")


def test_under_a_torch_newer_than_tried_the_rest_of_a_table_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "torch_version", lambda: (2, 16))
    assert existing("add.Tensor iota") == [torch.ops.aten.add.Tensor]


def test_an_operator_has_one_row() -> None:
    with pytest.raises(ValueError, match=r"^aten\.neg\.default stands in two rows$"):
        collected((row("neg abs", hands_on="first"), row("exp neg")))


def test_each_row_says_something() -> None:
    assert not [str(operator) for operator, spec in TABLE.items() if spec == row("").spec]


def sources() -> Iterator[tuple[Path, ast.Module]]:
    files = {file for folder in FOLDERS for file in ([folder] if folder.suffix == ".py" else folder.rglob("*.py"))}
    for file in sorted(files):
        if TABLE_FOLDER not in file.parents:
            yield file, ast.parse(file.read_text(encoding="utf-8"))


def named(tree: ast.AST) -> set[str]:
    """Return the operators that an expression names, as ``aten.add.Tensor`` or in a text."""
    texts = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    texts |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    found = {m[0] for text in texts if (m := re.search(r"(?<!\w)_?(aten|prims)(\.\w+){1,2}$", text))}
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def constants(module: ast.Module) -> Iterator[tuple[str, set[str]]]:
    for statement in module.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            if isinstance(target, ast.Name):
                yield target.id, named(statement.value)


def test_no_other_constant_names_more_than_two_operators() -> None:
    found = [
        (f"{file.name}: {name}", ops) for file, tree in sources() for name, ops in constants(tree) if name not in CODE
    ]
    assert len(found) > 500
    assert not [where for where, ops in found if len(ops) > 2]
    pairs = [where for where, ops in found if len(ops) == 2]
    assert len(pairs) <= MOST_PAIRS, pairs


def test_operators_named_by_a_text_exist() -> None:
    texts = {node.value for _, tree in sources() for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    found = {text for text in texts if isinstance(text, str) and re.fullmatch(r"(aten|prims)(\.\w+){1,2}", text)}
    assert len(found) >= 40
    missing = []
    for name in found:
        namespace, packet, *overload = name.split(".")
        operator = getattr(getattr(torch.ops, namespace), packet, None)
        if operator is None or (overload and overload[0] not in operator.overloads()):
            missing.append(name)
    assert not missing
