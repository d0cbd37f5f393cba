"""What a model's forward pass gives besides logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def refuse_inputs(output: str, inputs: Mapping[str, Any]) -> None:
    """Raise TypeError for inputs beside the images, which only `objective` takes."""
    if inputs:
        raise TypeError(f"output={output!r} takes images only, but got {', '.join(sorted(inputs))}")
