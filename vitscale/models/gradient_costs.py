"""What gradients add to the memory of a rank, as DeepSpeed's wrappers hold them.

From their sources (0.19.8, runtime/zero and runtime/engine.py). Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientBytes:
    """Bytes on one rank in the last micro-batch of an update, with buckets."""

    start: float
    """When the backward pass begins, and activations are whole."""
    end: float
    """When it ends, with all that follows until the update."""
    update: float


def gradient_bytes(
    count: int,
    *,
    largest: int,
    bucket_elements: int,
    zero_stage: int,
    world_size: int,
    precision: str,
    accumulation: int,
    overlaps: bool,
    reduces_in_fp32: bool = False,
) -> GradientBytes:
    """count: of all parameters; largest: elements of the largest one.

    overlaps: whether buckets are reduced during the backward pass.
    """
    share = count / world_size
    if zero_stage == 0:
        whole, flat = 4 * count, 0 if world_size == 1 else 4 * count  # in one piece, to be averaged
        return GradientBytes(
            start=whole if accumulation > 1 else 0, end=whole + flat, update=whole + flat
        )
    weight = 4 if precision == "fp32" else 2
    sent = 4 if reduces_in_fp32 else weight
    few = accumulation <= 2 and not reduces_in_fp32
    summed = 2 if zero_stage == 1 and precision == "bf16" and few else 4
    own = summed * share
    if zero_stage == 3:
        held = own + sent * bucket_elements  # always
        return GradientBytes(start=held, end=held, update=held + own)
    elements = max(bucket_elements, largest)
    staged = summed if zero_stage == 1 else weight
    buffers = (2 if overlaps else 1) * staged * elements
    # A bucket is flattened again, and converted for sending.
    moving = min(elements, count) * (staged + (sent if sent != staged else 0))
    sliced = summed != weight  # sums go into one fp32 slice, else into a list of tensors
    update = own if sliced else 2 * own + (4 * share if weight < 4 else 0)
    if zero_stage == 2:
        lists = own if not sliced and accumulation > 1 else 0
        held = own + lists + buffers + moving + (4 * largest if sliced else 0)
        return GradientBytes(start=held, end=held, update=update)
    kept = summed * count if accumulation > 1 else 0
    if overlaps:
        moved = min(kept, summed * elements)
        held = kept - moved + buffers + moving + own
        return GradientBytes(start=held, end=held, update=update + (buffers if sliced else 0))
    end = summed * max(count, elements) + (own + moving if sliced else max(own, moving))
    return GradientBytes(start=kept + buffers, end=end, update=update + (buffers if sliced else 0))
