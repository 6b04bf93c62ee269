"""Counted tensors written by hand, for tests of assignment."""

import sympy

from fxprec.passes.analysis.tensors import CountedTensor

KINDS = ("output", "param", "grad_output", "grad_param")


def tensor(i: int, kind: str, group: int, elements: int, **roles: object) -> CountedTensor:
    values = {
        "id": i,
        "name": f"t{i}",
        "kind": kind,
        "group": group,
        "elements": elements,
        "size": sympy.Integer(elements),
        "module": f"block{group}",
        "source": "model.py:3",
        "feeds_gemm": False,
        "of_gemm": False,
        "saved": kind in ("output", "param"),
        "shape": str(elements),
    }
    return CountedTensor(**values | roles)


def groups_of(sizes: list[int]) -> list[CountedTensor]:
    """One tensor of each kind in every group; of group size n, an odd element goes to the output."""
    tensors: list[CountedTensor] = []
    for group, size in enumerate(sizes):
        for kind in KINDS:
            elements = size - 3 * (size // 4) if kind == "output" else size // 4
            tensors.append(tensor(len(tensors), kind, group, elements))
    return tensors


def mlp() -> list[CountedTensor]:
    """Input, linear fc1, relu, linear fc2: two GEMMs, three groups, with the roles groups.py gives."""
    rows = [
        ("output", 0, 80, "", {"feeds_gemm": True}),  # 0 x
        ("param", 0, 128, "fc1", {"feeds_gemm": True, "of_gemm": True}),  # 1 fc1.weight
        ("grad_param", 0, 128, "fc1", {"of_gemm": True}),  # 2
        ("output", 1, 160, "fc1", {"of_gemm": True}),  # 3 fc1
        ("grad_output", 1, 160, "fc1", {"feeds_gemm": True}),  # 4
        ("output", 1, 160, "relu", {"feeds_gemm": True}),  # 5 relu
        ("grad_output", 1, 160, "relu", {"of_gemm": True}),  # 6
        ("param", 1, 48, "fc2", {"feeds_gemm": True, "of_gemm": True}),  # 7 fc2.weight
        ("grad_param", 1, 48, "fc2", {"of_gemm": True}),  # 8
        ("output", 2, 30, "fc2", {"of_gemm": True}),  # 9 fc2
        ("grad_output", 2, 30, "fc2", {"feeds_gemm": True}),  # 10
    ]
    return [tensor(i, kind, group, n, module=module, **roles) for i, (kind, group, n, module, roles) in enumerate(rows)]
