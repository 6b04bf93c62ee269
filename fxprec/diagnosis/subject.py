"""The model to examine, its batch and its loss. Steps run on copies, so nothing of the model changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxprec.compat import quiet_fakes, tree_leaves, tree_map_only
from fxprec.errors import ConfigError, FxprecError
from fxprec.report.target import line_of

Loss = Callable[[Any], Tensor]
Batch = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Subject:
    """A model with one batch and a loss."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Loss

    @classmethod
    def of(cls, model: object, args: object, loss: object = None) -> Subject:
        """Check the user's model, batch and loss. Raises `ConfigError`."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model is {type(model).__name__}; give a torch.nn.Module, not compiled")
        if hasattr(model, "_orig_mod"):
            raise ConfigError("model is compiled already; give the module itself")
        if args is None or (isinstance(args, tuple | list | Mapping) and not args):
            raise ConfigError("args holds no batch; give the model's inputs: a tensor, a tuple or a dict of keywords")
        if loss is not None and not callable(loss):
            raise ConfigError(
                f"loss is {type(loss).__name__}; give a function of the model's output that returns a scalar"
            )
        if not any(p.requires_grad for p in model.parameters()):
            raise ConfigError(
                "no parameter of the model requires a gradient, so no step trains it; set requires_grad on some"
            )
        keywords = dict(args) if isinstance(args, Mapping) else {}
        given = () if keywords else tuple(args) if isinstance(args, tuple | list) else (args,)
        return cls(model, given, keywords, loss or default_loss)

    @property
    def name(self) -> str:
        """Return the class name of the model."""
        return type(self.model).__name__

    def fresh(self) -> nn.Module:
        """Return a copy of the model without gradients."""
        model = copy.deepcopy(self.model)
        model.zero_grad(set_to_none=True)
        return model

    def step(self, call: Callable[..., Any], *, has_loss: bool = False, batch: Batch | None = None) -> float:
        """Run forward, loss and backward; return the loss. ``has_loss``: ``call`` returns the loss itself.

        ``batch``: a copy of the batch to run on, as `batch` returns; by default a new one.
        """
        args, kwargs = self.batch() if batch is None else batch
        with same_random_numbers(tree_leaves((args, kwargs))):
            try:
                with quiet_fakes():
                    output = call(*args, **kwargs)
                value = self._checked(output if has_loss else self.loss(output))
                value.backward()
            except FxprecError:
                raise
            except Exception as error:
                raise self._whose(error) from error
        return float(value.detach())

    def batch(self) -> Batch:
        """Return a copy of the batch: positional arguments and keywords."""
        args, kwargs = tree_map_only(Tensor, _own, (self.args, dict(self.kwargs)))
        return args, kwargs

    def _whose(self, error: Exception) -> ConfigError:
        """Find out, by an uncompiled step, whether model, loss, backward pass or compiler fails; return the error."""
        args, kwargs = self.batch()
        whose = f"{self.name} does not run on its batch, uncompiled either"
        way_out = "give the arguments that model(*args) takes, or mend its forward"
        try:
            output = self.fresh()(*args, **kwargs)
            whose, way_out = f"the loss fails on what {self.name} returns", "give a loss that takes the model's output"
            value = self.loss(output)
            whose, way_out = f"the backward pass of {self.name} fails, uncompiled too", "mend what the line names"
            value.backward()
        except Exception as own:
            return ConfigError(f"{whose}: {line_of(own)}; {way_out}")
        return ConfigError(
            f"{self.name} runs on its batch uncompiled and fails compiled: {line_of(error)}; try torch.compile(model, "
            "backend='aot_eager'), and report it where that runs (fxprec env)"
        )

    def _checked(self, value: object) -> Tensor:
        if not isinstance(value, Tensor) or value.numel() != 1:
            shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"loss returned {shown}; let it return a tensor of one element")
        if not value.requires_grad:
            raise ConfigError("the loss has no gradient; compute it of the model's output, without detach or no_grad")
        return value


@contextmanager
def same_random_numbers(inputs: Iterable[object]) -> Iterator[None]:
    """Seed the random generators inside the block alike each time; afterwards they continue as before."""
    with torch.random.fork_rng({t.get_device() for t in inputs if isinstance(t, Tensor) and t.is_cuda}):
        torch.manual_seed(0)
        yield


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def default_loss(output: object) -> Tensor:
    """Return the output's ``.loss``, a scalar output, or the mean square of floating outputs. Raises `ConfigError`."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    floating = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not floating:
        raise ConfigError("the model returned no floating-point tensor; give a loss")
    return torch.stack([leaf.float().square().mean() for leaf in floating]).sum()


class WithLoss(nn.Module):
    """A model and its loss as one module, so that both are in one graph."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Return the loss of the model's output."""
        return self.loss(self.model(*args, **kwargs))
