"""status.py and --follow on a real SLURM: one job that is queued, runs, is paused and finishes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch.jobs.queue import user_jobs
from launch.jobs.states import RunState, RunStatus, read_state
from launch.jobs.submission import submit_to_slurm
from launch.jobs.task import StageJob
from tests.integration.slurm.conftest import ROOT
from tests.support.waiting import PATIENCE_S, wait_until
from vitscale.runs.launching import LaunchSettings

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

LAUNCH = LaunchSettings(timeout_min=5, signal_delay_s=30, sbatch={"hold": True})

# Logs and saves as training does: two steps, then two more after it was stopped.
STAGE = """
    import os, pathlib, signal, sys, time
    from vitscale.distributed.events import record_start
    from vitscale.tracking.journal import Journal
    from vitscale.tracking.console import plain_line
    stop = []
    for name in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(name, lambda *_: stop.append(1))
    run = pathlib.Path(sys.argv[2]).parents[1]
    first = 2 if (run / "checkpoints").exists() else 0
    record_start(run, first_step=first, total_steps=4)
    journal = Journal(run / "journal.jsonl", resume_step=first)
    for step in (first + 1, first + 2):
        line = plain_line(
            step=step, total_steps=4, loss=1.0, lr=0.1, images_per_s=7, data_wait=0, eta_s=9
        )
        journal.append({"train/loss": 1.0, "vitals/images_per_s": 7.0}, step=step)
        print(line, flush=True)
    while first == 0 and not stop:
        time.sleep(0.05)
    folder = run / f"checkpoints/step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()
    sys.exit(0 if first else 75)
"""


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm) -> Path:
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm.environment[name])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs/vit"
    (folder / "slurm").mkdir(parents=True)
    return folder


@contextmanager
def following(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`status.py vit --follow`, with its output in a file."""
    with open(log, "wb") as output:
        command = [sys.executable, str(ROOT / "launch/status.py"), "vit", "--follow"]
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Shells start background jobs with SIGINT ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_text(path: Path, text: str) -> None:
    wait_until(
        lambda: text in path.read_text(), else_say=lambda: f"no {text!r} in: {path.read_text()}"
    )


def test_status_and_follow_see_every_state(slurm, run_folder: Path, tmp_path: Path) -> None:
    (run_folder / "slurm/main.py").write_text(textwrap.dedent(STAGE))
    (run_folder / "slurm/config.yaml").touch()
    stage = StageJob(
        script=str(run_folder / "slurm/main.py"),
        config=str(run_folder / "slurm/config.yaml"),
        run_folder=str(run_folder),
    )
    job = submit_to_slurm(
        stage, launch=LAUNCH, name="vit", folder=run_folder / "slurm", run_folder=str(run_folder)
    )

    def status() -> RunStatus:
        return read_state(run_folder, user_jobs())

    def wait_for(state: RunState, *, step: int) -> RunStatus:
        def is_there() -> bool:
            found = status()
            return (found.state, found.logged.step) == (state, step)

        wait_until(is_there, else_say=lambda: f"{status()}\n{slurm.logs()}", every_s=0.3)
        return status()

    [shown] = json.loads(slurm.script("launch/status.py", "--json", cwd=tmp_path))
    assert (shown["state"], shown["job"]["reason"]) == ("queued", "JobHeldUser")
    log = tmp_path / "follow.log"
    with following(log) as process:
        wait_for_text(log, "held by its user")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
    assert f"job {job.job_id} continues" in log.read_text()

    with following(log) as process:
        wait_for_text(log, "held by its user")
        slurm.run(["scontrol", "release", job.job_id])
        running = wait_for(RunState.RUNNING, step=2)
        assert (running.logged.total_steps, running.logged.images_per_s) == (4, 7.0)
        assert running.job is not None and running.job.nodes in ("n1", "n2")
        wait_for_text(log, "step 2/4")
        slurm.run(["scancel", "--signal=USR2", job.job_id])
        assert wait_for(RunState.PAUSED, step=2).restarts == {"stopped": 1}
        finished = wait_for(RunState.FINISHED, step=4)
        assert finished.restarts == {"stopped": 1}
        assert process.wait(timeout=PATIENCE_S) == 0
    told = [
        r"runs/vit: queued .*: job \d+ held by its user",
        r"attempt 1 of the run",
        r"step 2/4",
        r"runs/vit: paused .*: job \d+ ",
        r"attempt 2 of the run",
        r"step 4/4",
        r"runs/vit: finished, 4 steps",
    ]
    assert re.search("(?s)" + ".*".join(told), log.read_text()), log.read_text()
    assert log.read_text().count("vit: paused") == 1
