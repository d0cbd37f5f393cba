"""status.py on a real SLURM: a job in every state, and who must do what then."""

import json
import re
import time
from collections.abc import Iterator

import pytest

from launch.jobs.queue import user_jobs
from launch.jobs.run_folders import newest_log
from launch.jobs.run_states import RunState, read_state
from launch.jobs.status_text import line_of
from tests.scripts.slurm.conftest import SlurmCluster, slurm_cluster
from tests.support.waiting import wait_until
from vitscale.runs.launching import LaunchSettings

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

# Held, so that a test sees the job in the queue before it begins.
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


# What is done to the job, and then shown: first states in which it never starts, each with the
# person who can change that; then states of a job that has run.
STEPS = """\
true | queued .*: job @ is held by its user \\(JobHeldUser\\); next: `scontrol release @`
scontrol update partitionname=test maxtime=2; scontrol release @ | never starts .PartitionTimeLimit
scontrol update partitionname=test maxtime=60 state=down | PartitionDown.; next: `scontrol up
scontrol update partitionname=test state=inactive | PartitionInactive.; next: `scontrol up
scontrol update nodename=n1,n2 state=drain reason=x; scontrol update partitionname=test state=up | \
an administrator: .* `scontrol update nodename=NODE state=resume`
touch $BROKEN; scontrol update nodename=n1 state=resume | could not start it \\(launch failed
rm $BROKEN; scontrol update nodename=n1,n2 state=resume; scontrol release @ | running for
scontrol suspend @ | job @ is suspended and goes on by itself; an administrator: `scontrol resume @`
scontrol resume @; scancel --signal=STOP @ | is stopped by a signal .*: `?scancel --signal=CONT @
scancel --signal=CONT @; scontrol requeuehold @ | paused .*: job @ is held .*: `scontrol release @`
scontrol release @ | running for
scontrol requeuehold state=specialexit @ | paused .*: job @ is held.*; next: `scontrol release @`
scontrol release @ | running for
scancel --signal=USR2 @ | paused .*\\(BeginTime\\); it starts by itself
scancel @ | stopped, .* signal.*; requeued, but job @ was cancelled \\(.* before the run started
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[SlurmCluster]:
    """Its nodes start no job while the file $BROKEN exists."""
    prolog = tmp_path_factory.mktemp("prolog") / "prolog"
    prolog.write_text(f"#!/bin/sh\ntest ! -e {prolog}-broken\n")
    prolog.chmod(0o755)
    with slurm_cluster(more=f"Prolog={prolog}\n") as cluster:
        cluster.environment["BROKEN"] = f"{prolog}-broken"
        yield cluster


def test_status_sees_every_state(slurm, submit, tmp_path):
    job = submit(STAGE)

    def wait_for(state, *, step):
        def is_there():
            run = read_state(tmp_path, user_jobs())
            return run.state == state and run.logged.step == step

        wait_until(is_there, else_say=slurm.logs, every_s=0.3)
        return read_state(tmp_path, user_jobs())

    printed = slurm.script("launch/status.py", "--json", tmp_path, cwd=tmp_path)
    [shown] = json.loads(printed)
    assert shown["state"] == "queued"
    assert shown["job"]["reason"] == "JobHeldUser"

    # From the queue to the end, through a stop and a second attempt.
    slurm.run(["scontrol", "release", job.job_id])
    running = wait_for(RunState.RUNNING, step=2)
    assert running.logged.total_steps == 4
    assert running.logged.images_per_s == 7.0
    assert running.job.nodes in ("n1", "n2")
    slurm.run(["scancel", "--signal=USR2", job.job_id])
    assert wait_for(RunState.PAUSED, step=2).restarts == {"stopped": 1}
    assert wait_for(RunState.FINISHED, step=4).restarts == {"stopped": 1}

    # One log has both attempts.
    log = newest_log(tmp_path)
    told = ("attempt 1 of the run", "step 2/4", "attempt 2 of the run", "step 4/4")
    assert re.search("(?s)" + ".*".join(told), log.read_text())


@pytest.mark.exhaustive  # SLURM takes minutes for some of its states
def test_status_says_who_must_do_what(slurm, submit, tmp_path):
    """One job in every state that a test can bring about; this clock is five minutes fast."""
    job_id = submit("import time; time.sleep(1000)").job_id

    # Durations must come from one clock: five minutes would show as such below.
    def line():
        return line_of(read_state(tmp_path, user_jobs()), now=time.time() + 300)

    for step in STEPS.replace("@", job_id).splitlines():
        command, text = step.split(" | ")
        slurm.run(["bash", "-c", command])
        wait_until(lambda: re.search(text, line()), else_say=line, every_s=0.3)  # noqa: B023
        assert "0:05:" not in line()
