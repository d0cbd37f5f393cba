"""Vectors of teachers as the bytes of `data.targets`, and back. B: batch, V: vectors, D: width.

The vectors of a teacher are the class token, then the patches. With int8 each has a scale: the
fp32 scales of all vectors come first. Numbers are little-endian.
"""

from __future__ import annotations

import torch

from vitscale.data.targets import SCALE_BYTES, VALUE_BYTES, Header

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
# A vector's largest value.
LARGEST = 127
# class token [B, D] and patches [B, patches, D] of a teacher, fp32
Features = tuple[torch.Tensor, torch.Tensor | None]


def encoded(vectors_BVD: torch.Tensor, precision: str) -> torch.Tensor:
    """fp32 -> uint8 [B, bytes]."""
    parts = []
    if precision == "int8":
        scale_BV1 = vectors_BVD.abs().amax(dim=-1, keepdim=True) / LARGEST
        # A vector of zeros has any scale.
        scale_BV1 = scale_BV1.clamp_min(torch.finfo(torch.float32).tiny)
        parts.append(scale_BV1)
        vectors_BVD = (vectors_BVD / scale_BV1).round()
    parts.append(vectors_BVD.to(DTYPES[precision]))
    flat = [part.flatten(1).contiguous().view(torch.uint8) for part in parts]
    return torch.cat(flat, dim=1)


def decoded(bytes_BN: torch.Tensor, header: Header) -> list[Features]:
    """The rows of a folder of targets, uint8, as the features of each teacher."""
    dtype = DTYPES[header.precision]
    start = 0

    def take(num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """The next numbers of all rows. A copy is aligned, which they need not be."""
        nonlocal start
        part = bytes_BN[:, start : start + num_bytes]
        start += num_bytes
        return part.clone(memory_format=torch.contiguous_format).view(dtype)

    found: list[Features] = []
    for teacher in header.teachers:
        num_vectors = teacher.num_vectors
        scale_BV1 = None
        if header.precision == "int8":
            scale_BV1 = take(num_vectors * SCALE_BYTES, torch.float32).unsqueeze(-1)
        num_bytes = num_vectors * teacher.width * VALUE_BYTES[header.precision]
        values = take(num_bytes, dtype)
        vectors_BVD = values.unflatten(1, (num_vectors, teacher.width)).float()
        if scale_BV1 is not None:
            vectors_BVD = vectors_BVD * scale_BV1

        patches = None
        if teacher.grid is not None:
            patches = vectors_BVD[:, 1:].contiguous()
        found.append((vectors_BVD[:, 0].contiguous(), patches))
    return found
