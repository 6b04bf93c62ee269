"""A small DLRM (Naumov et al. 2019) and generated click data for it: no download, the same for the same seed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

DENSE, TABLES, ROWS, WIDTH = 13, 8, 400, 16
"""Dense features, categorical features, values of each, width of an embedding."""


class Clicks(NamedTuple):
    """Impressions: dense (n, 13) float32, categorical (n, 8) int64, clicked (n,) float32 of 0 and 1."""

    dense: Tensor
    categories: Tensor
    clicked: Tensor


def generate_clicks(count: int, seed: int = 0) -> Clicks:
    """Zipf-distributed categories, whose hidden vectors and the dense features decide the odds of a click."""
    world = torch.Generator().manual_seed(12345)  # one world; the seed draws from it
    hidden = torch.randn(TABLES, ROWS, 4, generator=world) * 0.55
    bias, slope = torch.randn(TABLES, ROWS, generator=world) * 0.3, torch.randn(DENSE, generator=world) * 0.2
    g = torch.Generator().manual_seed(seed)
    dense = torch.randn(count, DENSE, generator=g)
    popularity = (1 / torch.arange(1, ROWS + 1)).expand(TABLES, ROWS)
    categories = torch.multinomial(popularity, count, replacement=True, generator=g).T.contiguous()
    table = torch.arange(TABLES)
    vectors = hidden[table, categories]
    pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
    odds = 0.5 * pairs + bias[table, categories].sum(1) + dense @ slope - 1
    return Clicks(dense, categories, torch.bernoulli(odds.sigmoid(), generator=g))


class DLRM(nn.Module):
    """Embeddings and a bottom MLP, dot products of all pairs, a top MLP; logits of a click (n,)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(TABLES))
        for table in self.tables:
            nn.init.uniform_(table.weight, -(ROWS**-0.5), ROWS**-0.5)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 128), nn.ReLU(), nn.Linear(128, 1))
        self.interaction = Interaction()

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        vectors = [bottom, *(table(categories[:, i]) for i, table in enumerate(self.tables))]
        top: Tensor = self.top(torch.cat([bottom, self.interaction(torch.stack(vectors, 1))], 1))
        return top.squeeze(1)


class Interaction(nn.Module):
    """Dot products of all pairs of vectors (n, vectors, width) -> (n, pairs)."""

    def forward(self, vectors: Tensor) -> Tensor:
        products = vectors @ vectors.transpose(1, 2)
        row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1)
        return products[:, row, column]


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve: the share of (clicked, not clicked) pairs in the right order."""
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    positive = float(labels.sum())
    negative = len(labels) - positive
    return (float(ranks[labels > 0].sum()) - positive * (positive + 1) / 2) / (positive * negative)
