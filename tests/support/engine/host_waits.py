"""Find what would stop a GPU, on a CPU: every call that makes the host wait for the device.

Tensors made on the host from numbers count as the host's, and so does what follows from them alone;
all others count as the device's. `cuda_branches` lets DeepSpeed take its branches for CUDA.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

# What torch's sync debug mode finds (c10/cuda/CUDAFunctions.h: memcpy_and_sync, stream_synchronize)
# behind these names; it does not find events and devices that are synchronized.
READING = (
    "__bool__ __float__ __int__ __index__ __complex__ __array__ __contains__ __format__ __repr__ "
    "item tolist numpy is_nonzero equal allclose nonzero argwhere masked_select unique "
    "unique_consecutive bincount histc quantile nanquantile"
).split()
# These take a size from values of a tensor, unless it is given.
SIZED = {"repeat_interleave": "output_size", "one_hot": "num_classes"}
COPYING = ("tensor", "as_tensor", "asarray", "new_tensor")
SKIPPED = (__file__, "torch/overrides.py", "torch/_tensor.py", "torch/functional.py")


class _Watch(TorchFunctionMode):
    def __init__(self, *, leave_out: str) -> None:
        super().__init__()
        self.places: list[str] = []
        self._leave_out, self._host = leave_out, WeakIdKeyDictionary()

    def count(self) -> None:
        """The calling line waits."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename.endswith(SKIPPED):
            assert frame.f_back is not None
            frame = frame.f_back
        if os.path.dirname(frame.f_code.co_filename) != self._leave_out:
            self.places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options, name = kwargs or {}, getattr(func, "__name__", "")
        tensors = [each for each in _flat((*args, *options.values())) if _is_tensor(each)]
        of_host = [each in self._host for each in tensors]
        if self._waits(name, args, options, of_host):
            self.count()
        result = func(*args, **options)
        target = options.get("device", next((each for each in args if _is_device(each)), None))
        stays = all(of_host) and target is None
        for each in _flat((result,)):
            if _is_tensor(each) and stays and not any(each is given for given in tensors):
                self._host[each] = True
        return result

    def _waits(
        self, name: str, args: tuple[Any, ...], options: dict[str, Any], of_host: list[bool]
    ) -> bool:
        on_device = not all(of_host)
        if name in COPYING:
            return options.get("device") is not None and not on_device or name == "new_tensor"
        if name in READING or (name == "where" and len(args) + len(options) == 1):
            return on_device
        if name in SIZED and SIZED[name] not in options:
            sizes = args[1] if name == "repeat_interleave" and len(args) > 1 else None
            return on_device and (name == "one_hot" or _is_tensor(sizes))
        if name in ("__getitem__", "__setitem__", "index_put", "index_put_"):
            return on_device and any(
                _is_tensor(each) and each.dtype == torch.bool for each in _flat((args[1],))
            )
        if name in ("cpu", "cuda"):
            return on_device == (name == "cpu") and not options.get("non_blocking")
        blocking = not options.get("non_blocking", name == "copy_" and len(args) > 2 and args[2])
        if name == "copy_":
            return blocking and len(set(of_host)) > 1
        has_target = "device" in options or any(_is_device(each) for each in args[1:])
        return name == "to" and blocking and bool(of_host) and not on_device and has_target


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device | str)


@contextmanager
def host_waits(*, leave_out: str) -> Iterator[list[str]]:
    """Places ("file:line") that would wait for a GPU; `leave_out`: folder of the caller's own."""
    watch, accelerator = _Watch(leave_out=leave_out), get_accelerator()

    def counted(*_: Any, **__: Any) -> None:
        watch.count()

    run_backward = torch.autograd._engine_run_backward

    def watched(*args: Any, **options: Any) -> Any:
        with watch:  # torch leaves the mode for the whole backward pass, with its hooks
            return run_backward(*args, **options)

    with ExitStack() as stack:
        for owner in (accelerator, torch.cuda):
            stack.enter_context(patch.object(owner, "synchronize", counted))
        stack.enter_context(patch.object(Stream, "synchronize", counted))
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", watched))
        stack.enter_context(watch)
        yield watch.places


class Stream:
    """A stream of a device that runs everything at once."""

    def synchronize(self) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: Event) -> None: ...


class Event:
    """All before it has run."""

    def record(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True


@contextmanager
def cuda_branches() -> Iterator[None]:
    """DeepSpeed takes its branches for a device that runs beside the host."""
    accelerator, stream = get_accelerator(), Stream()
    never: Callable[..., bool] = lambda: False  # noqa: E731  # for three names
    with ExitStack() as stack:
        for name in ("is_synchronized_device", "resolves_data_dependency"):
            stack.enter_context(patch.object(accelerator, name, never))
        stack.enter_context(patch.object(accelerator, "handles_memory_backpressure", never))
        for name in ("current_stream", "default_stream"):
            stack.enter_context(patch.object(accelerator, name, lambda *_: stream))
        for name, value in (("Stream", Stream), ("Event", Event)):
            stack.enter_context(patch.object(type(accelerator), name, value))
        stack.enter_context(patch.object(torch.Tensor, "record_stream", lambda *_: None))
        yield
