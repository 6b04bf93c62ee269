"""The inputs of a captured graph, with the user's names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

InputKind = Literal["param", "buffer", "input", "table", "other"]


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input of the graph that Dynamo captured, in call order."""

    name: str  # the user's name: "layer1.0.conv1.weight", "x"
    kind: InputKind  # "other": an input that AOTAutograd adds, such as an effect token or a random seed
    module: str  # the owning module's path, "" for inputs


@lru_cache(maxsize=4096)
def module_path(path: str) -> str:
    """Turn Dynamo's ``L['self']._modules['layer1']._modules['0']`` (or ``L['self'].layer1[0]``) into ``layer1.0``.

    A wrapper around ``forward`` (Accelerate's mixed precision) calls the model ``L['args'][0]``. Of a module copied in
    a compiled function Dynamo says ``L['copy'].__dict__['_modules']['layer1']``.
    """
    path = re.sub(r"\.__dict__\['_modules'\]", "._modules", path)
    path = re.sub(r"^L\['args'\]\[0\]", "L['self']", path)
    path = re.sub(r"_modules\['([^']*)'\]", r"\1", path)
    path = re.sub(r"\['([^']*)'\]", r".\1", re.sub(r"\[(\d+)\]", r".\1", path))
    parts = [part for part in path.split(".") if part]
    return ".".join(parts[2:] if parts[:1] == ["L"] else parts)
