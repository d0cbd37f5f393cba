"""Tell of which kind an error is that ends a rank."""

from __future__ import annotations

import re

import torch

from vitscale.config.errors import FailureKind, PeerLostError, UserError

# How gloo, NCCL and the store say that a peer is gone.
CONNECTION_LOST = re.compile(
    r"[Cc]onnection|[Tt]imed out|[Tt]imeout|Broken pipe|got 0 bytes|remote process exited"
)
# torch raises it for errors of CUDA since 2.8.
DEVICE_ERRORS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))


def is_connection_lost(error: BaseException | None) -> bool:
    """Whether a collective or the store failed because another process is gone."""
    return isinstance(error, PeerLostError) or (
        isinstance(error, RuntimeError) and bool(CONNECTION_LOST.search(str(error)))
    )


def kind_and_text(error: BaseException) -> tuple[FailureKind, str]:
    """The kind of an error, and its first line."""
    if isinstance(error, UserError):
        where = f"{error.where}: " if error.where else ""
        return error.kind, where + error.what.splitlines()[0]
    lines = str(error).splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}".rstrip(": ")
    if isinstance(error, DEVICE_ERRORS):
        return FailureKind.DEVICE, text
    if is_connection_lost(error):
        return FailureKind.PEER_LOST, text
    if isinstance(error, OSError):
        return FailureKind.STORAGE, text
    return FailureKind.OTHER, text
