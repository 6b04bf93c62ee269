"""``fxprec ci``: print a GitHub Actions workflow that tests numerics for regressions."""

from __future__ import annotations

import json
from importlib import metadata, resources
from typing import Annotated

import typer

from fxprec.errors import ConfigError


def ci(
    tests: Annotated[str, typer.Option(help="What pytest runs.")] = "tests",
    python: Annotated[str, typer.Option(help="Python version.")] = "3.12",
    install: Annotated[
        str, typer.Option(help="What pip installs fxprec from. Default: where this fxprec was installed from.")
    ] = "",
) -> None:
    """Print a GitHub Actions workflow that runs the numerics tests and keeps their report."""
    for name, value in (("tests", tests), ("python", python)):
        if not value or not all(c.isalnum() or c in "._-/ " for c in value):
            raise ConfigError(f"--{name} is {value!r}; give letters, digits, and . _ - / only")
    if not all(c.isalnum() or c in "._-/ @:+=[]#<>!,~" for c in install):
        raise ConfigError(f"--install is {install!r}; give what pip takes, such as {_EXAMPLE!r}")
    text = resources.files("fxprec.commands").joinpath("workflow.yml").read_text(encoding="utf-8")
    for name, value in (("tests", tests), ("python", python), ("install", install or requirement())):
        text = text.replace(f"{{{{{name}}}}}", value)
    print(text, end="")


_EXAMPLE = "fxprec[testing] @ git+https://host/owner/fxprec"


def requirement() -> str:
    """Return the requirement with which pip installs this fxprec on any machine.

    Raises `ConfigError` if this fxprec was installed from a local folder or file.
    """
    found = metadata.distribution("fxprec")
    origin = json.loads(found.read_text("direct_url.json") or "{}")  # absent if installed from a package index
    if not origin:
        return f"fxprec[testing]=={found.version}"
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        return f"fxprec[testing] @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}"
    if origin["url"].startswith("file:"):
        raise ConfigError(
            f"fxprec was installed from {origin['url']}, a folder of this machine; name what pip can install it from "
            f"elsewhere, --install {_EXAMPLE!r}"
        )
    return f"fxprec[testing] @ {origin['url']}"
