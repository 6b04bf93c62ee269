"""Find matrix products that are steps of a numerical method, which `torch.autocast` runs in float32.

``torch.cdist`` subtracts squares: of near points nothing is left in 16 bits. The backward of an inverse or of a
decomposition multiplies errors by the condition of a matrix. Attention without a kernel takes exponentials of what it
multiplies queries and keys to.
"""

from __future__ import annotations

from collections import deque

from torch.fx import Node

from fxprec.passes.analysis import ops

_OF_LINALG = "linalg_"
_METHODS = frozenset(
    {"cdist", "cholesky", "cholesky_inverse", "cholesky_solve", "det", "geqrf", "inverse", "lobpcg", "logdet", "lu"}
    | {"lu_solve", "lu_unpack", "matrix_exp", "ormqr", "pca_lowrank", "pinverse", "qr", "slogdet", "svd", "svd_lowrank"}
    | {"triangular_solve"}
)
_PRODUCTS = frozenset({"linalg_matmul", "linalg_multi_dot", "linalg_vecdot", "linalg_matrix_power"})
_ATTENTION = "scaled_dot_product_attention"


def float32_function(node: Node) -> str | None:
    """Return the name of the numerical function that a node of the joint graph is a step of, or None."""
    name = _call(node)[1]
    is_method = name in _METHODS or (name.startswith(_OF_LINALG) and name not in _PRODUCTS)
    return name if is_method or (name == _ATTENTION and _is_exponent(node)) else None


def _call(node: Node) -> tuple[str, str]:
    """Return the name of a node's call in the captured graph, and of the function, class or method that it calls."""
    stack = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack")
    if not stack:
        return "", ""
    place, called = stack[-1]
    return place, called if isinstance(called, str) else getattr(called, "__name__", "")


def _is_exponent(product: Node) -> bool:
    """Return whether the call that a product is a step of takes exponentials of its result."""
    left, seen = deque([product]), {product}
    while left:
        node = left.popleft()
        if node.target == ops.aten.exp.default:
            return True
        new = [user for user in node.users if user not in seen and _follows(user, product)]
        seen.update(new)
        left.extend(new)
    return False


def _follows(node: Node, product: Node) -> bool:
    """Return whether a node is a step of a product's call, and no product. A cast that fxprec inserted has no call."""
    return node.target not in ops.GEMMS and _call(node) in (_call(product), ("", ""))
