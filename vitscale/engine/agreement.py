"""Check that all ranks hold the same weights, and values that training can give.

Owns: checksums of tensors, naming the rank whose checksums differ, and counts of wrong elements.
Leaves out: which tensors must be equal (`layouts`), and when to check (the loops).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAMES_SHOWN = 3


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the elements' bits as integers, int64 scalar on the tensor's device.

    Changes with any one bit, and with nearly any set of bits. Unlike a sum of floats, independent
    of the order of addition.
    """
    return tensor.detach().view(BITS[tensor.element_size()]).sum(dtype=torch.int64)


def num_unequal(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Count elements whose bits differ after rounding to the copy's dtype, int64 scalar."""
    ours, theirs = ours.detach().flatten(), theirs.detach().flatten()
    bits = BITS[ours.element_size()]
    rounded = theirs.to(ours.device, ours.dtype)
    return (ours.view(bits) != rounded.view(bits)).sum(dtype=torch.int64)


def num_negative(values: torch.Tensor) -> torch.Tensor:
    """Count elements below 0, int64 scalar."""
    return (values.detach() < 0).sum(dtype=torch.int64)


def disagreement(names: Sequence[str], rows: Sequence[Sequence[int]]) -> str | None:
    """Describe the ranks whose tensors differ from the majority; None when all are equal.

    names: of the tensors; rows: per rank one checksum for each of them.
    """
    counts = Counter(tuple(row) for row in rows).most_common()
    if len(counts) == 1:
        return None
    usual, support = counts[0]
    if support > 1 and support > counts[1][1]:
        odd = [rank for rank, row in enumerate(rows) if tuple(row) != usual]
        who = f"rank {', '.join(map(str, odd))} differs from the other {support}"
    else:
        odd = [rank for rank, row in enumerate(rows) if tuple(row) != tuple(rows[0])]
        who = f"rank 0 and rank {', '.join(map(str, odd))} differ; no majority shows which is wrong"
    other = rows[odd[0]]
    # Without a majority the first row counts as the usual one.
    differing = [name for name, a, b in zip(names, other, usual, strict=True) if a != b]
    return f"{who}, in {shown_names(differing)}"


def shown_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
