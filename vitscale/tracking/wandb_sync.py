"""Send a run to Weights & Biases, or write it for `wandb sync` (WANDB_MODE=offline).

Online, a run that W&B has is continued. Offline, each start writes the run from its first step, and
the last one replaces the others when it is uploaded: `resume` would append it. wandb is an extra.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from shlex import quote

import wandb
import yaml

from vitscale.config.errors import EXIT_STOPPED_RESUMABLE
from vitscale.config.loader import shown_path
from vitscale.config.redaction import shared_yaml
from vitscale.tracking.mlflow_sync import RunReader, Status

# Unless the user has set them: no reports of errors to others, and no questions to a terminal.
ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
# W&B's own collections may have secrets: arguments, edits, the remote's address, output.
OFF = """
disable_git disable_code x_disable_meta x_disable_machine_info x_disable_stats
""".split()
# W&B's codes of a run that is preempted, and of one that is stopped by hand.
EXIT_CODES: dict[Status, int] = {
    "FINISHED": 0,
    "PAUSED": EXIT_STOPPED_RESUMABLE,
    "KILLED": 255,
}


class Reader(RunReader):
    """A run with the id of the MLflow run, in a project with the name of its experiment."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        settings = wandb.Settings(
            **dict.fromkeys(OFF, True),
            x_save_requirements=False,
            console="off",
            reinit="create_new",
            finish_timeout=25.0,  # a training waits little longer
            finish_timeout_raises=True,
        )

        self._run = wandb.init(
            dir=str(folder),
            # W&B allows 64 characters without these in an id.
            id=re.sub(r"[/\\#?%:]", "-", self.record.tracking_id)[-64:],
            project=self.record.experiment,
            name=self.record.name,
            notes=self.record.note,
            job_type=self.record.tags.get("vitscale.stage"),
            # A tag may have the name of a section.
            config=dict(self.record.tags) | yaml.safe_load(shared_yaml(self.config)),
            resume=None if wandb.setup().settings.mode == "offline" else "allow",
            settings=settings,
        )

        # Steps before it are there; W&B refuses to go back.
        self._first_step = self._run.starting_step
        self.run_id = self._run.url or shown_path(Path(self._run.dir).parent)
        self.page = self._run.url or f"wandb sync {quote(self.run_id)}"

    def sync(self, status: Status, *, ended: float | None = None) -> None:
        for row in self.new_rows():
            if row.step >= self._first_step:
                self._run.log({**row.metrics, "_timestamp": row.time}, step=row.step)
                self.num_points += len(row.metrics)
        # W&B then shows a run that waits to be resumed, and not a crashed one.
        if status == "PAUSED":
            self._run.mark_preempting()
        if status != "RUNNING":
            self._run.finish(exit_code=EXIT_CODES.get(status, 1))
