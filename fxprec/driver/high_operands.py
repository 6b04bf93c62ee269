"""When the products of a training begin to multiply their operands in ``hi`` instead of in blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fxprec.config.recipes import Recipe
from fxprec.errors import ConfigError


@dataclass
class HighOperands:
    """The recipe's step (`Operands.high_after`), and what the user asks for while training runs."""

    recipe: Recipe
    when: Callable[[int], bool] | None = None
    """The user's function of the step that begins; the first True holds operands high from this step on."""
    asked_in: int | None = None
    """The step in which ``when`` was True."""

    def ask(self, when: Callable[[int], bool] | None) -> None:
        """Hold operands high from the first step on for which ``when`` is True; None: from the next step on.

        Raises `ConfigError` if the recipe rounds no operands to blocks.
        """
        if self.recipe.operands is None:
            raise ConfigError(
                f"recipe {self.recipe.name!r} multiplies no operands in blocks, so there are none to hold high; this "
                "is for recipes such as 'mxfp8' and 'nvfp4'"
            )
        self.when = when or (lambda step: True)

    def asked_since(self, step: int) -> str | None:
        """Ask the user's function about the training step that begins, and return what `since` does."""
        if self.asked_in is None and self.when is not None and self.when(step):
            self.asked_in = step
        return self.since(step)

    def since(self, step: int) -> str | None:
        """Return since when operands are high in a training step, for plans and events; None while they are not."""
        operands = self.recipe.operands
        if operands is not None and 0 < operands.high_after < step:
            return f"after step {operands.high_after}"
        return None if self.asked_in is None else f"since step {self.asked_in}, as asked"
