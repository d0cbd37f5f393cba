"""Give the last layer of a classifier its fp32 weights, where DeepSpeed keeps rounded ones.

Owns: for each of its parameters the difference between the fp32 original and the rounded value, on
every rank, renewed after each update. In the dtype of the rounded value, so that both together have
twice its digits.
Leaves out: adding them (the layer), where originals are (`layouts`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from vitscale.engine.layouts import Layout


class HeadRemainders:
    """Of all modules that have an attribute `remainders`. Costs one small all-reduce an update."""

    def __init__(self, model: nn.Module, layout: Layout, *, dtype: torch.dtype) -> None:
        """dtype: of the rounded weights."""
        named = [
            (module, name, parameter)
            for module in model.modules()
            if hasattr(module, "remainders")
            for name, parameter in module.named_parameters(recurse=False)
        ]
        shapes = [layout.shape(parameter) for _, _, parameter in named]
        device = named[0][2].device if named else None
        self._dtype = dtype
        self._flat = torch.zeros(sum(s.numel() for s in shapes), dtype=dtype, device=device)
        # (this rank's part of an original, where its remainder goes). Updates are in place.
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        wholes = self._flat.split([shape.numel() for shape in shapes])
        for (module, name, parameter), shape, whole in zip(named, shapes, wholes, strict=True):
            module.remainders = {**module.remainders, name: whole.view(shape)}  # type: ignore[dict-item,assignment]  # a dict of tensors
            start, own = layout.own_part(parameter, None, 0)
            if own.numel():
                self._parts.append((own.detach().view(-1), whole[start : start + own.numel()]))

    @torch.no_grad()
    def renew(self) -> None:
        """Call on all ranks, after any change of weights."""
        if not self._flat.numel():
            return
        self._flat.zero_()
        for original, remainder in self._parts:
            remainder.copy_(original - original.to(self._dtype))
        if dist.get_world_size() > 1:
            dist.all_reduce(self._flat)  # one rank has each value, all others zero: exact
