"""The pictures of a trained model. A new one is one file and one line here. Needs no torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """Where the code of a picture is: imported only when it is drawn, since it needs torch."""

    code: str
    """Module with two functions: `missing(subject)` says why the model has no such picture, or
    None; `draw(subject)` returns the figure."""
    needs_images: bool = True

    def load(self) -> Any:
        """Import the module of `code`."""
        return importlib.import_module(self.code)


FOLDER = "finetune.inspection.pictures"
PICTURES = {
    "patch_filters": Picture(code=f"{FOLDER}.patch_filters", needs_images=False),
    "position_similarity": Picture(code=f"{FOLDER}.position_similarity", needs_images=False),
    "attention_distance": Picture(code=f"{FOLDER}.attention_distance"),
    "attention_rollout": Picture(code=f"{FOLDER}.attention_rollout"),
}
