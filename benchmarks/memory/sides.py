"""What is compared: how each side compiles, checkpoints and saves."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor


@dataclass(frozen=True)
class Side:
    """One row: ``options`` are fxprec's, None stands for Inductor alone."""

    options: Mapping[str, Any] | None = None
    autocast: bool = False
    checkpointed: bool = False
    budget: float = 1.0
    """torch's ``activation_memory_budget``."""
    offloads: bool = False
    """Saved tensors go to a file, by ``saved_tensors_hooks``: what a CPU has to offload to."""
    fusions: Mapping[str, Any] = field(default_factory=dict)
    """Inductor's ``post_grad_fusion_options``."""

    @property
    def is_ours(self) -> bool:
        return self.options is not None

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Put torch's own settings in force."""
        with (
            torch._functorch.config.patch(activation_memory_budget=self.budget),
            torch._inductor.config.patch(post_grad_fusion_options=dict(self.fusions)),
        ):
            yield


# e5m2 for every activation; by default without a scale, and of tensors from 100 MB on.
_QUANTIZED = {
    "activation_quantization_aten_pass": {
        "quant_type": "torch.float8_e5m2",
        "allowed_dtypes": "torch.bfloat16;torch.float32",
        "use_scaling": True,
        "size_in_mb": 0.01,
        "exclude_primals": True,
    }
}
_COMPACT = {"allocator": "compact"}
_FP8, _BF16 = {"recipe": "fp8", **_COMPACT}, {"recipe": "bf16", **_COMPACT}
_PACKED = {"recipe": "hfp8", "storage": "packed", **_COMPACT}

SIDES: dict[str, Side] = {
    "float32": Side(),
    "autocast": Side(autocast=True),
    "float32, checkpointed": Side(checkpointed=True),
    "autocast, checkpointed": Side(autocast=True, checkpointed=True),
    "autocast, budget 0.2": Side(autocast=True, budget=0.2),
    "autocast, offload": Side(autocast=True, offloads=True),
    "autocast, torch's activation quantization": Side(autocast=True, fusions=_QUANTIZED),
    "fxprec bf16": Side(_BF16),
    "fxprec fp8": Side(_FP8),
    "fxprec fp8, system": Side({**_FP8, "allocator": "system"}),
    "fxprec hfp8 packed": Side(_PACKED),
    "fxprec hfp8 packed, system": Side({**_PACKED, "allocator": "system"}),
    "fxprec fp8+int4": Side({"recipe": "fp8+int4", **_COMPACT}),
    "fxprec fp8, budget 0.2": Side(_FP8, budget=0.2),
    "fxprec bf16, checkpointed": Side(_BF16, checkpointed=True),
    "fxprec fp8, checkpointed": Side(_FP8, checkpointed=True),
    "fxprec hfp8 packed, checkpointed": Side(_PACKED, checkpointed=True),
    **{
        f"fxprec fp8, peak {share}": Side({**_FP8, "peak_budget": share})
        for share in ("80%", "60%", "50%", "44%", "40%", "30%", "25%")
    },
}


class Offload:
    """Packs saved tensors into files; parameters, which stay anyway, are left where they are."""

    def __init__(self, kept: frozenset[int], folder: Path) -> None:
        self.kept, self.folder, self.count = kept, folder, 0

    def pack(self, x: Tensor) -> Tensor | tuple[Path, torch.dtype, torch.Size, tuple[int, ...]]:
        if x.untyped_storage().data_ptr() in self.kept or not x.numel():
            return x
        self.count += 1
        path = self.folder / str(self.count)
        x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(path)
        return path, x.dtype, x.shape, x.stride()

    def unpack(self, packed: Tensor | tuple[Path, torch.dtype, torch.Size, tuple[int, ...]]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        path, dtype, shape, stride = packed
        found = torch.empty_strided(shape, stride, dtype=dtype)
        data = torch.empty(shape, dtype=dtype)
        with path.open("rb") as file:
            file.readinto(data.reshape(-1).view(torch.uint8).numpy())
        path.unlink()
        return found.copy_(data)


@contextlib.contextmanager
def offloading(kept: frozenset[int]) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        offload = Offload(kept, Path(folder))
        with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
            yield
