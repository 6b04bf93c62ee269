"""A model converter for torchtitan."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from fxprec.config import Config
from fxprec.errors import ConfigError, FxprecError
from fxprec.integrations.backends import compile_in_place

try:
    from torchtitan.models.common import TransformerBlock
    from torchtitan.protocols.model import ModelConfigConverter
except ImportError as error:
    raise FxprecError(
        "fxprec.integrations.torchtitan needs torchtitan 0.3 or newer, which is not installed: pip install torchtitan"
    ) from error


class FxprecConverter(ModelConfigConverter):  # type: ignore[misc, unused-ignore]
    """A converter that compiles each transformer block, with its own backend, as soon as the block is built.

    ``model_registry("8B", converters=[FxprecConverter.Config(options={"recipe": "fp8"})])``, without
    ``--compile.enable``. torchtitan then shards and checkpoints the blocks as usual. Raises `ConfigError` for wrong
    options, and for a model without a transformer block.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc, unused-ignore]
        """``options``: fields of `fxprec.Config`."""

        options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config) -> None:
        Config.from_options(config.options)
        self.options = config.options

    def convert(self, model_config: Any) -> Any:
        """Replace the configs of blocks in the model's config by configs that compile the blocks they build; return it.

        Raises `ConfigError` for a config without a transformer block.
        """
        found = list(model_config.traverse(TransformerBlock.Config))
        if not found:
            raise ConfigError(f"{type(model_config).__qualname__} has no TransformerBlock.Config to compile")
        for _, block, parent, place in found:
            if isinstance(parent, list):
                parent[place] = self._compiled(block)
            else:
                setattr(parent, place, self._compiled(block))
        return model_config

    def _compiled(self, block: Any) -> Any:
        kind, options = type(block), self.options

        @dataclass(kw_only=True, slots=True)
        class Compiled(kind):  # type: ignore[misc, valid-type]
            def build(self, **arguments: object) -> Any:
                built = kind.build(self, **arguments)
                compile_in_place(built, options)
                return built

        return Compiled(**{f.name: getattr(block, f.name) for f in fields(block) if f.init})
