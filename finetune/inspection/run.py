"""Draw the pictures of a model, one PNG each, and upload them to its MLflow run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.inspection.attention import draw_distance, draw_rollout
from finetune.inspection.visualized import Visualized
from finetune.inspection.weights import draw_filters, draw_positions
from finetune.settings import PICTURES, VisualizeRun
from vitscale.config.errors import UserError, not_written
from vitscale.distributed.world import World
from vitscale.evaluation.sheet import save_figure
from vitscale.evaluation.trained_model import open_model
from vitscale.models.settings import ViTSettings
from vitscale.tracking.mlflow_sync import upload

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAW: dict[str, Callable[[Visualized], Figure]] = {
    "patch_filters": draw_filters,
    "position_similarity": draw_positions,
    "attention_distance": draw_distance,
    "attention_rollout": draw_rollout,
}


def draw_pictures(run: VisualizeRun, world: World) -> list[Path]:
    """Draw what `run` asks for and return the files; prints what is written and what is left out.

    Raises UserError, before anything is written, for input that cannot be read, and for a picture
    that is asked for by name and that the model does not have.
    """
    loaded = open_model(**run.source())
    subject = Visualized(run, loaded, world)
    print(f"model: {loaded.source}")
    missing = {
        name: why
        for name in PICTURES
        if (why := reason_unavailable(name, subject)) is not None
    }
    has = [name for name in PICTURES if name not in missing]
    for name in run.pictures:
        if name in missing:
            raise UserError(
                missing[name],
                where=f"pictures: {name}",
                allowed=", ".join(has),
                next_step="remove it from pictures",
            )
    for why in dict.fromkeys(missing.values()) if not run.pictures else ():
        print(
            f"left out {', '.join(name for name in missing if missing[name] == why)}: {why}"
        )
    written = []
    for name in [name for name in has if not run.pictures or name in run.pictures]:
        path = subject.folder / f"{name}.png"
        try:
            save_figure(DRAW[name](subject), path)
        except OSError as error:
            raise not_written(error, f"output={path}") from None
        written.append(path)
        print(f"wrote {path}", flush=True)
    if subject.skipped:
        skipped = dict.fromkeys(subject.skipped)
        print(
            f"skipped {len(skipped)} unreadable images; the first: {next(iter(skipped))}"
        )
    if run.mlflow and loaded.run is not None:
        upload(loaded.run.folder, written, say=print)
    return written


def reason_unavailable(name: str, subject: Visualized) -> str | None:
    """Return the reason that a picture cannot be drawn, or None."""
    if name != "patch_filters" and not isinstance(subject.loaded.arch, ViTSettings):
        what = "positions" if name == "position_similarity" else "attention"
        return f"only models of the family vit show their {what}"
    if PICTURES[name]:
        try:
            subject.images  # noqa: B018  # opens them
        except UserError as error:
            return f"no images: {error.what}; {error.next_step}"
    return None
