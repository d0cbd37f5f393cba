"""Nearest neighbours equal brute force."""

from __future__ import annotations

import torch

from finetune.inspection.pictures.nearest_neighbours import nearest


def test_neighbours_equal_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, bank = (torch.randn(rows, 8, generator=generator) for rows in (5, 40))
    bank = bank * torch.linspace(0.1, 9, 40)[:, None]  # lengths do not count
    cosines, rows = nearest(queries, bank, count=7)
    for query, found, numbers in zip(queries, cosines, rows, strict=True):
        all_cosines = [float(query @ row / (query.norm() * row.norm())) for row in bank]
        best = sorted(range(40), key=lambda number: -all_cosines[number])[:7]
        assert numbers.tolist() == best
        torch.testing.assert_close(found, torch.tensor([all_cosines[number] for number in best]))


def test_a_small_bank_gives_all_it_has() -> None:
    cosines, rows = nearest(torch.ones(2, 3), torch.eye(3), count=7)
    assert cosines.shape == rows.shape == (2, 3)
