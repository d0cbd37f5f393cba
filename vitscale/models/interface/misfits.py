"""The table of tensors that do not fit a model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vitscale.config.errors import UserError

MAX_ROWS = 12


def refuse_misfits(
    own: Mapping[str, torch.Tensor],
    given: Mapping[str, torch.Tensor],
    *,
    where: str,
    next_step: str,
) -> None:
    """Raise UserError with a table of every missing, unknown or misshapen tensor."""
    rows = []
    for name in sorted(own.keys() | given.keys()):
        ours = tuple(own[name].shape) if name in own else "not in this model"
        theirs = tuple(given[name].shape) if name in given else "not in the checkpoint"
        if ours != theirs:
            rows.append(f"    {name}: model {ours}, checkpoint {theirs}")
    if rows:
        more = [f"    ... {len(rows) - MAX_ROWS} more"] if len(rows) > MAX_ROWS else []
        table = "\n".join(rows[:MAX_ROWS] + more)
        raise UserError(
            f"{len(rows)} tensors do not fit: this is a checkpoint of another model\n{table}",
            where=where,
            next_step=next_step,
        )
