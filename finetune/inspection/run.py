"""Draw the pictures of a model, one PNG each, and upload them to its MLflow run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.inspection.attention import draw_last_layer, draw_rollout
from finetune.inspection.patches import draw_components, draw_similarity
from finetune.inspection.visualized import Visualized
from finetune.settings import PICTURES, VisualizeRun
from vitscale.config.errors import UserError, not_written
from vitscale.distributed.world import World
from vitscale.evaluation.sheet import save_figure
from vitscale.evaluation.trained_model import open_model
from vitscale.models.interface import attention_modules
from vitscale.tracking.mlflow_sync import upload

DRAW = {
    "patch_components": draw_components,
    "patch_similarity": draw_similarity,
    "last_attention": draw_last_layer,
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
    reasons = {name: reason_unavailable(name, subject.network) for name in PICTURES}
    available = [name for name, reason in reasons.items() if reason is None]
    for name in run.pictures or PICTURES:
        reason = reasons[name]
        if reason is None:
            continue
        if run.pictures or not available:
            raise UserError(
                reason,
                where=f"pictures: {name}",
                allowed=", ".join(available) or "none",
                next_step="remove it from pictures, or give another model",
            )
        print(f"left out {name}: {reason}")
    if run.pictures:
        available = [name for name in available if name in run.pictures]

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


def reason_unavailable(name: str, network: Any) -> str | None:
    """Return the reason that a picture cannot be drawn, or None."""
    if not (hasattr(network, "patch_embed") and hasattr(network, "num_prefix_tokens")):
        return "this model has no token for each patch"
    if "attention" in name and not attention_modules(network):
        return "only plain attention can be read, as of vit, DeiT and AugReg"
    return None
