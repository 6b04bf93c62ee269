"""Networks of torchvision, timm, diffusers and torch_geometric with tiny configurations; their classes' random weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Library:
    """A network of a library, and its inputs."""

    family: str
    needs: str
    """The package."""
    make: Callable[[Any], nn.Module]
    """From the package's module."""
    inputs: Callable[[], tuple[tuple[Tensor, ...], dict[str, Any]]]
    module: str = ""
    """To import, where it is not the package itself."""

    def build(self) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
        """Return the float32 model, and the loss of a model on a fixed batch. Raises what the library does."""
        model = self.make(importlib.import_module(self.module or self.needs)).float().train()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        positional, named = self.inputs()

        def loss(called: nn.Module) -> Tensor:
            out = called(*positional, **named)
            out = out if isinstance(out, Tensor) else out[0]
            return out.square().mean()

        return model, loss


def _picture(size: int = 64, batch: int = 4) -> Callable[[], tuple[tuple[Tensor, ...], dict[str, Any]]]:
    return lambda: ((torch.randn(batch, 3, size, size),), {})


def _vision(name: str, **options: Any) -> Library:
    return Library(
        "vision", "torchvision", lambda t: getattr(t, name)(weights=None, num_classes=10, **options), _picture(),
        "torchvision.models",
    )  # fmt: skip


def _timm(name: str, size: int = 32, **options: Any) -> Library:
    return Library("vision", "timm", lambda t: t.create_model(name, num_classes=10, **options), _picture(size))


def _noisy(channels: int = 3, size: int = 16, **more: Callable[[], Tensor]) -> Any:
    def inputs() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        named = {name: make() for name, make in more.items()}
        return (torch.randn(2, channels, size, size), torch.tensor([3.0, 70.0])), {"return_dict": False, **named}

    return inputs


def _diffusion(name: str, inputs: Any, **options: Any) -> Library:
    return Library("diffusion", "diffusers", lambda d: getattr(d, name)(**options), inputs)


def _graph(name: str, *arguments: Any, **options: Any) -> Library:
    def inputs() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return (torch.randn(20, 16), torch.randint(0, 20, (2, 60))), {}

    return Library(
        "graph", "torch_geometric", lambda g: getattr(g, name)(*arguments, **options), inputs, "torch_geometric.nn"
    )


_TEXT = {"encoder_hidden_states": lambda: torch.randn(2, 5, 32)}
_BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}

LIBRARIES: dict[str, Library] = {
    "tv_mobilenet_v2": _vision("mobilenet_v2", width_mult=0.25, dropout=0.0),
    "tv_mobilenet_v3": _vision("mobilenet_v3_small", width_mult=0.5, dropout=0.0),
    "tv_shufflenet": _vision("shufflenet_v2_x0_5"),
    "tv_squeezenet": _vision("squeezenet1_1", dropout=0.0),
    "tv_mnasnet": _vision("mnasnet0_5", dropout=0.0),
    "tv_regnet": _vision("regnet_y_400mf"),
    "timm_resnet": _timm("resnet10t", 64),
    "timm_vit": _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4),
    "timm_convnext": _timm("convnext_atto", 64, depths=(1, 1, 1, 1), dims=(16, 24, 32, 40)),
    "timm_xcit": _timm("xcit_nano_12_p16_224", img_size=32, embed_dim=64, depth=2, num_heads=4),
    "diffusers_unet": _diffusion(
        "UNet2DModel", _noisy(), sample_size=16, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), **_BLOCKS,
    ),
    "diffusers_conditional_unet": _diffusion(
        "UNet2DConditionModel", _noisy(4, **_TEXT), sample_size=16, cross_attention_dim=32, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **_BLOCKS,
    ),
    "diffusers_dit": _diffusion(
        "DiTTransformer2DModel", _noisy(4, class_labels=lambda: torch.tensor([1, 2])),
        sample_size=16, num_attention_heads=4, attention_head_dim=8, num_layers=2, in_channels=4, dropout=0.0,
    ),
    "diffusers_vae": Library(
        "diffusion", "diffusers", lambda d: d.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, **_BLOCKS
        ),
        lambda: ((torch.randn(2, 3, 16, 16),), {"return_dict": False}),
    ),
    "pyg_gcn": _graph("GCN", 16, 32, 2, 4),
    "pyg_gat": _graph("GAT", 16, 32, 2, 4, heads=2),
    "pyg_gin": _graph("GIN", 16, 32, 2, 4),
    "pyg_sage": _graph("GraphSAGE", 16, 32, 2, 4),
    "pyg_pna": _graph("PNA", 16, 32, 2, 4, aggregators=["mean", "max", "std"], scalers=["identity"], deg=torch.tensor([0, 5, 10])),
}  # fmt: skip
