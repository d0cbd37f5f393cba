"""Folders of runs as a comparison and the state of a run read them, without a training."""

from pathlib import Path


def logged_run(folder: Path) -> Path:
    """Make the folder of a run that has logged a step, and no end."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("stage: pretrain\nname: a\n")
    (folder / "journal.jsonl").write_text('{"step": 1, "time": 1, "train/loss": 1}\n')
    return folder
