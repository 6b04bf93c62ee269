"""The random Hadamard matrix: orthogonal, random in its signs, and out of a product again."""

from __future__ import annotations

import torch

from fxprec.numerics.hadamard import SIZE, rotated


def seed(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


def matrix(value: int) -> torch.Tensor:
    return rotated(torch.eye(SIZE), seed(value))


def test_it_is_orthogonal_and_has_two_entries() -> None:
    found = matrix(5)
    assert found.abs().unique().tolist() == [0.25]
    assert torch.equal(found @ found.mT, torch.eye(SIZE))


def test_it_is_sylvesters_but_for_signs_of_rows() -> None:
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    wanted = torch.kron(torch.kron(two, two), torch.kron(two, two)) / 4
    assert torch.equal((matrix(5) * wanted).sum(1).abs(), torch.ones(SIZE))


def test_seeds_give_other_signs_and_one_seed_the_same() -> None:
    signs = {tuple(torch.sign(matrix(value)[:, 0]).tolist()) for value in range(50)}
    assert len(signs) == 50
    mean = torch.stack([matrix(value)[:, 0] for value in range(2000)]).mean(0) * 4
    assert float(mean.abs().max()) < 4 / 2000**0.5
    assert torch.equal(matrix(3), matrix(3))


def test_it_cancels_in_the_product_of_two_rotated_operands() -> None:
    a, b = torch.randn(6, 64), torch.randn(5, 64)
    torch.testing.assert_close(rotated(a, seed(9)) @ rotated(b, seed(9)).mT, a @ b.mT)


def test_shapes_and_dtypes() -> None:
    x = torch.randn(3, 4, 32).mT.contiguous().mT.to(torch.bfloat16)
    assert torch.equal(rotated(x, seed(1)), rotated(x.float().contiguous(), seed(1)))
