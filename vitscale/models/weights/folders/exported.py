"""vitscale.json: what a folder that was exported here says of its weights.

Written by the export, read as `init=FOLDER`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitscale.config.errors import UserError
from vitscale.models.weights.files.tensors import read_json

DESCRIPTION = "vitscale.json"
FORMAT_VERSION = 1
WEIGHTS = ("model.safetensors", "model.npz")


@dataclass(frozen=True, kw_only=True)
class Description:
    """Settings are named as in a configuration file: `model` and `data`."""

    model: dict[str, Any]
    num_classes: int
    grid: tuple[int, int]
    preprocessing: dict[str, Any]
    classes: tuple[str, ...] | None

    def as_json(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "num_classes": self.num_classes,
            "grid": list(self.grid),
            "preprocessing": self.preprocessing,
            "classes": None if self.classes is None else list(self.classes),
        }


def read_description(folder: Path) -> tuple[Description, Path]:
    """The description, and the file of the weights. Raises UserError for anything else."""
    path = folder / DESCRIPTION
    found = read_json(path)
    try:
        version = found["format_version"]
        rows, columns = map(int, found["grid"])
        how = dict(found["preprocessing"])
        names = found["classes"]
        description = Description(
            model=dict(found["model"]),
            num_classes=int(found["num_classes"]),
            grid=(rows, columns),
            preprocessing={
                "mean": tuple(map(float, how["mean"])),
                "std": tuple(map(float, how["std"])),
                "eval_resize": str(how["eval_resize"]),
                "eval_crop_fraction": float(how["eval_crop_fraction"]),
                "eval_interpolation": str(how["eval_interpolation"]),
                "eval_antialias": bool(how["eval_antialias"]),
            },
            classes=None if names is None else tuple(map(str, names)),
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"is no description of exported weights ({type(error).__name__}: {error})"
        raise UserError(what, where=str(path)) from None
    if version != FORMAT_VERSION:
        raise UserError(
            f"format version {version!r} is unknown", where=str(path), allowed=str(FORMAT_VERSION)
        )
    for name in WEIGHTS:
        if (folder / name).is_file():
            return description, folder / name
    raise UserError(
        f"has {DESCRIPTION}, but no weights",
        where=str(folder),
        allowed=", ".join(WEIGHTS),
        next_step="export the run again with --to safetensors",
    )
