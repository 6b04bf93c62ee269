"""The networks of `modules`, each with its family and the shapes of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.architectures import modules

Made = tuple[nn.Module, Callable[[nn.Module], Tensor]]


@dataclass(frozen=True)
class Own:
    """A network of `modules` and its random inputs; the loss is its mean square where it returns more than one number."""

    family: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]

    def build(self) -> Made:
        """Return the float32 model, and the loss of a model on a fixed batch."""
        model, inputs = self.make().train(), self.inputs()

        def loss(called: nn.Module) -> Tensor:
            out = called(*inputs)
            return out.square().mean() if out.ndim else out

        return model, loss


def _image() -> tuple[Tensor, ...]:
    return (torch.randn(4, 3, 16, 16), torch.rand(4) * 100)


def _nodes() -> tuple[Tensor, ...]:
    return torch.randn(20, modules.WIDTH), torch.randint(0, 20, (2, 60))


def _sequence() -> tuple[Tensor, ...]:
    return (torch.randn(4, 8, modules.WIDTH),)


def _clicks() -> tuple[Tensor, ...]:
    return torch.randn(16, 8), torch.randint(0, 50, (16, 4))


OWN: dict[str, Own] = {
    "unet": Own("diffusion", modules.UNet, _image),
    "dit": Own("diffusion", modules.DiT, _image),
    "graph_convolution": Own("graph", lambda: modules.GraphConvolution(False), _nodes),
    "graph_attention": Own("graph", lambda: modules.GraphConvolution(True), _nodes),
    "message_passing": Own("graph", modules.MessagePassing, _nodes),
    "rnn": Own("recurrent", lambda: modules.Cells(nn.RNNCell), _sequence),
    "gru": Own("recurrent", lambda: modules.Cells(nn.GRUCell), _sequence),
    "lstm": Own("recurrent", lambda: modules.Cells(nn.LSTMCell), _sequence),
    "linear_recurrence": Own("recurrent", modules.Recurrence, _sequence),
    "delta_rule": Own("recurrent", modules.Memory, _sequence),
    "fourier_operator": Own("complex", modules.Spectral, lambda: (torch.randn(4, modules.WIDTH, 16),)),
    "complex_rotations": Own("complex", modules.Rotations, _sequence),
    "dlrm_sparse": Own("sparse", lambda: modules.Clicks(True), _clicks),
    "dlrm_dense": Own("sparse", lambda: modules.Clicks(False), _clicks),
    "routed_experts": Own("experts", modules.Experts, lambda: (torch.randn(24, modules.WIDTH),)),
    "mixer": Own("vision", modules.Mixer, lambda: (torch.randn(4, 12, modules.WIDTH),)),
    "autoencoder": Own("vision", modules.Autoencoder, lambda: (torch.randn(4, 3, 16, 16), torch.randn(4, 8, 4, 4))),
    "detector": Own("vision", modules.Detector, lambda: (torch.randn(4, 3, 16, 16), torch.randint(0, 4, (4, 64)))),
    "wavenet": Own("wave", modules.Temporal, lambda: (torch.randn(4, modules.WIDTH, 24),)),
    "nerf": Own("fields", modules.Field, lambda: (torch.randn(8, 12, 3),)),
    "splines": Own("fields", modules.Splines, lambda: (torch.randn(16, modules.WIDTH),)),
    "siamese": Own("contrast", modules.Siamese, lambda: (torch.randn(16, 16), torch.randn(16, 16))),
}
