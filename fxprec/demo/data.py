"""The demo's data: scikit-learn's 8x8 digits, and the text of Python's own standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fxprec.errors import FxprecError

VOCAB = 97
"""Number of character codes: the 95 printable ASCII characters (1 to 95), newline (96), anything else (0)."""

TEXT_CHARS = 1_000_000
TEST_SHARE = 0.2
HELD_OUT_SHARE = 0.1
_SPLIT_SEED = 0


@dataclass(frozen=True)
class Digits:
    """Images ``(count, 1, 8, 8)`` float32 in 0..1, and labels ``(count,)`` int64."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Text:
    """Character codes ``(count,)`` int64 below `VOCAB`; the end of the text is held out."""

    train: Tensor
    held_out: Tensor


def load_digits() -> Digits:
    """Return scikit-learn's 1,797 scanned digits, a fixed fifth of them for testing.

    Raises `FxprecError` if scikit-learn is missing.
    """
    try:
        from sklearn import datasets  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise FxprecError(
            "the digits need scikit-learn, which is not installed; "
            "run pip install scikit-learn, or leave them out with --only text"
        ) from None
    found = datasets.load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    num_test = round(len(labels) * TEST_SHARE)
    test, train = order[:num_test], order[num_test:]
    return Digits(images[train], labels[train], images[test], labels[test])


def load_text(max_chars: int = TEXT_CHARS, folder: Path | None = None) -> Text:
    """Return at most ``max_chars`` characters of the modules in ``folder``, in the order of file names.

    ``folder`` is by default the standard library's. Raises `FxprecError` if it has too little source text.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    codes = encode_text(_read_sources(folder, max_chars))
    if len(codes) < 10_000:
        raise FxprecError(
            f"{folder} holds {len(codes)} characters of Python source, too few to train on; "
            "use a Python installed with its library's sources, or leave the text out with --only digits"
        )
    num_train = round(len(codes) * (1 - HELD_OUT_SHARE))
    return Text(codes[:num_train], codes[num_train:])


def encode_text(text: str) -> Tensor:
    """Return one int64 code per character (see `VOCAB`)."""
    raw = torch.frombuffer(bytearray(text.encode("ascii", "replace") or b"\0"), dtype=torch.uint8)
    codes = raw[: len(text)].to(torch.int64)
    printable = (codes >= 32) & (codes < 127)
    return torch.where(printable, codes - 31, torch.where(codes == 10, 96, 0))


def _read_sources(folder: Path, max_chars: int) -> str:
    parts: list[str] = []
    missing = max_chars
    for path in sorted(folder.glob("*.py"), key=lambda p: p.name):
        part = path.read_text(encoding="utf-8", errors="replace")[:missing]
        parts.append(part)
        missing -= len(part)
        if missing <= 0:
            break
    return "".join(parts)
