"""vitscale.json: what a folder that was exported here says of its weights.

Written by the export (`finetune/exporting/format.py`), read as `init=FOLDER`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitscale.config.errors import UserError
from vitscale.models.weights.files import read_json

DESCRIPTION = "vitscale.json"
FORMAT_VERSION = 1
WEIGHTS = ("model.safetensors", "model.npz")


def read_description(folder: Path) -> tuple[dict[str, Any], Path]:
    """Fields of `ExternalWeights`, and the file of the weights. Raises UserError for others."""
    path = folder / DESCRIPTION
    found = read_json(path)
    try:
        version = found["format_version"]
        rows, columns = map(int, found["grid"])
        how, names = dict(found["preprocessing"]), found["classes"]
        described = {
            "known": dict(found["model"]),
            "grid": (rows, columns),
            "preprocessing": {
                "mean": tuple(map(float, how["mean"])),
                "std": tuple(map(float, how["std"])),
                "eval_resize": str(how["eval_resize"]),
                "eval_crop_fraction": float(how["eval_crop_fraction"]),
                "eval_interpolation": str(how["eval_interpolation"]),
                "eval_antialias": bool(how["eval_antialias"]),
            },
            "classes": None if names is None else tuple(map(str, names)),
        }
    except (KeyError, TypeError, ValueError) as error:
        what = f"is no description of exported weights ({type(error).__name__}: {error})"
        raise UserError(what, where=str(path)) from None
    if version != FORMAT_VERSION:
        raise UserError(
            f"format version {version!r} is unknown", where=str(path), allowed=str(FORMAT_VERSION)
        )
    for name in WEIGHTS:
        if (folder / name).is_file():
            return described, folder / name
    raise UserError(
        f"has {DESCRIPTION}, but no weights",
        where=str(folder),
        allowed=", ".join(WEIGHTS),
        next_step="export the run again with --to safetensors",
    )
