"""Small networks of kinds that transformers has few or none of. `own` names them, with their inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 32


class ResidualBlock(nn.Module):
    """Group norm, SiLU, convolution, twice, with a time embedding added between, as in diffusion U-Nets."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, into), nn.GroupNorm(4, out)
        self.conv1, self.conv2 = nn.Conv2d(into, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.time = nn.Linear(WIDTH, out)
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


def times(t: Tensor, width: int = WIDTH) -> Tensor:
    """Return sinusoidal embeddings (batch, width) of times (batch,)."""
    angles = t[:, None] * torch.exp(-torch.arange(width // 2) * (9.2 / (width // 2)))
    return torch.cat([angles.sin(), angles.cos()], -1)


class UNet(nn.Module):
    """Predicts the noise in an image (batch, 3, 16, 16): two levels, attention at the lower one, skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.down, self.middle, self.up = ResidualBlock(16, 16), ResidualBlock(16, 32), ResidualBlock(48, 16)
        self.shrink, self.grow = nn.Conv2d(16, 16, 3, 2, 1), nn.ConvTranspose2d(32, 32, 2, 2)
        self.norm, self.attention = nn.GroupNorm(4, 32), nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = times(t)
        skip = self.down(self.enter(x), t)
        h = self.middle(self.shrink(skip), t)
        tokens = self.norm(h).flatten(2).mT
        h = h + self.attention(tokens, tokens, tokens, need_weights=False)[0].mT.reshape(h.shape)
        return self.leave(self.up(torch.cat([self.grow(h), skip], 1), t))


class DiT(nn.Module):
    """A diffusion transformer over 16 patches, two blocks modulated by the time (adaLN-zero)."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 16, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "modulate": nn.Linear(WIDTH, 6 * WIDTH), "qkv": nn.Linear(WIDTH, 3 * WIDTH), "out": nn.Linear(WIDTH, WIDTH),
            "wide": nn.Linear(WIDTH, 4 * WIDTH), "narrow": nn.Linear(4 * WIDTH, WIDTH)}) for _ in range(2))  # fmt: skip
        self.last = nn.Linear(WIDTH, 48)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x, t = self.patch(x).flatten(2).mT + self.place, F.silu(times(t))
        for block in self.blocks:
            shift, scale, gate, shift2, scale2, gate2 = block["modulate"](t)[:, None].chunk(6, -1)
            h = F.layer_norm(x, (WIDTH,)) * (1 + scale) + shift
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in block["qkv"](h).chunk(3, -1))
            x = x + gate * block["out"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            h = F.layer_norm(x, (WIDTH,)) * (1 + scale2) + shift2
            x = x + gate2 * block["narrow"](F.gelu(block["wide"](h), approximate="tanh"))
        return self.last(x)


class GraphConvolution(nn.Module):
    """Messages along edges, summed with index_add, or by attention over the edges that come in."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.attends = attends
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.score = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        for layer in self.layers:
            h = layer(x)
            weight = torch.ones_like(h[source, :1])
            if self.attends:
                score = F.leaky_relu(self.score(torch.cat([h[source], h[target]], -1)), 0.2).exp()
                weight = score / (torch.zeros_like(h[:, :1]).index_add(0, target, score)[target] + 1e-6)
            x = x + F.relu(torch.zeros_like(h).index_add(0, target, weight * h[source]) / 4)
        return x


class MessagePassing(nn.Module):
    """Messages from a network over both ends, joined by maximum with scatter_reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.update = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for _ in range(2):
            sent = self.message(x[edges].transpose(0, 1).flatten(1)).to(x.dtype)  # autocast's is bfloat16
            index = edges[1][:, None].expand_as(sent)
            x = self.update(torch.zeros_like(x).scatter_reduce(0, index, sent, "amax", include_self=False), x)
        return x


class Cells(nn.Module):
    """A recurrent cell over a sequence (batch, length, width), in Python."""

    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.last = cell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.pair = cell is nn.LSTMCell

    def forward(self, x: Tensor) -> Tensor:
        h, c = (x.new_zeros(x.shape[0], WIDTH) for _ in range(2))
        outputs = []
        for step in x.unbind(1):
            if self.pair:
                h, c = self.cell(step, (h, c))
            else:
                h = self.cell(step, h)
            outputs.append(h)
        return self.last(torch.stack(outputs, 1))


class Recurrence(nn.Module):
    """A gated linear recurrence by cumulative sums of logarithms, as in minGRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        decay = F.logsigmoid(self.gate(x)).cumsum(1)
        return self.last(torch.exp(decay) * (torch.exp(-decay) * self.value(x)).cumsum(1))


class Spectral(nn.Module):
    """A Fourier layer: complex weights on the lowest frequencies, beside a pointwise path (a Fourier neural operator)."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = (nn.Parameter(torch.randn(WIDTH, WIDTH, 6) / WIDTH) for _ in range(2))
        self.plain, self.last = nn.Conv1d(WIDTH, WIDTH, 1), nn.Conv1d(WIDTH, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(x)[..., :6]
        mixed = torch.einsum("bif,iof->bof", low, torch.complex(self.real, self.imaginary))
        return self.last(F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + self.plain(x)))


class Rotations(nn.Module):
    """Keys and queries as complex numbers turned by their place, as in the first code of RoPE."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        angles = torch.outer(torch.arange(x.shape[1]), torch.tensor([1.0, 0.3, 0.1, 0.03]))
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (torch.view_as_real(torch.view_as_complex(z.unflatten(-1, (-1, 2))) * turn).flatten(3) for z in (q, k))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Clicks(nn.Module):
    """Embedding bags beside dense features, all pairs multiplied (DLRM); ``sparse`` gradients of the tables or dense."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 16, mode="sum", sparse=sparse) for _ in range(3))
        self.dense, self.top = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16 + 6, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        dense = self.dense(x)
        parts = torch.stack([dense, *(table(ids) for table in self.tables)], 1)
        rows, columns = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat([dense, (parts @ parts.mT)[:, rows, columns]], 1))


