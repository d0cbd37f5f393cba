"""launch/status.py on a run that is queued, runs, is paused, fails and finishes."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

import pytest

from tests.scripts.launch.conftest import FakeSlurm
from tests.support.golden import Golden
from tests.support.waiting import ROOT

# What ranks leave behind: the start of a training of 100 steps, a logged step, its checkpoint.
STEP = """
now=$(date +%s.%N) checkpoint=$RUN/checkpoints/step-{step:08d}
started='"event": "started", "first_step": 0, "total_steps": 100'
mkdir -p $RUN/events
echo "{{$started, \\"time\\": $now}}" >> $RUN/events/n1.jsonl
logged='"step": {step}, "train/loss": 1.5, "vitals/images_per_s": 800.0'
echo "{{$logged, \\"time\\": $now}}" >> $RUN/journal.jsonl
mkdir -p $checkpoint
: > $checkpoint/manifest.json
"""
ENDED = "echo 'srun: error: n2: task 1: Exited with exit code {code}' >&2; exit {code}\n"
# Asks for the state while the ranks run.
ASK = f"""
cd $RUN/../..
{sys.executable} {ROOT}/launch/status.py runs/small > text
{sys.executable} {ROOT}/launch/status.py runs/small --json > json
"""
# What the ranks did, and the job's state and reason in the queue; None: SLURM does not answer.
STATES: dict[str, tuple[str, tuple[str, str] | None]] = {
    "queued": ("", ("PENDING", "Resources")),
    "running": (STEP.format(step=20) + ASK + "exit 0\n", ("RUNNING", "None")),
    "paused": (STEP.format(step=20) + ENDED.format(code=75), ("PENDING", "BeginTime")),
    "failed": (STEP.format(step=20) + ENDED.format(code=2), ("FAILED", "NonZeroExitCode")),
    "finished": (STEP.format(step=100) + "exit 0\n", ("COMPLETED", "None")),
    "no_slurm": (STEP.format(step=20) + ENDED.format(code=75), None),
}
# The values of --json that other programs read, as paths.
KEYS = ("name", "state", "logged/step", "logged/total_steps", "logged/images_per_s", "failure/what")


@pytest.mark.parametrize("name", STATES)
def test_status_shows(name: str, slurm: FakeSlurm, golden: Golden) -> None:
    ranks, job = STATES[name]
    if job is not None:
        (link,) = (slurm.run_folder / "slurm").glob("*.sh")
        now = int(time.time())
        nodes = "n[1-2]" if job[0] == "RUNNING" else ""
        row = ("12", "12", *job, now, nodes, now - 600, f"/x/{link.name}")
        slurm.write("queue", "|".join(map(str, row)) + "\n")
    if ranks:
        slurm.run_job(ranks)
    if name == "running":
        text, values = ((slurm.folder / file).read_text() for file in ("text", "json"))
    else:
        answers = job is not None
        text = slurm.call("launch/status.py", "runs/small", slurm=answers)
        values = slurm.call("launch/status.py", "runs/small", "--json", slurm=answers)
    (run,) = json.loads(values)
    lines = [f"{key}: {json.dumps(value_at(run, key))}" for key in KEYS]
    golden.text(f"status/{name}.txt", "\n".join([normal(text), *lines, ""]))


def value_at(run: Any, path: str) -> Any:
    for key in path.split("/"):
        run = None if run is None else run[key]
    return run


def normal(text: str) -> str:
    """Without durations and times."""
    text = re.sub(r"\b\d+:\d\d:\d\d\b", "DURATION", text)
    return re.sub(r"(\d{4}-\d\d-\d\d )?\b\d\d:\d\d\b", "TIME", text)
