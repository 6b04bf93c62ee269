"""Read AOTAutograd's descriptors of the inputs and outputs of a joint graph, in ``node.meta["desc"]``.

Positions do not identify inputs. A tensor subclass such as `DTensor` has one input for each of its inner tensors.
Effect tokens and random seeds are inputs that the user did not give. The descriptor classes are private to torch, so
they are recognised by name.
"""

from __future__ import annotations

from typing import TypeAlias

# (descriptor of the whole input, path of attribute names to its inner tensor): an input and its gradient share a key.
Key: TypeAlias = tuple[object, tuple[str, ...]]

_OURS = ("GradAOTOutput", "BackwardTokenAOTOutput")


def key(desc: object) -> Key:
    """Return (descriptor of the whole input or output, path of attributes to the inner tensor)."""
    path: list[str] = []
    while (base := getattr(desc, "base", None)) is not None:
        path.append(str(getattr(desc, "attr", getattr(desc, "idx", ""))))
        desc = base
    return desc, tuple(reversed(path))


def kind(desc: object) -> str:
    """Return the class name of the descriptor of the whole: ``"PlainAOTInput"``."""
    return type(key(desc)[0]).__name__


def captured_index(desc: object) -> int | None:
    """Return the index of the captured input that this is or is a part of; None if AOTAutograd added it."""
    whole, _ = key(desc)
    while (base := getattr(whole, "base_of", None)) is not None:
        whole = base
    index = getattr(whole, "idx", None)
    return index if type(whole).__name__ == "PlainAOTInput" and isinstance(index, int) else None


def gradient_of(desc: object) -> Key | None:
    """Return the key of the input that this output is the gradient of, or None."""
    whole, path = key(desc)
    of = getattr(whole, "grad_of", None)
    return None if of is None else (of, path)


def is_forward_output(desc: object) -> bool:
    """Return whether the forward half computes an output."""
    return desc is not None and kind(desc) not in _OURS
