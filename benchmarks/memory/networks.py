"""The networks: three to compare sides on, whose blocks are named for checkpointing, and four of Hugging Face's.

Those are a decoder, an encoder with dropout and a vision transformer, small, and a Llama of 6 layers, with their loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples.models.resnet import resnet18
from fxprec.demo.models import CharTransformer


class Double(nn.Sequential):
    """Two 3x3 convolutions with batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        super().__init__(*layers)


class UNet(nn.Module):
    """Maps ``(batch, 3, height, width)`` images to ``(batch, classes, height, width)`` logits; sides divisible by 8."""

    def __init__(self, classes: int = 8, width: int = 16) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList(Double(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(Double(a + b, a) for a, b in zip(sizes[2::-1], sizes[:0:-1], strict=True))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            x = block(torch.cat([skip, F.interpolate(x, scale_factor=2)], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """A block that is computed again in backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, **options: object) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False, **options)  # type: ignore[no-any-return]


class WithLoss(nn.Module):
    """A model of Hugging Face's as a map from inputs to its loss for ``targets``."""

    def __init__(self, model: nn.Module, targets: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("targets", targets)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs, labels=self.targets).loss  # type: ignore[no-any-return]


def _decoder(targets: Tensor, layers: int = 2, width: int = 128) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 43 * width // 16, "num_hidden_layers": layers,
             "num_attention_heads": width // 32}  # fmt: skip
    config = LlamaConfig(vocab_size=512, max_position_embeddings=256, use_cache=False, **sizes)  # a cache breaks graphs
    return WithLoss(LlamaForCausalLM(config), targets)


def _encoder(targets: Tensor) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    return WithLoss(BertForMaskedLM(BertConfig(vocab_size=512, max_position_embeddings=256, **sizes)), targets)


def _vision(targets: Tensor) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    return WithLoss(ViTForImageClassification(ViTConfig(image_size=64, patch_size=8, num_labels=10, **sizes)), targets)


@dataclass(frozen=True)
class Network:
    """A model with its batch and loss, and the class of the blocks that a user would checkpoint."""

    make: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    block: str
    shape: str

    def model(self, *, checkpointed: bool) -> nn.Module:
        torch.manual_seed(1)
        model = self.make()
        if checkpointed:
            for parent in list(model.modules()):
                for name, child in list(parent.named_children()):
                    if type(child).__name__ == self.block:
                        setattr(parent, name, Checkpointed(child))
        return model

    def loss(self, model: Callable[[Tensor], Tensor]) -> Tensor:
        logits = model(self.inputs)
        if logits.dim() == 0:  # a loss
            return logits
        if logits.dim() == 3:
            return F.cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        return F.cross_entropy(logits, self.targets)


def network(name: str) -> Network:
    """Return one of `NAMES`."""
    torch.manual_seed(1)
    if name == "transformer":
        tokens = torch.randint(0, 96, (8, 256))
        shape = "6 layers, width 256, 8 heads, batch 8 x 256 tokens"
        return Network(lambda: CharTransformer(vocab=96, context=256, layers=6, heads=8, width=256),
                       tokens, tokens, "_Block", shape)  # fmt: skip
    if name == "resnet18":
        images, classes = torch.randn(32, 3, 32, 32), torch.randint(0, 100, (32,))
        return Network(lambda: resnet18(width=0.5), images, classes, "BasicBlock", "half width, batch 32 of 32 x 32")
    if name in ("decoder", "encoder"):
        tokens, targets = torch.randint(0, 512, (2, 8, 256))
        make, block = (_decoder, "LlamaDecoderLayer") if name == "decoder" else (_encoder, "BertLayer")
        return Network(lambda: make(targets), tokens, targets, block, "2 layers, width 128, batch 8 x 256 tokens")
    if name == "llama":
        tokens, targets = torch.randint(0, 512, (2, 8, 256))
        make_it = lambda: _decoder(targets, layers=6, width=256)  # noqa: E731
        return Network(make_it, tokens, targets, "LlamaDecoderLayer", "6 layers, width 256, batch 8 x 256 tokens")
    if name == "vision":
        images, classes = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
        return Network(
            lambda: _vision(classes), images, classes, "ViTLayer", "2 layers, width 128, 16 images of 64 x 64"
        )
    images, classes = torch.randn(8, 3, 64, 64), torch.randint(0, 8, (8, 64, 64))
    return Network(UNet, images, classes, "Double", "4 levels from 16 channels, batch 8 of 64 x 64")


NAMES = ("transformer", "resnet18", "unet")
PREDICTED = (*NAMES, "decoder", "encoder", "vision")
MEASURED = (*PREDICTED, "llama")
