"""The applications of the paper's Tables 3 and 4, in small. Each takes a run and returns figures on held-out data.

Losses come first: the score is what the paper reports. Everything random follows from the seed that is set before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.papers.sixteen_bit import FP32, Training, constant, cosine, warm_linear
from examples.models.dlrm import DLRM, Clicks, auc, generate_clicks
from fxprec.demo.data import VOCAB, load_digits, load_text
from fxprec.demo.models import CharTransformer, SmallCNN
from fxprec.numerics.formats import BF16, Format

CONTEXT = 48
Figures = dict[str, float]


def trained(name: str, method: str, seed: int, fmt: Format = BF16) -> Figures:
    """Figures of the task of that name."""
    torch.manual_seed(seed)
    found: Figures = TASKS[name](Training(method, fmt), seed)
    return found


def small_cnn(run: Training, seed: int) -> Figures:
    """ResNet-18 on CIFAR-10: the residual CNN on digits, cosine schedule."""
    return _digits(run, SmallCNN(), epochs=12, lr=0.02, decay=5e-4)


def large_cnn(run: Training, seed: int) -> Figures:
    """ResNet-50 on ImageNet: four times the parameters, batches of 32."""
    return _digits(run, SmallCNN(width=32), epochs=6, lr=0.02, decay=1e-4, batch=32)


def _digits(run: Training, model: nn.Module, epochs: int, lr: float, decay: float, batch: int = 64) -> Figures:
    data = load_digits()
    steps = epochs * (len(data.train_labels) // batch)
    run.optimise(model, "SGD", cosine(steps), lr=lr, momentum=0.9, weight_decay=decay)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), y)

    for _ in range(epochs):
        order = torch.randperm(len(data.train_labels))
        for chosen in order.split(batch)[: len(order) // batch]:
            run.step(loss, data.train_images[chosen], data.train_labels[chosen])
    model.eval()
    with torch.no_grad():
        logits = run.forward(model, data.test_images)
    right = (logits.argmax(1) == data.test_labels).float().mean().item()
    return {"loss": functional.cross_entropy(logits, data.test_labels).item(), "score": 100 * right}


def click_kaggle(run: Training, seed: int) -> Figures:
    """DLRM on Kaggle: a constant learning rate of 0.1, batches of 128."""
    return clicks(run, seed, 1200, 128, 0.1, constant)


def click_terabyte(run: Training, seed: int) -> Figures:
    """DLRM on Terabyte: large batches, a high learning rate, warmed up, then down to 0."""
    return clicks(run, seed, 600, 512, 1.0, warm_linear(600, 30))


def clicks(
    run: Training, seed: int, steps: int, batch: int, lr: float, schedule: Callable[[int], float],
    watch: Callable[[int, nn.Module], None] = lambda step, model: None,
    optimise: Callable[[Training, nn.Module], None] | None = None,
) -> Figures:  # fmt: skip
    """Train a DLRM one epoch; ``watch`` sees it after every step; ``optimise`` makes another optimizer than SGD."""
    train, test = _clicks(steps * batch, 1 + seed), _clicks(40_000, 0)
    model = DLRM()
    if optimise is None:
        run.optimise(model, "SGD", schedule, lr=lr)
    else:
        optimise(run, model)
    late = []
    for i in range(steps):
        at = slice(i * batch, (i + 1) * batch)
        value = run.step(
            lambda x, c, y: functional.binary_cross_entropy_with_logits(model(x, c), y),
            train.dense[at], train.categories[at], train.clicked[at],
        )  # fmt: skip
        if i >= 7 * steps // 8:
            late.append(value)
        watch(i, model)
    with torch.no_grad():
        logits = run.forward(model, test.dense, test.categories)
    loss = functional.binary_cross_entropy_with_logits(logits, test.clicked).item()
    return {"loss": loss, "score": 100 * auc(logits, test.clicked), "training loss": sum(late) / len(late)}


@cache
def _clicks(count: int, seed: int) -> Clicks:
    return generate_clicks(count, seed=seed)


def characters(run: Training, seed: int) -> Figures:
    """BERT on Wiki103: a causal transformer over Python's source, from scratch."""
    model = CharTransformer(vocab=VOCAB, context=CONTEXT)
    loss = _train_characters(run, model, steps=240)
    text = load_text()
    torch.manual_seed(99)
    with torch.no_grad():
        held_out = run.forward(loss, *_snippets(text.held_out, 512)).item()
    return {"loss": held_out, "score": 2.718281828**held_out}


def _train_characters(run: Training, model: nn.Module, steps: int) -> Callable[..., Tensor]:
    text = load_text()
    run.optimise(model, "AdamW", warm_linear(steps, 20), lr=2e-3, betas=(0.9, 0.98))

    def loss(codes: Tensor, following: Tensor) -> Tensor:
        return functional.cross_entropy(model(codes).flatten(0, 1), following.flatten())

    for _ in range(steps):
        run.step(loss, *_snippets(text.train, 16))
    return loss


def _snippets(codes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(codes) - CONTEXT, (count, 1))
    found = codes[starts + torch.arange(CONTEXT + 1)]
    return found[:, :-1], found[:, 1:]


