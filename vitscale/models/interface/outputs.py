"""What a model's forward pass gives besides logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_output(output: str, inputs: Mapping[str, Any], *, known: tuple[str, ...]) -> None:
    """Check what a forward pass was asked for; `objective` is answered before.

    Raises ValueError for an output that the model does not have, and TypeError for inputs beside
    the images, which only `objective` takes.
    """
    if output not in known:
        raise ValueError(f"{output!r} is not one of {', '.join(known)}")
    if inputs:
        raise TypeError(f"output={output!r} takes images only, but got {', '.join(sorted(inputs))}")
