"""Find what stops a GPU: reading device values, numbers of the host sent to it, waiting for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator

ASKING = ("__bool__", "__float__", "__int__", "item", "tolist", "cpu", "numpy", "nonzero")


@contextmanager
def host_waits(*, leave_out: str) -> Iterator[list[str]]:
    """Places ("file:line") that would wait for a GPU; `leave_out`: folder of the caller's own."""
    places: list[str] = []

    def counted(own: Callable[..., Any], *, only_with: str | None = None) -> Callable[..., Any]:
        def ask(*values: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            is_wait = only_with is None or options.get(only_with) is not None
            if is_wait and os.path.dirname(frame.f_code.co_filename) != leave_out:
                places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            return own(*values, **options)

        return ask

    with ExitStack() as stack:
        for name in ASKING:
            own = getattr(torch.Tensor, name)
            stack.enter_context(patch.object(torch.Tensor, name, counted(own)))
        # Copies the numbers to the device, which waits for what the device is doing.
        tensor = counted(torch.tensor, only_with="device")
        stack.enter_context(patch.object(torch, "tensor", tensor))
        accelerator = get_accelerator()
        synchronize = counted(accelerator.synchronize)
        stack.enter_context(patch.object(accelerator, "synchronize", synchronize))
        yield places
