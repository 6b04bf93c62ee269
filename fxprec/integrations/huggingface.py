"""A callback for Hugging Face's ``Trainer`` and for trainers based on it (TRL, PEFT)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from fxprec.errors import FxprecError, FxprecWarning
from fxprec.integrations.backends import backends_in, checked, compile_part
from fxprec.integrations.rank_states import RankStates
from fxprec.integrations.statistics import check_target, log_statistics, summary

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise FxprecError(
        "fxprec.integrations.huggingface needs transformers 4.42 or newer: pip install transformers"
    ) from error

_STATE = "fxprec"
_CALLBACKS: WeakKeyDictionary[nn.Module, FxprecCallback] = WeakKeyDictionary()


class FxprecCallback(TrainerCallback, ExportableState):  # type: ignore[misc, unused-ignore]
    """A callback that compiles the trainer's model, stores fxprec's state in checkpoints, and logs statistics.

    ``Trainer(model, args, callbacks=[FxprecCallback({"recipe": "fp8"})])``. ``options``: fields of `fxprec.Config`.
    ``layer``: name of the class whose modules are compiled one by one instead of the whole model, for FSDP2.
    ``log_to``: target of `log_statistics` at each of the trainer's logging steps.

    A model that fxprec has already compiled is not compiled again.
    """

    def __init__(
        self, options: Mapping[str, object] | None = None, *, layer: str | None = None, log_to: object = None
    ) -> None:
        check_target(log_to)
        self.options, self.layer, self.log_to = checked(options), layer, log_to
        self._model: nn.Module | None = None

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: object
    ) -> None:
        """Compile the trainer's model."""
        self._compile(model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: object
    ) -> None:
        """Compile the model of this training, and load fxprec's state if a checkpoint is resumed."""
        earlier = _CALLBACKS.get(model)
        if earlier is not None:  # `restore_callback_states_from_checkpoint` makes a new callback, without arguments
            self.__dict__.update(earlier.__dict__)
        self._compile(model)  # with `model_init` each training has a new model
        if state.global_step > 0:
            self._resume(state)

    def _compile(self, model: nn.Module) -> None:
        if model is self._model:
            return
        compile_part(model, self.layer, self.options)
        self._model = model
        _CALLBACKS[model] = self

    def _resume(self, state: TrainerState) -> None:
        callbacks: Any = state.stateful_callbacks
        found = callbacks.get(type(self).__name__, {}).get(_STATE)
        if not found:
            warnings.warn(
                f"resumed at step {state.global_step} from a checkpoint without fxprec's state: plans, promotions and "
                "scales start anew",
                FxprecWarning,
                stacklevel=2,
            )
            return
        RankStates(self._model).load_state_dict(found)

    def state(self) -> dict[str, Any]:
        """Return this rank's state for ``trainer_state.json``; `on_save` later adds the other ranks' states."""
        return _exported({} if self._model is None else RankStates(self._model).own_state_dict())

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Add the other ranks' states to ``trainer_state.json``, which the trainer has written on one rank."""
        if args.world_size == 1:
            return
        gathered = RankStates(self._model).state_dict()
        if args.should_save:
            callbacks: Any = state.stateful_callbacks
            callbacks[type(self).__name__] = _exported(gathered)
            state.save_to_json(f"{args.output_dir}/checkpoint-{state.global_step}/trainer_state.json")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> None:
        """Add the numbers of `summary` to the trainer's log of a step, and write statistics to ``log_to``."""
        if logs is None or "loss" not in logs:
            return
        for backend in self.backends.values():
            backend.note_loss(logs["loss"])
        numbers = summary(self._model)
        logs.update(numbers)
        if state.log_history:
            state.log_history[-1].update(numbers)
        if self.log_to is not None and state.is_world_process_zero:
            log_statistics(self._model, self.log_to, state.global_step)

    @property
    def backends(self) -> dict[str, Any]:
        """The `Backend` of each compiled part by module name, "" for the whole model."""
        return dict(backends_in(self._model))


def _exported(found: dict[str, object]) -> dict[str, object]:
    """Return data in the form of `ExportableState.state`. The trainer reads two entries, fxprec reads the third."""
    return {"args": {}, "attributes": {}, _STATE: found}
