"""``dump_tensors``: which tensors a pattern such as ``layers.3.*:grad_output`` means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fxprec.config.checks import one_of
from fxprec.errors import ConfigError

KINDS = ("output", "param", "grad_output", "grad_param")


@dataclass(frozen=True)
class TensorPattern:
    """Tensors of a kind, by module or by name."""

    where: str
    """Module (then its submodules too) or tensor, by `fnmatch`."""
    kind: str
    """One of `KINDS`, or ``""`` for all."""

    @classmethod
    def of(cls, text: str) -> TensorPattern:
        """Read a pattern: ``WHERE`` or ``WHERE:KIND``."""
        where, colon, kind = text.rpartition(":")
        return cls(where, kind) if colon else cls(kind, "")

    def takes(self, tensor: str, kind: str, module: str) -> bool:
        """Say whether the pattern matches a tensor by its name, its module or a module around it, and its kind."""
        parts = module.split(".")
        names = [tensor, *(".".join(parts[:n]) for n in range(1, len(parts) + 1))]
        return self.kind in ("", kind) and any(fnmatchcase(name, self.where) for name in names)


def tensor_patterns(field: str, value: object) -> tuple[str, ...] | None:
    """Return patterns as a tuple of texts, or None. Raises `ConfigError`."""
    if value is None:
        return None
    allowed = f"a tuple of patterns 'module:kind', such as ('layers.3.*:grad_output',); kinds are {', '.join(KINDS)}"
    if isinstance(value, str):
        raise ConfigError(f"{field} is the text {value!r}; give it a tuple, ({value!r},)")
    if not isinstance(value, Sequence) or not value or not all(isinstance(v, str) for v in value):
        raise ConfigError(f"{field} is {value!r}; give it {allowed}")
    for text in value:
        pattern = TensorPattern.of(text)
        if not pattern.where:
            raise ConfigError(
                f"{field} pattern {text!r} names no module or tensor; write '*:{pattern.kind or 'output'}'"
            )
        if pattern.kind:
            one_of(f"kind of tensor in {field} pattern {text!r}:", pattern.kind, KINDS)
    return tuple(value)