class Expert(nn.Module):
    """An MLP of one hidden layer; a class of its own, since Dynamo compiles no frame of torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.wide(x)))


class Experts(nn.Module):
    """Tokens sorted to the expert of the largest score, each expert's share sliced by data.

    The sizes of the shares cut the graph inside the loop: routing runs uncompiled, the experts are compiled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.route, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.route(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == i)
            out = out.index_add(0, rows, (expert(x[rows]) * weight[rows, None]).to(out.dtype))
        return out


class Mixer(nn.Module):
    """MLPs over tokens and over channels in turn, each block a checkpoint, and a head, where tensors can be held low."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.channels = nn.Linear(12, 12), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def block(self, x: Tensor) -> Tensor:
        x = x + self.tokens(F.layer_norm(x, (WIDTH,)).mT).mT
        return x + F.gelu(self.channels(F.layer_norm(x, (WIDTH,))))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False)
        return self.head(F.layer_norm(x, (WIDTH,)).mean(1))


class Autoencoder(nn.Module):
    """A variational autoencoder: mean and deviation, noise that comes in, and both parts of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv2d(3, 16, 4, 4), nn.ConvTranspose2d(8, 3, 4, 4)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log = self.encode(x).chunk(2, 1)
        made = self.decode(mean + noise * (0.5 * log).exp())
        return (made - x).square().mean() + 0.1 * (mean.square() + log.exp() - log - 1).mean()


class Temporal(nn.Module):
    """Dilated causal convolutions with gates and weight normalisation (WaveNet)."""

    def __init__(self) -> None:
        super().__init__()
        make = nn.utils.parametrizations.weight_norm
        self.layers = nn.ModuleList(make(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=2**i)) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            value, gate = layer(F.pad(x, (2**i, 0))).chunk(2, 1)
            x = x + value.tanh() * gate.sigmoid()
        return x


class Field(nn.Module):
    """Sines of random frequencies and a plain network over them, rendered along rays (NeRF)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(3, 16))
        self.net = nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))

    def forward(self, points: Tensor) -> Tensor:
        angles = points @ self.frequencies
        found = self.net(torch.cat([angles.sin(), angles.cos()], -1))
        opacity = 1 - torch.exp(-F.softplus(found[..., 3:]) * 0.2)
        passed = torch.cumprod(1 - opacity + 1e-6, 1)
        return (opacity * passed * found[..., :3].sigmoid()).sum(1)


class Splines(nn.Module):
    """A layer of learned functions on edges: Gaussian bumps times weights (a Kolmogorov-Arnold network)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centres", torch.linspace(-2, 2, 8))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH * 8, WIDTH) / 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.exp(-(x[..., None] - self.centres).square()).flatten(-2) @ weight + F.silu(x)
        return x


class Memory(nn.Module):
    """A delta-rule fast weight memory, one outer product a step, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        k, outputs = F.normalize(k, dim=-1), torch.zeros_like(x)
        state = x.new_zeros(x.shape[0], WIDTH, WIDTH)
        for i in range(x.shape[1]):
            error = v[:, i] - torch.einsum("bij,bj->bi", state, k[:, i])
            state = state + 0.5 * torch.einsum("bi,bj->bij", error, k[:, i])
            outputs[:, i] = torch.einsum("bij,bj->bi", state, q[:, i])
        return outputs


class Detector(nn.Module):
    """Classes and boxes of anchors at two scales, with the losses' gathers and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)
        self.norm, self.lateral = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1)
        self.classes, self.boxes = nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        fine = F.relu(self.norm(self.stem(x)))
        coarse = F.relu(self.down(fine))
        fine = self.lateral(fine) + F.interpolate(coarse, scale_factor=2)
        loss = x.new_zeros(())
        for level in (fine, coarse):
            classes, boxes = (head(level).flatten(2).mT for head in (self.classes, self.boxes))
            wanted = labels[:, : classes.shape[1]]
            loss = loss + F.cross_entropy(classes.flatten(0, 1), wanted.flatten())
            positive = wanted > 1
            loss = loss + (F.smooth_l1_loss(boxes, torch.ones_like(boxes), reduction="none").sum(-1) * positive).mean()
        return loss


class Siamese(nn.Module):
    """Two views through one encoder with a stop-gradient, and a contrast over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(16, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.predict = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.encode(x), self.encode(y)
        near = -F.cosine_similarity(self.predict(a), b.detach()).mean()
        scores = F.normalize(a, dim=1) @ F.normalize(b, dim=1).mT / 0.5
        return near + F.cross_entropy(scores, torch.arange(x.shape[0]))
