"""Settings by the options of a `Config`."""

from __future__ import annotations

from fxprec.config import Config, Settings


def in_force(**options: object) -> Settings:
    return Settings.of(Config(**options))  # type: ignore[arg-type]
