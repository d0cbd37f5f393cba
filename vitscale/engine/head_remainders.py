"""Give the last layer of a classifier its fp32 weights, where DeepSpeed keeps rounded ones.

Owns: for each of its parameters the difference between the fp32 original and the rounded value, on
every rank, renewed after each update. In the dtype of the rounded value, so that both together have
twice its digits.
Leaves out: adding them (the layer), where originals are (`layouts`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from vitscale.engine.layouts import Part


class HeadRemainders:
    """The remainders of all modules that have an attribute `remainders`; in fp32 there are none."""

    def __init__(
        self,
        model: nn.Module,
        parts: Iterable[Part],
        *,
        originals: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        """parts: of this rank. originals: whole tensors by name. dtype: of the rounded weights."""
        self._dtype, self._wholes = dtype, dict[str, torch.Tensor]()
        for prefix, module in model.named_modules():
            if hasattr(module, "remainders") and dtype != torch.float32:
                names = {n: f"{prefix}.{n}" for n, _ in module.named_parameters(recurse=False)}
                own = {n: torch.zeros_like(originals[names[n]], dtype=dtype) for n in names}
                module.remainders = own
                self._wholes |= {names[n]: whole for n, whole in own.items()}
        self._parts = [part for part in parts if part.name in self._wholes]
        self.renew()

    @torch.no_grad()
    def renew(self) -> None:
        """Call on all ranks, after any change of weights."""
        for whole in self._wholes.values():
            whole.zero_()
        for part in self._parts:
            original = part.of(part.updated)
            own = self._wholes[part.name].view(-1).narrow(0, part.start, part.num_values)
            own.copy_(original - original.to(self._dtype))
        if dist.get_world_size() > 1:
            for whole in self._wholes.values():
                dist.all_reduce(whole)  # one rank has each value, all others zero: exact
