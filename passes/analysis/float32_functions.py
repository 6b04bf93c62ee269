"""Find matrix products that are steps of a numerical method, which `torch.autocast` runs in float32.

``torch.cdist`` subtracts squares: of near points nothing is left in 16 bits. The backward of an inverse or of a
decomposition multiplies errors by the condition of a matrix.
"""

from __future__ import annotations

from torch.fx import Node

_OF_LINALG = "linalg_"
_METHODS = frozenset(
    {"cdist", "cholesky", "cholesky_inverse", "cholesky_solve", "det", "geqrf", "inverse", "lobpcg", "logdet", "lu"}
    | {"lu_solve", "lu_unpack", "matrix_exp", "ormqr", "pca_lowrank", "pinverse", "qr", "slogdet", "svd", "svd_lowrank"}
    | {"triangular_solve"}
)
_PRODUCTS = frozenset({"linalg_matmul", "linalg_multi_dot", "linalg_vecdot", "linalg_matrix_power"})


def float32_function(node: Node) -> str | None:
    """Return the name of the numerical function that a node of the joint graph is a step of, or None."""
    stack = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack")
    if not stack:
        return None
    _, called = stack[-1]  # a function, a module's class, or a method's name
    name = called if isinstance(called, str) else getattr(called, "__name__", "")
    is_method = name in _METHODS or (name.startswith(_OF_LINALG) and name not in _PRODUCTS)
    return name if is_method else None
