"""torch's functions on nested containers (pytrees)."""

from __future__ import annotations

from torch.utils._pytree import keystr as keystr
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
