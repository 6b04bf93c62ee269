"""Check a GPU's own 8-bit cast against the format's definition, once per process, format and device."""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from fxprec import compat
from fxprec.errors import FxprecWarning
from fxprec.numerics import device as codecs
from fxprec.numerics.codec import folded_codes
from fxprec.numerics.formats import Format, kept_codes
from fxprec.numerics.rounding import decode
from fxprec.runtime.gemm.transpose_kernels import flags, launch


def casts_in_hardware(fmt: Format, device: torch.device, *, keep: bool) -> bool:
    """Return whether kernels on a device round to a format by the device's cast instruction.

    The first call compares the instruction with the definition. If they differ, it warns, and rounding stays in
    integers, with a quarter more instructions.
    """
    if not codecs.has_instruction(fmt) or compat.no_native_fp8(device) is not None or device.type != "cuda":
        return False
    return not compat.triton_interprets() and _agrees(fmt, device, keep)


@cache
def _agrees(fmt: Format, device: torch.device, keep: bool) -> bool:
    wrong = _differing(fmt, device, keep)
    if wrong is None:
        return True
    warnings.warn(
        f"{fmt.name}: the cast of {torch.cuda.get_device_name(device)} gives other codes than the format's "
        f"definition, first for {wrong!r}; rounding is done in integer arithmetic, with a quarter more instructions",
        FxprecWarning,
        stacklevel=2,
    )
    return False


def _differing(fmt: Format, device: torch.device, keep: bool) -> float | None:
    """Return the first probe that the instruction does not round as the definition does, or None.

    A NaN may have either sign, because a GPU's multiplication by the scale drops the sign.
    """
    with compat.unset_fake_temporarily():  # called while a graph compiles
        x = probes(fmt)
        found = _cast(x.to(device), fmt, keep).cpu()
        expected = folded_codes(x, fmt, kept_codes(fmt)[0] if keep else None).to(torch.uint8)
        wrong = ((found != expected) & ~(x.isnan() & (found & 0x7F == expected & 0x7F))).nonzero()
        return None if not len(wrong) else float(x[wrong[0, 0]])


def _cast(x: Tensor, fmt: Format, keep: bool) -> Tensor:
    wanted = flags(fmt, keep=keep, stats=False, hardware=True)
    row = torch.zeros(1, dtype=torch.int32, device=x.device)
    q = torch.empty(1, len(x), dtype=torch.uint8, device=x.device)
    launch(x.view(1, -1), row, q, torch.empty_like(q.t()), row, wanted)
    return q[0]


def probes(fmt: Format) -> Tensor:
    """Return float32 numbers at which roundings can differ: a format's numbers, their midpoints, and all neighbours.

    Numbers beyond the largest, float32's own subnormals, infinities and NaNs are added. Each comes with both signs.
    """
    numbers = decode(torch.arange(128, dtype=torch.uint8, device="cpu"), fmt)
    numbers = numbers[torch.isfinite(numbers)].sort().values
    largest = numbers[-1]
    beyond = torch.stack([largest * factor for factor in (1.03, 1.0625, 1.125, 1.25, 2.0)])
    points = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, beyond, numbers[1:2] / 4])
    bits = points.view(torch.int32)
    edges = [1, 0x7FFFFF, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    special = torch.tensor(edges, dtype=torch.int32, device="cpu")
    magnitudes = torch.cat([bits, bits + 1, (bits - 1).clamp_min(0), special])
    return torch.cat([magnitudes, magnitudes | -(2**31)]).view(torch.float32)
