"""Write and read tensors in the safetensors format, a JSON header and the bytes, without its package."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fxprec.errors import PlanError

_CODES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors by name, all or nothing. Raises OSError."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    chunks, end = list[bytes](), 0
    for name, tensor in tensors.items():
        data = bytes_of(tensor)
        header[name] = {
            "dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + len(data)]
        }  # fmt: skip
        chunks.append(data)
        end += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(chunks)
    os.replace(part, path)


def bytes_of(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor's elements in row-major order."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def load(path: Path, name: str) -> Tensor:
    """Read one tensor. Raises `PlanError` if the file is damaged or lacks the tensor."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(size))[name]
            start, end = entry["data_offsets"]
            file.seek(8 + size + start)
            data = bytearray(file.read(end - start))
        dtype = _DTYPES[entry["dtype"]]
        found = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
        return found.reshape(entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
        cause = " ".join(str(error).split())[:100]
        raise PlanError(
            f"{path}: has no tensor {name!r} that can be read ({cause}); train with dump_tensors again"
        ) from None
