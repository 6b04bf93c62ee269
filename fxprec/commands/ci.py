"""``fxprec ci``: a workflow that keeps numerics from regressing."""

from __future__ import annotations

from importlib import resources
from typing import Annotated

import typer

from fxprec.errors import ConfigError


def ci(
    tests: Annotated[str, typer.Option(help="What pytest runs.")] = "tests",
    python: Annotated[str, typer.Option(help="Python version.")] = "3.12",
) -> None:
    """Print a GitHub Actions workflow that runs the numerics tests and keeps their report."""
    for name, value in (("tests", tests), ("python", python)):
        if not value or not all(c.isalnum() or c in "._-/ " for c in value):
            raise ConfigError(f"--{name} is {value!r}; give letters, digits, and . _ - / only")
    text = resources.files("fxprec.commands").joinpath("workflow.yml").read_text(encoding="utf-8")
    print(text.replace("{{tests}}", tests).replace("{{python}}", python), end="")
