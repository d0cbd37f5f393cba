"""Checksums, and the description of ranks that differ."""

from __future__ import annotations

import pytest
import torch

from vitscale.engine.agreement import checksum, disagreement, num_negative, num_unequal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_single_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    size = tensor.element_size()
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    expected = checksum(tensor)
    for bit in range(8 * size):
        changed = tensor.clone()
        changed.view(bits)[1, 2] ^= torch.tensor(1).to(bits) << bit
        assert checksum(changed) != expected, bit


def test_zero_and_minus_zero_differ() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_unequal_elements_are_counted_in_the_dtype_of_the_copy() -> None:
    original = torch.tensor([1.0, 1.001, 3.0])
    copy = original.to(torch.bfloat16)
    assert num_unequal(copy, original) == 0
    copy[2] = 2.0
    assert num_unequal(copy, original) == 1


def test_the_sign_of_zero_is_a_bit_of_a_copy() -> None:
    original = torch.tensor([0.0, 1.5, 0.0])
    copy = original.to(torch.bfloat16)
    copy[2] = -0.0
    assert num_unequal(copy, original) == 1


def test_negative_elements_are_counted() -> None:
    assert num_negative(torch.tensor([0.0, 2.0, -1e-30, -3.0, torch.nan])) == 2


def test_majority_names_the_odd_rank_and_its_tensors() -> None:
    names = ["a", "b", "c", "d", "e"]
    good, bad = [1, 2, 3, 4, 5], [1, 0, 0, 0, 0]
    text = disagreement(names, [good, good, bad, good])
    assert text == "rank 2 differs from the other 3, in b, c, d and 1 more"
    assert disagreement(names, [good, good, good]) is None


def test_two_ranks_have_no_majority() -> None:
    text = disagreement(["a", "b"], [[1, 2], [1, 3]])
    assert text == "rank 0 and rank 1 differ; no majority shows which is wrong, in b"


def test_two_equal_halves_have_no_majority() -> None:
    found = disagreement(["a"], [[1], [1], [2], [2]])
    assert found == "rank 0 and rank 2, 3 differ; no majority shows which is wrong, in a"
