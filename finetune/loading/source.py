"""Tell what `init=` names: a run, a checkpoint, or weights of another library."""

from __future__ import annotations

from pathlib import Path

from vitscale.checkpoint.folders import MANIFEST
from vitscale.config.errors import UserError
from vitscale.models.weights.folder import CONFIG
from vitscale.models.weights.reading import is_external
from vitscale.models.weights.suffixes import SUFFIXES

KINDS = (
    "a run folder (checkpoints/), a checkpoint folder (manifest.json), a folder of Hugging Face or "
    f"timm (config.json), or a file of weights ({', '.join(SUFFIXES)})"
)


def names_external_weights(init: str) -> bool:
    """Whether it names weights of another library; False: a run or a checkpoint.

    Raises UserError for paths that are none of these.
    """
    path = Path(init)
    if is_external(init):
        return True
    if path.is_file():
        what = f"{path.suffix or 'a name without suffix'} is no kind of weight file"
        raise UserError(what, where=f"init={init}", allowed=", ".join(SUFFIXES))
    if not path.is_dir() or (path / "checkpoints").is_dir() or (path / MANIFEST).is_file():
        return False
    weights = sorted(file.name for file in path.iterdir() if file.suffix in SUFFIXES)
    next_step = "correct the path"
    if weights:
        next_step = f"add the folder's {CONFIG}, or set init to the file {weights[0]}"
    raise UserError("holds no model", where=f"init={init}", allowed=KINDS, next_step=next_step)
