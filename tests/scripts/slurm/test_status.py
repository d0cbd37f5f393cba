"""status.py and --follow on a real SLURM: one job that is queued, runs, is paused and finishes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.jobs.queue import user_jobs
from launch.jobs.states import RunState, RunStatus, read_state
from tests.support.waiting import PATIENCE_S, ROOT, wait_until
from vitscale.runs.launching import LaunchSettings

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

LAUNCH = LaunchSettings(timeout_min=5, signal_delay_s=30, sbatch={"hold": True})

# Logs and saves as training does: two steps, then two more after it was stopped.
STAGE = """
    import os, pathlib, signal, sys, time
    from vitscale.distributed.events import record_start
    from vitscale.tracking.journal import Journal
    stop = []
    for name in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(name, lambda *_: stop.append(1))
    run = pathlib.Path(sys.argv[2]).parents[1]
    first = 2 if (run / "checkpoints").exists() else 0
    record_start(run, first_step=first, total_steps=4)
    journal = Journal(run / "journal.jsonl", resume_step=first)
    for step in (first + 1, first + 2):
        journal.append({"train/loss": 1.0, "vitals/images_per_s": 7.0}, step=step)
        print(f"step {step}/4 loss 1.0000 lr 1.0e-01 img/s 7 wait 0% eta 0:00:09", flush=True)
    while first == 0 and not stop:
        time.sleep(0.05)
    folder = run / f"checkpoints/step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    sys.exit(0 if first else 75)
"""


@contextmanager
def following(
    run: Path,
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[str], None]]]:
    """`status.py RUN --follow`, and a function that waits until it has shown a text."""
    log = run / "follow.log"
    with open(log, "wb") as output:
        command = [sys.executable, str(ROOT / "launch/status.py"), str(run), "--follow"]
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Shells start background jobs with SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def await_text(text: str) -> None:
        wait_until(lambda: text in log.read_text(), else_say=log.read_text)

    try:
        yield process, await_text
    finally:
        process.kill()
        process.wait()


def test_status_and_follow_see_every_state(slurm, submit, tmp_path: Path) -> None:
    job = submit(STAGE)

    def wait_for(state: RunState, *, step: int) -> RunStatus:
        def is_there() -> bool:
            found = read_state(tmp_path, user_jobs())
            return (found.state, found.logged.step) == (state, step)

        wait_until(is_there, else_say=slurm.logs, every_s=0.3)
        return read_state(tmp_path, user_jobs())

    [shown] = json.loads(
        slurm.script("launch/status.py", "--json", tmp_path, cwd=tmp_path)
    )
    assert (shown["state"], shown["job"]["reason"]) == ("queued", "JobHeldUser")
    with following(tmp_path) as (process, await_text):
        await_text("held by its user")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
        await_text(f"job {job.job_id} continues")

    with following(tmp_path) as (process, await_text):
        await_text("held by its user")
        slurm.run(["scontrol", "release", job.job_id])
        running = wait_for(RunState.RUNNING, step=2)
        assert (running.logged.total_steps, running.logged.images_per_s) == (4, 7.0)
        assert running.job is not None and running.job.nodes in ("n1", "n2")
        await_text("step 2/4")
        slurm.run(["scancel", "--signal=USR2", job.job_id])
        assert wait_for(RunState.PAUSED, step=2).restarts == {"stopped": 1}
        assert wait_for(RunState.FINISHED, step=4).restarts == {"stopped": 1}
        assert process.wait(timeout=PATIENCE_S) == 0
    told = [
        r": queued .*: job \d+ held by its user",
        r"attempt 1 of the run",
        r"step 2/4",
        r": paused .*: job \d+ ",
        r"attempt 2 of the run",
        r"step 4/4",
        r": finished, 4 steps",
    ]
    text = (tmp_path / "follow.log").read_text()
    assert re.search("(?s)" + ".*".join(told), text), text
    assert text.count(": paused") == 1
