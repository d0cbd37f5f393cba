"""Count reads of device values by the host: each one stops a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

ASKING = ("__bool__", "__float__", "__int__", "item", "tolist")


@contextmanager
def host_waits(*, leave_out: str) -> Iterator[list[str]]:
    """Places ("file:line") that ask for a tensor's value; `leave_out`: file of the caller's own."""
    places: list[str] = []

    def counted(own: Callable[..., Any]) -> Callable[..., Any]:
        def ask(tensor: torch.Tensor, *values: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_code.co_filename != leave_out:
                places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            return own(tensor, *values)

        return ask

    kept = {name: getattr(torch.Tensor, name) for name in ASKING}
    for name, own in kept.items():
        setattr(torch.Tensor, name, counted(own))
    try:
        yield places
    finally:
        for name, own in kept.items():
            setattr(torch.Tensor, name, own)
