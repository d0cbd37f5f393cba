"""The state of a run by what SLURM and its folder say, which folders names mean, and squeue."""

import ctypes
import glob
import os
import tempfile
import time
from contextlib import contextmanager
from ctypes import c_char_p
from pathlib import Path

import pytest
import yaml

from launch.comparison.runs import load_runs
from launch.jobs import queue
from launch.jobs.attempts import ATTEMPT, Ending, Outcome, begin_attempt, end_attempt
from launch.jobs.queue import NoAnswerError, QueuedJob, jobs_of, requeue, user_jobs
from launch.jobs.reasons import how_it_ended, why_it_waits
from launch.jobs.run_folders import find_runs
from launch.jobs.run_states import RunState, jobs_for, read_state
from launch.jobs.status_text import as_text, line_of
from tests.support.levels import skip_or_fail
from tests.support.run_folders import logged_run
from tests.support.tables import every, lines, refused, rows
from vitscale.config.errors import UserError
from vitscale.distributed.events import (
    FAILED,
    STARTED,
    append_event,
    read_start,
    record_start,
)
from vitscale.distributed.processes import node_name
from vitscale.tracking.journal import Row, encode

NOW = round(time.time(), 3)
JOB = "4711"
SCRIPT = ".submission_file_1a2b.sh"


class RunFolder:
    """Writes the files of a run."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "slurm" / JOB).mkdir(parents=True)

        # As submitit leaves it: the folder of the job may be gone.
        (folder / "slurm" / SCRIPT).symlink_to(f"{JOB}/{JOB}_submission.sh")
        self.submit(NOW - 100)

    def submit(self, moment):
        path = self.folder / "slurm" / SCRIPT
        os.utime(path, (moment, moment), follow_symlinks=False)

    def log(self, step, *, ago=10.0, **metrics):
        """The end of an interval, of a training of 100 steps that has started a minute ago."""
        if read_start(self.folder) is None:
            self.started(NOW - 60)
        row = Row(
            step=step,
            time=NOW - ago,
            metrics={"train/loss": 1.25, **metrics},
        )
        with open(self.folder / "journal.jsonl", "ab") as file:
            file.write(encode(row))

    def started(self, moment):
        facts = {"time": moment, "first_step": 0, "total_steps": 100}
        append_event(self.folder, STARTED, facts)

    def attempt(self, ending, *, number=1, **more):
        """One that has started a minute ago, and ended now unless `ending` is None."""
        values = yaml.safe_load("{cluster: slurm, restart: 0, nodes: [n1, n2]}")
        values |= {"number": number, "job_id": JOB, "started": NOW - 60}
        if ending:
            values |= {"ended": NOW, "ending": ending, "reason": "why"}
        append_event(self.folder, ATTEMPT, values | more)

    def checkpoint(self, step):
        folder = self.folder / f"checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()

    def line(self, *jobs: QueuedJob, now=NOW):
        return line_of(read_state(self.folder, jobs), now=now)

    def state(self, *jobs: QueuedJob):
        return read_state(self.folder, jobs).state


def job(state, *, reason=None, **more) -> QueuedJob:
    values = {
        **dict.fromkeys(("job_id", "submitted_id"), JOB),
        "start": None,
        "nodes": None,
        "submitted": NOW - 720,
        "script": f"/else/where/{SCRIPT}",
    }
    return QueuedJob(state=state, reason=reason, **values | more)


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "vit")


def test_a_started_job_is_running(run):
    run.checkpoint(50)
    run.attempt(None)
    running = job("RUNNING", nodes="n[1-2]")
    run.log(58, ago=90)  # before this start, and after its checkpoint
    line = run.line(running)
    assert "vit: running for 0:01:00, starting from step 50; job 4711 on n[1" in line

    # Two intervals of this start are enough for a rate, and hence for the time that is left.
    run.log(62, ago=14)
    run.log(64, **{"vitals/images_per_s": 812.0, "vitals/mfu": 0.4})
    line = run.line(running)
    assert "step 64 of 100 (64%), 812 img/s, MFU 40.0%, 0:01:02 left; job" in line


def test_a_run_without_new_lines_says_so(run):
    running = job("RUNNING", start=NOW - 60)
    run.log(2, ago=50)
    run.log(4, ago=40)
    # Steps have taken 5 s so far, and for three minutes none has come.
    assert "last step 0:03:00 ago" in run.line(running, now=NOW + 140)

    run.log(99, ago=35)  # a second before its end
    assert "left" not in run.line(running)


def test_a_complete_run_is_finished(run):
    run.log(98)
    run.log(100, **{"val/top1": 0.75})

    # All steps are logged, but the last checkpoint is not whole.
    run.checkpoint(90)
    assert run.state() == "stopped"

    run.checkpoint(100)
    line = "finished, 100 steps, 0:00:10 ago; val/top1 0.7500, train/loss 1.2500"
    assert line in run.line()


# An attempt whose node died has no ending, if none followed it.
@lines("""
ending         | state
done           | finished
stopped        | stopped
ended by SLURM | stopped
failed         | failed
               | failed
