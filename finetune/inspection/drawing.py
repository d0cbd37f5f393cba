"""Draw the pictures of a model, one PNG each, and upload them to its MLflow run."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from finetune.inspection.registry import PICTURES
from finetune.inspection.settings import VisualizeRun
from finetune.inspection.subject import Inspected
from finetune.loading.loaded_model import load_model
from vitscale.config.errors import UserError, UserErrors
from vitscale.distributed.world import World
from vitscale.images.sheet import save_figure
from vitscale.tracking.mlflow_run import upload_to_linked_run


def draw_pictures(run: VisualizeRun, world: World) -> list[Path]:
    """Draw what `run` asks for and return the files; prints what is written and what is left out.

    Raises UserError, before anything is written, for input that cannot be read, and for a picture
    that is asked for by name and that the model does not have.
    """
    loaded = load_model(run)
    subject = Inspected(run, loaded, world)
    print(f"looking at {loaded.source}")
    missing = {name: why for name in PICTURES if (why := _missing(name, subject)) is not None}
    if not run.pictures:
        chosen = [name for name in PICTURES if name not in missing]
        _say_left_out(missing)
    else:
        chosen = [name for name in PICTURES if name in run.pictures]
        _refuse([name for name in chosen if name in missing], missing)
    written = []
    for name in chosen:
        figure = PICTURES[name].load().draw(subject)
        path = subject.folder / f"{name}.png"
        try:
            save_figure(figure, path)
        except OSError as error:
            raise UserError(
                f"cannot be written ({error.strerror})",
                where=str(path),
                next_step="choose another folder with output=",
            ) from None
        written.append(path)
        print(f"wrote {path}", flush=True)
    _say_skipped(subject)
    if run.mlflow and loaded.trained is not None:
        upload_to_linked_run(loaded.trained.run_folder, written, say=print)
    return written


def _missing(name: str, subject: Inspected) -> str | None:
    """Why there is no such picture; None if there is."""
    picture = PICTURES[name]
    why: str | None = picture.load().missing(subject)
    if why is None and picture.needs_images:
        try:
            subject.images  # noqa: B018  # opens them
        except UserError as error:
            why = f"no images: {error.what}; {error.next_step}"
    return why


def _say_left_out(missing: dict[str, str]) -> None:
    names = defaultdict(list)
    for name, why in missing.items():
        names[why].append(name)
    for why, some in names.items():
        print(f"left out {', '.join(some)}: {why}")


def _refuse(names: list[str], missing: dict[str, str]) -> None:
    if names:
        has = [name for name in PICTURES if name not in missing]
        raise UserErrors(
            [
                UserError(
                    missing[name],
                    where=f"pictures: {name}",
                    allowed=", ".join(has),
                    next_step="remove it from pictures",
                )
                for name in names
            ]
        )


def _say_skipped(subject: Inspected) -> None:
    reader = vars(subject).get("images")  # opened, if it is there
    if reader is not None and reader.skipped:
        first = next(iter(reader.skipped.values()))
        print(f"skipped {len(reader.skipped)} unreadable images; the first: {first}")
