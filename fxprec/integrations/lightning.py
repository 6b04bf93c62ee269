"""A callback for Lightning's ``Trainer``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from fxprec.errors import FxprecError, FxprecWarning
from fxprec.integrations.backends import backends_in, checked, compile_part
from fxprec.integrations.rank_states import RankStates
from fxprec.integrations.statistics import log_statistics

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise FxprecError(
        "fxprec.integrations.lightning needs Lightning 2.4 or newer, which is not installed: pip install lightning"
    ) from error


class FxprecCallback(Callback):  # type: ignore[misc, unused-ignore]
    """A callback that compiles a `LightningModule`, stores fxprec's state in checkpoints, and logs statistics.

    ``Trainer(callbacks=[FxprecCallback({"recipe": "fp8"})])``. ``options``: fields of `fxprec.Config`. ``part``: name
    of the submodule to compile instead of the module's own ``forward``, such as "model" if ``training_step`` calls
    ``self.model(x)`` instead of ``self(x)``. ``layer``: name of the class whose modules are compiled one by one, for
    FSDP2. The trainer's loggers get the numbers of `summary` every ``log_every_n_steps``.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, *, part: str = "", layer: str | None = None) -> None:
        self.options, self.part, self.layer = checked(options), part, layer
        self._module: LightningModule | None = None
        self._logged = 0  # step of the last statistics; several batches may belong to one step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Compile the module, or its layers."""
        compile_part(pl_module.get_submodule(self.part), self.layer, self.options)
        self._module, self._logged = pl_module, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks. Lightning calls this on all ranks and writes the result on one."""
        return {} if self._module is None else RankStates(self._module).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's state of the backends in the module."""
        RankStates(self._module).load_state_dict(state_dict)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Pass the loss to the backends, and log statistics."""
        if trainer.global_step == 1 and not any(backend.all_plans for backend in backends_in(pl_module).values()):
            self._tell_of_nothing(pl_module)
        if isinstance(outputs, Mapping) and "loss" in outputs:
            for backend in backends_in(pl_module).values():
                backend.note_loss(outputs["loss"])
        step, every = trainer.global_step, trainer.log_every_n_steps  # 0: no logs
        if every and step % every == 0 and step != self._logged:
            self._logged = step
            for logger in trainer.loggers:
                log_statistics(pl_module, logger, step)

    def _tell_of_nothing(self, pl_module: LightningModule) -> None:
        what = f"self.{self.part}(...)" if self.part else "self(...)"
        warnings.warn(
            f"{type(pl_module).__name__}.training_step ran nothing that fxprec compiled: it does not call {what}; "
            "give FxprecCallback part=, the name of the submodule it calls",
            FxprecWarning,
            stacklevel=2,
        )
