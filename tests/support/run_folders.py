"""Folders of runs as a comparison and the state of a run read them, without a training."""

from pathlib import Path

from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.tracker import Tracker


def logged_run(folder: Path) -> Path:
    """Make the folder of a run that has logged a step, and no end."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("stage: pretrain\nname: a\n")
    (folder / "journal.jsonl").write_text('{"step": 1, "time": 1, "train/loss": 1}\n')
    return folder


def tracker_of(folder: Path, *, uri: str | None = None, **more) -> Tracker:
    """The tracker of a pre-training, without a store or with one. more: of its arguments."""
    arguments = {
        "settings": TrackingSettings(uri=uri, system_metrics=False),
        "stage": "pretrain",
        "tags": {},
        "resume_step": 0,
        "is_writer": True,
        "say": lambda text: None,
    }
    return Tracker(folder, **(arguments | more))
