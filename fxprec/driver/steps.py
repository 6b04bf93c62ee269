"""When a step of one graph begins: a checkpoint around compiled code calls it again in backward."""

from __future__ import annotations

from fxprec import compat


class Steps:
    """Tells a graph's forwards from recomputations.

    A reentrant checkpoint runs its forward without gradients, in another graph. All calls of the graph that trains are
    then recomputations, and each backward pass that has one is a step. Where that other graph is compiled too, its
    forwards settle what statistics ask for.
    """

    def __init__(self) -> None:
        self.runs_forward = False
        """Whether the graph was called outside of backward."""
        self._settles_in_forward = False
        self._backward_id = -1

    def settle_in_forward(self) -> bool:
        """A forward of the model begins, of another graph: say whether it is this one's time to settle too."""
        self._settles_in_forward = self._settles_in_forward or not self.runs_forward
        return not self.runs_forward

    def settle_in_backward(self) -> bool:
        """A call inside a backward pass begins: say whether it is the first of that pass, and settles."""
        is_first = not self._settles_in_forward and self._backward_id != compat.backward_id()
        self._backward_id = compat.backward_id()
        return is_first
