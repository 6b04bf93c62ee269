"""Match tensors against patterns such as ``layers.3.*:grad_output``, for option ``dump_tensors``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fxprec.config.checks import one_of
from fxprec.errors import ConfigError

KINDS = ("output", "param", "grad_output", "grad_param")


@dataclass(frozen=True)
class TensorPattern:
    """A pattern that matches tensors by kind, and by module or name."""

    where: str
    """`fnmatch` pattern of a tensor's name, or of a module that makes it or contains the module that does."""
    kind: str
    """One of `KINDS`, or ``""`` for all."""

    @classmethod
    def of(cls, text: str) -> TensorPattern:
        """Read a pattern: ``WHERE`` or ``WHERE:KIND``."""
        where, colon, kind = text.rpartition(":")
        return cls(where, kind) if colon else cls(kind, "")

    def takes(self, tensor: str, kind: str, module: str) -> bool:
        """Return whether the pattern matches a tensor's kind, and its name, its module or a module around it."""
        parts = module.split(".")
        names = [tensor, *(".".join(parts[:n]) for n in range(1, len(parts) + 1))]
        return self.kind in ("", kind) and any(fnmatchcase(name, self.where) for name in names)


def tensor_patterns(field: str, value: object) -> tuple[str, ...] | None:
    """Return patterns as a tuple of texts, or None. Raises `ConfigError` for a malformed pattern."""
    if value is None:
        return None
    allowed = f"a tuple of patterns 'module:kind', such as ('layers.3.*:grad_output',); kinds are {', '.join(KINDS)}"
    if isinstance(value, str):
        raise ConfigError(f"{field} is the string {value!r}; give it a tuple, ({value!r},)")
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
