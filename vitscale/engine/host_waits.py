"""Keep DeepSpeed's host code from waiting for the device in a step.

Owns: replacing what reads device values, sends numbers of the host, or stops the host until a
stream is empty. A host that waits launches no kernels, and the device idles until it has caught up.
Leaves out: other private parts of DeepSpeed (`layouts`).

Some waits stay. ZeRO 3 waits for its second-last reduction and fetch, which bounds memory; offload
waits for its copies to the host; fp16 asks for overflow. Written for DeepSpeed 0.19.5 to 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import utils as deepspeed_utils
from deepspeed.runtime.utils import is_invalid_grad_norm
from deepspeed.runtime.zero import stage3, stage_1_and_2


def remove_host_waits(engine: Any, *, dtype: torch.dtype) -> None:
    """Change DeepSpeed's modules, and the optimiser of this engine, so that its steps do not wait.

    Results stay the same bits. dtype: of the forward pass.
    """
    # The guard decides on the device whether a norm is finite. fp16's loss scale needs the answer.
    check = is_invalid_grad_norm if dtype == torch.float16 else lambda norm: False
    for module in (stage_1_and_2, stage3):
        module.is_invalid_grad_norm = check
    for module in (deepspeed_utils, stage_1_and_2, stage3):
        module.mask_nan_or_inf_with_val_inplace = _mask_not_finite
    stage3.torch = _TorchOfDevice()
    wrapper = engine.optimizer
    if getattr(wrapper, "cpu_offload", False) or getattr(wrapper, "offload_optimizer", False):
        return  # the host reads what was copied
    if getattr(wrapper, "reduction_stream", None) is not None:  # ZeRO 1 and 2
        streams = [wrapper.reduction_stream]
        epilogue = wrapper.independent_gradient_partition_epilogue
        wrapper.independent_gradient_partition_epilogue = _ordering(epilogue, streams)
        # Waits before each reduction to an owner.
        wrapper.allreduce_and_copy = _ordering(wrapper.allreduce_and_copy, streams)
    elif getattr(wrapper, "reduce_and_partition_stream", None) is not None:  # ZeRO 3
        reducing = wrapper.reduce_and_partition_stream
        fetching = wrapper.parameter_offload._DeepSpeedZeRoOffload__allgather_stream
        reducing.synchronize = lambda: _order([reducing])
        wrapper._post_step = _ordering(wrapper._post_step, [reducing, fetching])


class _TorchOfDevice:
    """torch for a module of DeepSpeed; a number becomes a tensor by a kernel, not by a copy."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        if device is not None and isinstance(data, int | float):
            return torch.full((), data, device=device, **options)
        return torch.tensor(data, device=device, **options)


def _mask_not_finite(tensor: torch.Tensor, device: Any = None, val: float = -1.0) -> None:
    tensor.copy_(torch.where(tensor.isfinite(), tensor, val))


def _ordering(call: Callable[..., Any], streams: list[Any]) -> Callable[..., Any]:
    """`call`, in which synchronising orders the device's streams and does not stop the host."""

    def ordered(*values: Any, **options: Any) -> Any:
        with _synchronized_by(lambda *_: _order(streams)):
            return call(*values, **options)

    return ordered


@contextmanager
def _synchronized_by(order: Callable[..., None]) -> Iterator[None]:
    accelerator = get_accelerator()
    own = accelerator.synchronize
    accelerator.synchronize = order
    try:
        yield
    finally:
        accelerator.synchronize = own


def _order(streams: list[Any]) -> None:
    """What these streams and the current one do later follows all that they do now."""
    current = get_accelerator().current_stream()
    for stream in streams:
        current.wait_stream(stream)
    for stream in streams:
        stream.wait_stream(current)
