"""Draw the pictures of a model, one PNG each, and upload them to its MLflow run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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

DRAW = {
    "patch_filters": draw_filters,
    "position_similarity": draw_positions,
    "attention_distance": draw_distance,
    "attention_rollout": draw_rollout,
}


def draw_pictures(
    run: VisualizeRun, world: World, *, is_dry_run: bool = False
) -> list[Path]:
    """Draw what `run` asks for and return the files; prints what is written and what is left out.

    is_dry_run: prints which files it would write.

    Raises UserError, before anything is written, for input that cannot be read, and for a picture
    that is asked for by name and that the model does not have.
    """
    loaded = open_model(**run.source())
    subject = Visualized(run, loaded, world)
    print(f"model: {loaded.source}")

    # A picture that is asked for by name is an error if it cannot be drawn; else it is left out.
    reasons = {name: reason_unavailable(name, subject) for name in PICTURES}
    available = [name for name, reason in reasons.items() if reason is None]
    for name in run.pictures:
        reason = reasons[name]
        if reason is not None:
            raise UserError(
                reason,
                where=f"pictures: {name}",
                allowed=", ".join(available),
                next_step="remove it from pictures",
            )
    if run.pictures:
        available = [name for name in available if name in run.pictures]
    else:
        _print_left_out(reasons)

    written = []
    for name in available:
        # Each is written when it is drawn: an error in the last one costs no other.
        path = subject.folder / f"{name}.png"
        if is_dry_run:
            print(f"dry run: would write {path}")
            continue
        try:
            save_figure(DRAW[name](subject), path)
        except OSError as error:
            raise not_written(error, f"output={path}") from None
        written.append(path)
        print(f"wrote {path}", flush=True)

    # Several pictures skip the same image.
    skipped = [*dict.fromkeys(subject.skipped)]
    if skipped:
        print(f"skipped {len(skipped)} unreadable images; the first: {skipped[0]}")
    if run.mlflow and loaded.run is not None and written:
        upload(loaded.run.folder, written, say=print)
    return written


def _print_left_out(reasons: Mapping[str, str | None]) -> None:
    """One line for each reason. reasons: by the picture; None where it can be drawn."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason is not None:
            names_by_reason.setdefault(reason, []).append(name)
    for reason, names in names_by_reason.items():
        print(f"left out {', '.join(names)}: {reason}")


def reason_unavailable(name: str, subject: Visualized) -> str | None:
    """Return the reason that a picture cannot be drawn, or None."""
    # Only these models are known to have one position for each patch and timm's attention.
    if name != "patch_filters" and not isinstance(subject.loaded.arch, ViTSettings):
        subjects = "positions" if name == "position_similarity" else "attention"
        return f"only models of the family vit show their {subjects}"
    if PICTURES[name]:
        try:
            subject.images  # noqa: B018  # opens them
        except UserError as error:
            return f"no images: {error.what}; {error.next_step}"
    return None