class Pairs(nn.Module):
    """Whether two snippets lie side by side in the text: features of a pretrained transformer, and a small head."""

    def __init__(self, body: CharTransformer) -> None:
        super().__init__()
        self.body, width = body, body.norm.normalized_shape[0]
        self.head = nn.Sequential(nn.Linear(4 * width, width), nn.ReLU(), nn.Linear(width, 2))

    def features(self, codes: Tensor) -> Tensor:
        x = self.body.embed(codes) + self.body.position[: codes.shape[1]]
        for block in self.body.blocks:
            x = block(x)
        return self.body.norm(x).mean(1)

    def forward(self, pair: Tensor) -> Tensor:
        one, two = self.features(pair[:, 0]), self.features(pair[:, 1])
        return self.head(torch.cat([one, two, (one - two).abs(), one * two], 1))


def text_pairs(run: Training, seed: int) -> Figures:
    """BERT on MNLI: a transformer pretrained in 32 bits, fine-tuned with a small learning rate."""
    model = Pairs(CharTransformer(vocab=VOCAB, context=CONTEXT))
    model.body.load_state_dict(_pretrained(seed))
    steps, text = 120, load_text()
    run.optimise(model, "AdamW", warm_linear(steps, 10), lr=3e-4, betas=(0.9, 0.98))

    def loss(pair: Tensor, label: Tensor) -> Tensor:
        return functional.cross_entropy(model(pair), label)

    for _ in range(steps):
        run.step(loss, *_pairs(text.train, 20))
    torch.manual_seed(99)
    pair, label = _pairs(text.held_out, 1500)
    with torch.no_grad():
        logits = run.forward(model, pair)
    right = (logits.argmax(1) == label).float().mean().item()
    return {"loss": functional.cross_entropy(logits, label).item(), "score": 100 * right}


@cache
def _pretrained(seed: int) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(1000 + seed)
        model = CharTransformer(vocab=VOCAB, context=CONTEXT)
        _train_characters(Training(FP32), model, steps=300)
    return model.state_dict()


def _pairs(codes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Snippets (count, 2, 48), and 1 where the second follows the first."""
    first, label = torch.randint(len(codes) - 2 * CONTEXT, (count,)), torch.randint(2, (count,))
    second = torch.where(label == 1, first + CONTEXT, torch.randint(len(codes) - CONTEXT, (count,)))
    return codes[torch.stack([first, second], 1)[..., None] + torch.arange(CONTEXT)], label


class Listener(nn.Module):
    """An LSTM, one operator at a time, over frames (batch, frames, bands); logits of tones and of a blank."""

    def __init__(self, bands: int, tones: int, width: int = 48) -> None:
        super().__init__()
        self.inputs, self.hidden = nn.Linear(bands, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(width, tones + 1)

    def forward(self, frames: Tensor) -> Tensor:
        given = self.inputs(frames)
        hidden = cell = torch.zeros(len(frames), self.hidden.in_features)
        states = []
        for t in range(frames.shape[1]):
            enter, forget, candidate, leave = (given[:, t] + self.hidden(hidden)).chunk(4, 1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * candidate.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            states.append(hidden)
        return self.out(torch.stack(states)).log_softmax(-1)  # (frames, batch, tones + 1)


def tones(run: Training, seed: int) -> Figures:
    """DeepSpeech2 on LibriSpeech: an LSTM and CTC on sequences of noisy tones; the score is the rate of wrong tones."""
    kinds, steps = 6, 240
    model = Listener(bands=16, tones=kinds)
    run.optimise(model, "SGD", lambda step: 0.99 ** (step // 4), lr=0.1, momentum=0.9, weight_decay=1e-5)

    def loss(frames: Tensor, labels: Tensor) -> Tensor:
        lengths = (torch.full((len(frames),), frames.shape[1]), torch.full((len(frames),), labels.shape[1]))
        return functional.ctc_loss(model(frames), labels, *lengths)

    for _ in range(steps):
        run.step(loss, *_heard(32, kinds))
    torch.manual_seed(99)
    frames, labels = _heard(400, kinds)
    with torch.no_grad():
        held_out, found = run.forward(loss, frames, labels).item(), run.forward(model, frames).argmax(2).T
    wrong = sum(_distance(a, b) for a, b in zip(_collapsed(found), labels.tolist(), strict=True))
    return {"loss": held_out, "score": 100 * wrong / labels.numel()}


def _heard(count: int, kinds: int, length: int = 4, bands: int = 16) -> tuple[Tensor, Tensor]:
    """Frames (count, 20, bands): each tone fills its own and its neighbours' band for 3 to 5 frames; labels from 1."""
    labels = torch.randint(1, kinds + 1, (count, length))
    spans = torch.randint(3, 6, (count, length))
    ends = spans.cumsum(1)
    at = torch.arange(20)
    frames = 0.5 * torch.randn(count, 20, bands)
    for i in range(length):
        sounding = ((at >= (ends - spans)[:, i, None]) & (at < ends[:, i, None])).float()
        band = 2 * labels[:, i]
        shape = torch.exp(-0.5 * (torch.arange(bands) - band[:, None]).square().float())
        frames += sounding[:, :, None] * shape[:, None, :]
    return frames, labels


def _collapsed(found: Tensor) -> Iterator[list[int]]:
    for row in found.tolist():
        kept = [v for v, before in zip(row, [None, *row], strict=False) if v != before]
        yield [v for v in kept if v]


def _distance(a: list[int], b: list[int]) -> int:
    """Edits from one sequence to the other."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1]


TASKS: dict[str, Callable[[Training, int], Figures]] = {
    "small CNN": small_cnn,
    "large CNN": large_cnn,
    "clicks, constant rate": click_kaggle,
    "clicks, decayed rate": click_terabyte,
    "text pairs": text_pairs,
    "characters": characters,
    "tones": tones,
}