""")
def test_the_last_attempt_says_how_a_run_ended(run, ending, state):
    run.log(10)
    # A success between: only attempts that ended otherwise count as restarts.
    for number, word in enumerate((ending, "done", ending), start=1):
        run.attempt(word or None, number=number)

    found = read_state(run.folder, [])
    is_ended = ending not in ("", "done")
    assert found.state == state
    assert found.restarts == ({ending: 1} if is_ended else {})
    # Without an ending the last sign of life is the last line of its journal.
    assert found.since == (NOW if ending else NOW - 10)
    assert (": why" in run.line()) == is_ended


def test_without_slurm_an_open_attempt_counts_as_running(run):
    run.attempt(None)
    # None: nothing is known of jobs, which is not the same as no job.
    state = read_state(run.folder, None)
    assert state.state is RunState.RUNNING
    assert state.place.endswith("on n1, n2, as its records say: SLURM does not answer")


def test_a_process_of_this_machine_is_running(run):
    """Started by launch/local.py, or by another launcher."""
    record_start(run.folder, first_step=0, total_steps=9)
    state = read_state(run.folder, None)
    assert state.state is RunState.RUNNING
    assert state.place == f"process {os.getpid()} on this machine"


def test_an_evaluation_that_is_repeated_is_running(run):
    (run.folder / "results.json").touch()
    assert read_state(run.folder, None).state is RunState.FINISHED

    # A process of this node that still runs holds the folder.
    lock = run.folder / ".lock"
    lock.write_text(f"process {os.getpid()} on {node_name()}")
    assert read_state(run.folder, None).state is RunState.RUNNING
    lock.write_text("")
    assert read_state(run.folder, None).state is RunState.FINISHED


def test_a_training_of_another_launcher_has_failed(run):
    run.log(4)
    assert run.state() == "stopped"

    # No attempt has recorded an end: what a rank has recorded is all there is.
    failure = {
        "kind": "storage",
        "what": "the disk is full",
        "step": 4,
    }
    append_event(run.folder, FAILED, failure)
    assert ": the disk is full (storage, step 4)" in run.line()


def test_a_job_without_nodes_waits_for_what_slurm_says(run):
    """JOB STATE CODES of `man squeue`."""
    run.attempt(Ending.STOPPED)
    for state in "REQUEUED REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT SUSPENDED".split():
        assert run.state(job(state)) == "paused"


def test_an_array_runs_while_a_task_does(run):
    # One task waits while another runs.
    live = [
        job("PENDING", job_id=f"{JOB}_2"),
        job("RUNNING", job_id=f"{JOB}_1", nodes="n1"),
    ]
    state = read_state(run.folder, live)
    assert state.state == RunState.RUNNING
    assert state.place == f"job {JOB}_1 on n1"

    # The tasks of a preparation share its output; without a record there is nothing to go by.
    shards = run.folder.parent / "shards"
    config = f"stage: data_prep\noutput: {shards}\n"
    (run.folder / "slurm/config-1.yaml").write_text(config)
    earlier = run.folder / "slurm/config-2.yaml"
    earlier.write_text("output: elsewhere")
    os.utime(earlier, (1, 1))
    assert run.state() == "not started"

    # Of a line of `launch.setup` that ends the job.
    log = run.folder / f"slurm/{JOB}/{JOB}_0_0_log.out"
    log.touch()
    assert run.state() == "failed"

    # One failed task is a failed array, until the output is whole.
    for task, ending in enumerate((Ending.DONE, Ending.FAILED, Ending.DONE)):
        RunFolder(run.folder / f"slurm/{JOB}/{JOB}_{task}").attempt(ending)
    assert run.state() == "failed"
    shards.mkdir()
    (shards / "manifest.json").touch()
    assert run.state() == "finished"


def test_several_runs_are_ordered_and_counted(run):
    other = RunFolder(run.folder.parent / "other")
    endings = (Ending.STOPPED, Ending.FAILED, Ending.STOPPED, Ending.DONE)
    for number, ending in enumerate(endings, start=1):
        other.attempt(ending, number=number)
    waiting = job("PENDING", reason="Resources", start=NOW + 60)
    runs = [read_state(other.folder, []), read_state(run.folder, [waiting])]
    text = as_text(runs, now=NOW)

    # What still needs attention comes first.
    first, second, third = text.splitlines()
    assert "vit: queued since " in first
    assert "free nodes (Resources); expected to" in first
    assert "other: finished" in second
    assert "3x (2 stopped, 1 failed)" in second
    assert third == "2 runs: 1 queued, 1 finished"

    # No time is expected of a job that SLURM has suspended.
    suspended = read_state(run.folder, [job("SUSPENDED")])
    assert "is suspended and goes on by itself" in as_text([suspended], now=NOW)


# ---- what must be done -------------------------------------------------------------------------

LIBRARIES = ("/usr/lib/*/slurm-wlm/libslurmfull.so", "/usr/lib*/slurm/libslurmfull.so")


# State, reason as squeue prints it, and what to do: by slurm.schedmd.com/job_reason_codes.html.
@lines("""
state|reason|to_do
PENDING|JobHeldUser|next: `scontrol release 4711`
PENDING|job requeued in held state|next: `scontrol release 4711`
SPECIAL_EXIT|job requeued in held state|next: `scontrol release 4711`
REQUEUE_HOLD||next: `scontrol release 4711`
PENDING|JobHeldAdmin|an administrator: `scontrol release 4711`
PENDING|launch failed requeued held|next: `scontrol release 4711`; an administrator: `sinfo -R`
PENDING|launch_failed_requeued_held|next: `scontrol release 4711`; an administrator: `sinfo -R`
PENDING|JobHoldMaxRequeue|next: `scontrol release 4711`
PENDING|Nodes required for job are DOWN, DRAINED or reserved|an administrator: `sinfo -R`
PENDING|ReqNodeNotAvail, UnavailableNodes:n[1-2]|update nodename=n[1-2] state=resume`
PENDING|ReqNodeNotAvail(Unavailable:n1)|update nodename=n1 state=resume`
PENDING|ReqNodeNotAvail, Reserved for maintenance|update jobid=4711 timelimit=MINUTES`
PENDING|ReqNodeNotAvail, May be reserved for other job|it starts by itself
PENDING|NodeDown|an administrator: `sinfo -R`
PENDING|DependencyNeverSatisfied|never starts (DependencyNeverSatisfied); next: `scancel 4711`
PENDING|Dependency|it starts by itself
PENDING|PartitionDown|an administrator: `scontrol update partitionname=NAME state=up`
PENDING|PartitionInactive|next: `scontrol update jobid=4711 partition=NAME`
PENDING|PartitionTimeLimit|never starts (PartitionTimeLimit); next: `scontrol update jobid=4711 ti
PENDING|PartitionConfig|never starts (PartitionConfig); next: `scancel 4711`
PENDING|BadConstraints|never starts (BadConstraints); next: `scancel 4711`
PENDING|Reservation|it starts by itself
PENDING|ReservationDeleted|next: `scontrol update jobid=4711 reservationname=`
RESV_DEL_HOLD||next: `scontrol update jobid=4711 reservationname=`
PENDING|Licenses|it starts by itself
PENDING|InvalidAccount|another launch.account; an administrator adds you
PENDING|InvalidQOS|another launch.sbatch.qos; an administrator adds you
PENDING|QOSMaxWallDurationPerJobLimit|never starts (QOSMaxWallDurationPerJobLimit); next: `scan
PENDING|QOSMinGRES|never starts (QOSMinGRES); next: `scancel 4711`
PENDING|QOSMaxJobsPerUserLimit|it starts by itself when running jobs
PENDING|MaxGRESPerAccount|it starts by itself when running jobs
PENDING|AssocGrpCPUMinutesLimit|or an administrator adds time
PENDING|AssocGrpCPURunMinutesLimit|it starts by itself when running jobs
PENDING|QOSUsageThreshold|or an administrator adds time
PENDING|BurstBufferOperation|an administrator: `scontrol show job 4711`
PENDING|OfTomorrow|next: `scontrol show job 4711`; ask an administrator
PENDING||it starts by itself
SUSPENDED||goes on by itself; an administrator: `scontrol resume 4711`
STOPPED||next: `scancel --signal=CONT 4711`
CONFIGURING||it starts by itself
COMPLETING|NonZeroExitCode|an administrator: `scontrol update nodename=NODE state=down
""")
def test_a_job_that_waits_says_what_to_do(run, state, reason, to_do):
    assert to_do in run.line(job(state, reason=reason or None))


@pytest.mark.slurm
def test_slurm_has_no_reason_without_advice():
    """All that the installed SLURM may say."""
    libraries = [path for pattern in LIBRARIES for path in glob.glob(pattern)]
    if not libraries:
        skip_or_fail("no SLURM here")
    library = ctypes.CDLL(libraries[0])

    # ctypes takes every result for an int otherwise.
    library.job_reason_string.restype = c_char_p
    library.job_state_string.restype = c_char_p
    reasons = {library.job_reason_string(code).decode() for code in range(400)}

    # States are numbers below 16, and flags above.
    codes = [*range(16), *(1 << bit for bit in range(8, 24))]
    states = {library.job_state_string(code).decode() for code in codes} - {"?"}

    # With fewer than SLURM 22.05 has, the library was not read as it is meant.
    assert len(reasons) > 190
    assert len(states) > 20

    jobs = [job("PENDING", reason=reason) for reason in reasons if reason.isalpha()]
    jobs += [job(state) for state in states]
    for queued in jobs:
        if queued.has_ended:
            how_it_ended(queued)
            continue
        _, to_do = why_it_waits(queued)
        assert to_do, queued
        assert "ask an" not in to_do, queued


# How the last attempt ended, what SLURM says of the job (nothing: it has forgotten it), and what
# status says.
@lines("""
attempt|state|reason|line
|||not started: job 4711 ended before the run started, and SLURM no longer says why; submit
|CANCELLED|DependencyNeverSatisfied|not started: job 4711 was cancelled, since a job that it needs
|CANCELLED|JobHeldUser|not started: job 4711 was cancelled (CANCELLED, JobHeldUser) before the run
|FAILED|JobLaunchFailure|failed: job 4711 could not be started (FAILED, JobLaunchFailure) before
|FAILED|NonZeroExitCode|failed: job 4711 failed (FAILED, NonZeroExitCode) before the run started
|BOOT_FAIL||nodename=NODE state=resume` returns it; the same command resumes it
open|||failed: no record of its end: it was cancelled, or its node died; the same command resumes it
open|CANCELLED||stopped: job 4711 was cancelled (CANCELLED); the same command resumes it
open|NODE_FAIL||failed: job 4711 lost a node (NODE_FAIL); an administrator: `sinfo -R`
open|TIMEOUT|TimeLimit|failed: job 4711 reached its time limit (TIMEOUT, TimeLimit); the same
open|OUT_OF_MEMORY|OutOfMemory|a larger launch.mem_gb, or fewer data.num_workers, may help; the same
ended by SLURM|CANCELLED||stopped, 0:00:00 ago: job 4711 was cancelled (CANCELLED); the same
ended by SLURM|FAILED|JobLaunchFailure|job 4711 could not be started (FAILED, JobLaunchFailure); the
failed|FAILED|NonZeroExitCode|failed, 0:00:00 ago: rank 1 was killed
failed requeued|FAILED|JobLaunchFailure|rank 1 was killed; requeued, but job 4711 could not be sta
failed requeued|CANCELLED|BeginTime|stopped, 0:00:00 ago: rank 1 was killed; requeued, but job 4711
failed requeued|||requeued, but job 4711 ended before the run started again, and SLURM no longer say
stopped requeued|PREEMPTED||job 4711 was preempted (PREEMPTED) before the run started again; the
""")
def test_an_end_that_no_attempt_has_recorded_is_explained(
    run, attempt, state, reason, line
):
    ending = attempt.removesuffix(" requeued").replace("open", "")
    requeued = {"is_requeued": True} if "requeued" in attempt else {}
    if attempt:
        killed = "rank 1 was killed" if ending else ""
        run.attempt(ending or None, reason=killed, **requeued)

    # SLURM forgets a job after some minutes.
    jobs = [job(state, reason=reason or None)] if state else []
    assert line in run.line(*jobs)


def test_an_attempt_that_follows_the_submission_counts(run):
    # Submitted again since: how the job before it ended no longer matters.
    for moment, is_later in ((NOW - 90, True), (NOW, False)):
        run.submit(moment)
        run.attempt(Ending.FAILED, reason="rank 1 was killed", job_id="4710")
        assert ("rank 1 was killed" in run.line()) == is_later


@every(node_ahead="-300, 0, 300", here_ahead="-300, 0, 300")
def test_clocks_that_differ_change_no_age(run, here_ahead, node_ahead):
    # The node writes records with its clock; who looks has another one.
    began = NOW - 60 + node_ahead
    run.attempt(None, started=began)
    run.started(began)
    run.log(1, ago=50 - node_ahead)
    run.log(41, ago=10 - node_ahead)

    running = job("RUNNING", start=NOW - 61, seen=NOW)
    line = run.line(running, now=NOW + here_ahead)
    assert "running for 0:01:01, step 41 of 100 (41%), 0:0" in line
    assert "ago" not in line
    assert "0:00:00" not in line

    # What squeue says is measured against its own clock, `seen`.
    queued = job(
        "PENDING",
        reason="Resources",
        submitted=NOW - 60,
        seen=NOW,
    )
    assert "(0:01:00)" in run.line(queued, now=NOW + here_ahead)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Runs: one trained, one submitted, two of a chain; and what is none."""
    monkeypatch.chdir(tmp_path)
    for path in (
        "vit/config.yaml",
        "chain/a/journal.jsonl",
        "chain/b/config.yaml",
        # MLflow keeps copies of configurations, which look like runs.
        "chain/mlflow-artifacts/1/config.yaml",
    ):
        file = tmp_path / "runs" / path
        file.parent.mkdir(parents=True)
        file.touch()
    for folder in "runs/submitted/slurm runs/mlartifacts/1 images vit".split():
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def test_runs_are_found_by_name_and_by_folder(here, monkeypatch):
    names = "chain/a chain/b submitted vit".split()
    assert find_runs([]) == [Path("runs") / name for name in names]
    # The folder `vit` here has no run, so the run of that name is meant, and listed once.
    assert find_runs(["vit", "runs/vit"]) == [Path("runs/vit")]
    assert find_runs(["chain"]) == [Path("runs/chain/a"), Path("runs/chain/b")]

    monkeypatch.chdir(here / "images")
    with refused("no such run: runs\n"):
        find_runs([])


# A folder that is there but no run; a typing error; several errors at once.
@rows(r"""
- [names, report]
- [[images], "(?s)no run folder in images.*one of: chain/a, chain/b, submitted, vit"]
- [[vitt], 'no such run: vitt\n.*\n.*did you mean vit\?']
- - [x, runs/vit/config.yaml]
  - "(?s)no such run: x.*no such run: runs/vit/config.yaml"
""")
def test_a_name_that_is_no_run_is_an_error(here, names, report):
    with refused(report):
        find_runs(names)


# ---- jobs of a run folder, read from squeue's answer --------------------------------------------

# As squeue of SLURM 22.05 prints them with SLURM_TIME_FORMAT=%s and --verbose.
ANSWER = """\
-----------------------------
array       = true
format      = %i|%F|%T|%r|%S|%N|%V|%o
verbose     = 1
-----------------------------


Fri Nov 27 23:20:52 2026
last_update_time=1795371199 records=5
10|10|PENDING|Dependency|N/A||1795371188|/runs/a|b/slurm/.submission_file_c2.sh
9_1|9|RUNNING|None|1795371189|n[1-2]|1795371188|/runs/a|b/slurm/.submission_file_c1.sh
9_0|9|FAILED|NonZeroExitCode|1795371189|n1|1795371188|/runs/a|b/slurm/.submission_file_c1.sh
8|8|RUNNING|None|1795371189|n2|1795371188|/elsewhere/job.sh
7|7|PENDING|Resources|1795374789||1795371188|(null)
slurm_load_jobs warning of some kind
"""


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """A squeue on PATH that prints ANSWER, and its environment into a file next to it."""
    program = tmp_path / "bin/squeue"
    program.parent.mkdir()
    (program.parent / "answer").write_text(ANSWER)

    # The environment is what the test reads: settings of squeue must not reach it.
    program.write_text(
        '#!/bin/sh\n{ env; echo "$*"; } > "$0.env"\ncat "${0%squeue}answer"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return program


def test_a_folder_has_the_jobs_whose_script_it_holds(squeue, tmp_path):
    # By the script, since names of jobs repeat: every submission of a run has the same one.
    folder = tmp_path / "run"
    (folder / "slurm").mkdir(parents=True)
    for name in ("c1", "c2"):
        (folder / f"slurm/.submission_file_{name}.sh").symlink_to("gone")
    assert [job.job_id for job in jobs_of(folder, jobs=user_jobs())] == ["9_1", "10"]
    assert jobs_of(tmp_path / "nowhere", jobs=user_jobs()) == []


def test_settings_of_squeue_do_not_filter_jobs(squeue, monkeypatch):
    # A user's own filters would hide jobs, and their runs would seem to have ended.
    for name in ("SQUEUE_PARTITION", "SINFO_FORMAT"):
        monkeypatch.setenv(name, "other")
    assert {queued.seen for queued in user_jobs()} == {1795371199.0}
    assert len(user_jobs()) == 5
    environment = Path(f"{squeue}.env").read_text()
    assert "=other" not in environment
    assert "SLURM_TIME_FORMAT=%s" in environment
    assert f"--array --states=all --user={os.getuid()} " in environment


def test_no_answer_says_why(squeue, monkeypatch):
    squeue.write_text("#!/bin/sh\nprintf 'error: no\\ncontroller\\n' >&2\nexit 1\n")
    with pytest.raises(NoAnswerError, match="^error: no controller"):
        user_jobs()
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(NoAnswerError, match="squeue is not on PATH"):
        user_jobs()


# How often SLURM refuses, every two seconds, and why; whether the job is queued in the end.
@rows("""
- [times, text, is_queued]
- [0, '', true]
- [149, Unable to contact slurm controller (connect failure), true]
- [152, Unable to contact slurm controller (connect failure), false]
- [1, Socket timed out on send/recv operation, true]
- [999, Invalid user id for job 17, false]
# By a preemption.
- [1, Job is pending execution for job 17, true]
# No repetition changes it.
- [1, Requested operation is presently disabled, false]
- [1, Invalid job id specified, false]
- [1, Access/permission denied, false]
""")
def test_requeueing_is_tried_for_a_while(monkeypatch, times, text, is_queued):
    left = iter([text] * times)
    asked = []

    def ask(program, *arguments):
        asked.append(arguments)
        if arguments == ("requeue", "17") and (refusal := next(left, "")):
            raise NoAnswerError(refusal)
        return "JobId=17 JobState=RUNNING"

    # Time passes by pauses alone, so five minutes of refusals take none.
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(pauses))
    monkeypatch.setattr(queue, "ask_slurm", ask)
    assert requeue("17") == (None if is_queued else text)

    # Without an answer about the site's epilog, the longer wait.
    assert (("update", "JobId=17", "StartTime=now+20") in asked) == is_queued


# The nodes that are up, those excluded before, on how few the job can start, and then excluded.
@rows("""
- [up, before, fewest, excluded]
- [n1 n2 n3, (null), null, n2]
- [n1 n2, (null), null, null]
- [n1 n2, (null), 1, n2]
- [n1 n2 n3 n4, n4, null, 'n2,n4']
- [n1 n2 n3, n3, null, null]
""")
def test_a_node_is_excluded_if_enough_others_are_up(
    monkeypatch, up, before, fewest, excluded
):
    """Else the job, which had two nodes, would wait for ever."""
    asked = []

    def ask(*command):
        asked.append(command)
        # scontrol expands names of nodes; these are lists already.
        return up if command[0] == "sinfo" else command[-1]

    monkeypatch.setattr(queue, "ask_slurm", ask)
    line = queue.exclude(
        "17",
        "n2",
        why="why",
        job={"ExcNodeList": before, "Partition": "gpu", "NumNodes": "2-2"},
        script=Path("17.sh"),
        fewest_nodes=fewest,
    )
    change = ("scontrol", "update", "JobId=17", f"ExcNodeList={excluded}")
    is_excluded = excluded is not None
    assert (change in asked) == is_excluded
    # Said as done only where it was done.
    assert line.endswith("17: why") == is_excluded

    # Those that other jobs use are up, too.
    assert "--states=idle,mixed,allocated,completing" in asked[0]


# ---- who may look, and whom to ask ---------------------------------------------------------------


@contextmanager
def as_somebody_else():
    """Without the rights of root and of the owner of the files."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared(tmp_path):
    """A folder of runs that others may enter, as pytest's own is not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        # pytest's folders are closed to others from the root on.
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        # What a test has closed could not be removed.
        for path in folder.rglob("*"):
            path.chmod(0o700)


def test_a_run_that_is_not_shared_is_one_error_with_what_to_ask_for(shared):
    private = logged_run(shared / "private run")
    private.chmod(0o0)

    # By its own name, and by the folder that it is in.
    for path in (private, shared):
        with as_somebody_else(), pytest.raises(UserError) as caught:
            find_runs([str(path)])
        text = caught.value.text()
        assert f"next: ask its owner for: chmod -R g+rX '{private}'" in text


def test_a_shared_run_is_shown_without_its_private_job_folder(shared):
    """As `chmod -R g+rX` leaves it, or a folder that was made with 2750 before the run."""
    folder = logged_run(shared / "run")
    jobs = folder / "slurm"
    jobs.mkdir()
    (jobs / ".submission_file_1.sh").touch()
    jobs.chmod(0o0)
    folder.chmod(0o755)

    # Imports all that is needed: the interpreter may be the owner's alone.
    load_runs([str(folder)], uri=None)
    with as_somebody_else():
        (found,) = find_runs([str(folder)])
        assert read_state(found, jobs_for([found])).state is RunState.STOPPED
        (run,) = load_runs([str(folder)], uri=None)
        assert run.status == "stopped"


# When a script was submitted, how attempts have ended since, and whether SLURM is asked.
@lines("""
submitted | endings | asks
          |           | no
          | done      | no
before    | done      | no
before    |           | yes
before    | open      | yes
before    | stopped   | yes
before    | failed    | yes
before    | done open | yes
after     | done      | yes
""")
def test_slurm_is_asked_only_for_runs_without_an_end(
    submitted, endings, asks, squeue, tmp_path
):
    folder = logged_run(tmp_path / "run")
    for ending in endings.split():
        attempt = begin_attempt(folder, cluster="slurm", job_id="1")
        if ending != "open":
            end_attempt(attempt, folder, Outcome(ending=Ending(ending)))
    if submitted:
        (folder / "slurm").mkdir()
        script = folder / "slurm/.submission_file_1.sh"
        script.touch()
        moment = 1.0 if submitted == "before" else time.time() + 99
        os.utime(script, (moment, moment))
    # A second run, which was never submitted, must not be a reason to ask.
    local = logged_run(tmp_path / "local")
    load_runs([str(folder), str(local)], uri=None)
    assert Path(f"{squeue}.env").exists() == (asks == "yes")


def test_an_address_waits_for_a_controller_that_is_away(monkeypatch):
    """A name without an address would let all ranks wait for half an hour."""
    answers = [NoAnswerError("Unable to contact slurm controller")] * 3

    def ask(*command):
        if answers:
            raise answers.pop()
        return f"NodeName={command[-1]} Arch=x86_64 NodeAddr=192.0.2.7 Port=6818"

    monkeypatch.setattr(queue, "ask_slurm", ask)
    monkeypatch.setattr(queue, "PAUSE_SECONDS", 0)
    assert queue.reachable_address("n1.invalid") == "192.0.2.7"
    # A name that resolves is used as it is.
    assert queue.reachable_address("localhost") == "localhost"
