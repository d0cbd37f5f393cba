"""The record of attempts, why each ended, and whether its job starts again."""

import argparse
import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import yaml

from launch.jobs import queue
from launch.jobs.attempts import (
    Attempt,
    Ending,
    Outcome,
    begin_attempt,
    end_attempt,
    read_attempts,
)
from launch.jobs.requeue_decision import (
    blamed_node,
    classify,
    finish_attempt,
    restart_refusal,
    storage_refusal,
    wait_for_storage,
)
from launch.jobs.status_text import format_size
from tests.support.tables import every, rows
from vitscale.config.errors import FailureKind
from vitscale.distributed.events import (
    EVENTS_NAME,
    Failure,
    read_failures,
    record_failure,
    record_start,
)

ATTEMPT = "17/1"
# What ranks report; of `lost` and `gone` rank 0 has noticed the end of another rank, in two ways.
REPORTS = {}
for name, (kind, what, rank, node, step, reporter) in yaml.safe_load("""
storage: [storage, no space, 1, n2, 7, 1]
other: [other, "KeyError: 7", 1, n2, null, 1]
lost: [peer lost, connection closed, 0, n1, null, 0]
gone: [killed from outside, is gone, 1, n2, null, 0]
""").items():
    REPORTS[name] = Failure(
        kind=FailureKind(kind),
        what=what,
        rank=rank,
        node=node,
        step=step,
        reported_by=reporter,
    )
EXITED = "srun: error: n1: task 0: Exited with exit code 1"
KILLED = "srun: error: n2: task 1: Killed"


def end_of(lines, folder, *, code=1, **fields) -> Outcome:
    """How the attempt ended; fields: what SLURM says of the job."""
    return classify(
        code,
        lines.splitlines(),
        folder,
        attempt=ATTEMPT,
        fields=fields,
        signal_delay_s=30,
    )


def outcome(folder, lines, *, code=1, reports=()) -> Outcome:
    """The outcome with these errors of srun and reports of ranks."""
    for report in reports:
        record_failure(folder, replace(REPORTS[report], attempt=ATTEMPT))
    return end_of(lines, folder, code=code, JobState="RUNNING")


# What srun wrote and ranks recorded, and the cause that follows.
@rows("""
- [errors, reports, kind, node, reason]
# The culprit is blamed, and not the one that notices.
- - ["n1: task 0: Exited with exit code 1"]
  - [lost, storage]
  - storage
  - n2
  - no space (storage, step 7)
- - ["n1: task 0: Exited with exit code 1"]
  - [lost]
  - peer lost
  - null
  - connection closed (peer lost)
# Of a killed rank srun knows most, and its own report more.
- - ["n2: task 1: Killed"]
  - [lost]
  - killed from outside
  - n2
  - rank 1 on n2 was ended by SIGKILL (Killed)
- - ["n2: task 1: Killed"]
  - [gone]
  - killed from outside
  - n2
  - rank 1 on n2 was ended by SIGKILL (Killed)
- [["n2: task 1: Killed"], [other], other, n2, "KeyError: 7 (other)"]
# The first line about a task counts.
- - ["n2: task 1: Segmentation fault (core dumped)", "n1: task 0: Exited with exit code 1"]
  - []
  - killed from outside
  - n2
  - rank 1 on n2 was ended by SIGSEGV (Segmentation fault (core dumped))
- - ["n2: task 1: Out Of Memory", "n1: task 0: Exited with exit code 1"]
  - []
  - killed from outside
  - n2
  - rank 1 on n2 ran out of memory and was killed
# Of several tasks none is the culprit.
- - ["n[1-2]: tasks 0-1: Killed"]
  - []
  - killed from outside
  - null
  - ranks 0-1 on n[1-2] were ended by SIGKILL (Killed)
- - ["n2,x1: task 1: Killed"]
  - []
  - killed from outside
  - null
  - rank 1 on n2,x1 was ended by SIGKILL (Killed)
- [[No nodes], [], other, null, "srun ended with code 1: No nodes"]
- [[], [], other, null, srun was ended by SIGKILL]
""")
def test_the_cause_is_what_the_best_report_says(
    tmp_path, errors, reports, kind, node, reason
):
    of_another_attempt = replace(REPORTS["other"], attempt="17/0")
    record_failure(tmp_path, of_another_attempt)
    lines = ["srun: got SIGCONT", *(f"srun: error: {error}" for error in errors)]
    code = 1 if errors else 137
    ended = outcome(tmp_path, "\n".join(lines), code=code, reports=reports)
    assert ended.kind == kind
    assert ended.reason == reason
    assert ended.failed_node == node
    assert ended.ending is Ending.FAILED


# The task's log, its exit code, the last line there, and what could not be executed. In the last
# row the stage itself has written the line, and its code means bad input.
@rows("""
- [log, code, last, why]
- - run/slurm/17/17_1_log.out
  - 2
  - "slurmstepd-n2: error: execve(): /env/python: No such file or directory"
  - "/env/python: No such file or directory"
# Of an array, and of a shell.
- - 17_1_log.out
  - 126
  - "sh: 1: exec: x: Permission denied"
  - "sh: 1: exec: x: Permission denied"
- - 17_1_log.out
  - 127
  - "sh: 1: exec: /env/python: No such file or directory"
  - "sh: 1: exec: /env/python: No such file or directory"
- [17_1_log.out, 2, "error: /env/python: No such file or directory", null]
""")
def test_a_node_without_python_is_blamed(tmp_path, log, code, last, why):
    line = f"srun: error: n2: task 1: Exited with exit code {code}"
    path = tmp_path / log
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"of an earlier attempt\n{last}\n{line}\n")
    ended = outcome(tmp_path / "run", line)
    if why is None:
        assert ended.kind == "bad input"
        assert ended.failed_node is None
        return
    assert ended.kind == "other"
    assert ended.failed_rank == 1
    assert ended.failed_node == "n2"
    assert ended.reason == f"rank 1 on n2 could not start: {why}"


def test_a_task_that_was_not_launched_is_blamed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "launch.jobs.requeue_decision.ask_slurm", lambda *_: "n1\nn2\nn3\n"
    )
    # Four tasks on two of the nodes: srun names the task alone.
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    why = "launch failed: Slurmd could not connect IO"

    # The end of the others follows from it.
    ended = outcome(tmp_path, f"srun: error: task 3 {why}\n{EXITED}")
    assert ended.reason == f"rank 3 on n2: {why}"
    assert ended.failed_node == "n2"

    # Tasks are dealt to nodes one by one here, not in blocks.
    monkeypatch.setenv("SLURM_DISTRIBUTION", "cyclic:block")
    (tmp_path / "cyclic").mkdir()
    ended = outcome(tmp_path / "cyclic", f"srun: error: task 2 {why}")
    assert ended.failed_node == "n1"


def test_a_kill_that_no_rank_saw_is_recorded(tmp_path):
    outcome(tmp_path, KILLED, reports=["lost"])
    recorded = read_failures(tmp_path, attempt=ATTEMPT)[-1]
    assert recorded.kind == FailureKind.KILLED
    assert recorded.rank == 1
    assert recorded.reported_by is None

    # Once: the same end may be looked at again.
    outcome(tmp_path, KILLED)
    assert len(read_failures(tmp_path)) == 2


# srun's code, how it says that a task ended, what SLURM says of the job, and the end that follows.
# 75 is the code of a rank that was asked to stop and has saved. EndTime: in so many seconds.
@rows("""
- [code, line, fields, ending, reason]
- - 75
  - Exited with exit code 75
  - {JobState: COMPLETING, Reason: None}
  - ended by SLURM
  - cancelled, requeued or preempted
- - 75
  - Exited with exit code 75
  - {JobState: CANCELLED, Reason: None}
  - ended by SLURM
  - cancelled, requeued or preempted
# srun may end with 0 then.
- [0, "", {JobState: COMPLETING}, ended by SLURM, "cancelled, requeued or preempted"]
- [0, "", {JobState: CANCELLED}, ended by SLURM, "cancelled, requeued or preempted"]
# The signal is asked for 30 s before the limit, and SLURM may send it a minute earlier.
- - 75
  - Exited with exit code 75
  - {JobState: COMPLETING, Reason: TimeLimit, EndTime: 60}
  - stopped
  - "stopped by a signal: the time limit is near"
- - 75
  - Exited with exit code 75
  - {JobState: RUNNING, PreemptTime: "1795371188", EndTime: 60}
  - stopped
  - "stopped by a signal: preempted"
- - 75
  - Exited with exit code 75
  - {JobState: RUNNING, EndTime: 660}
  - stopped
  - stopped by a signal
# SLURM does not answer.
- [75, Exited with exit code 75, {}, stopped, stopped by a signal]
# A rank that dies of the signal itself was asked to stop, too.
- [1, User defined signal 2, {JobState: RUNNING}, stopped, stopped by a signal]
""")
def test_slurm_and_stops_are_told_apart(tmp_path, code, line, fields, ending, reason):
    if "EndTime" in fields:
        moment = int(time.time()) + fields["EndTime"]
        fields = fields | {"EndTime": str(moment)}
    error = f"srun: error: n1: task 0: {line}"
    ended = end_of(error, tmp_path, code=code, **fields)
    assert ended.ending == ending
    assert ended.reason == reason


def test_a_training_with_its_last_checkpoint_is_done_whatever_srun_says(tmp_path):
    record_start(tmp_path, first_step=0, total_steps=10)
    for step, ending in ((9, Ending.FAILED), (10, Ending.DONE)):
        folder = tmp_path / f"checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
        assert outcome(tmp_path, "", code=137).ending is ending


# ---- again or not -----------------------------------------------------------------------------


def attempts(*endings: tuple[Ending, int], job_id="17") -> list[Attempt]:
    """One attempt for each (ending, steps gained)."""
    record = []
    step = 0
    for restart, (ending, gained) in enumerate(endings):
        step += gained
        attempt = Attempt(
            number=1 + restart,
            cluster="slurm",
            job_id=job_id,
            restart=restart,
            started=0.0,
            ended=1.0,
            ending=ending,
            reason=f"reason {1 + restart}",
            failed_node="n2",
            checkpoint_step=step,
        )
        record.append(attempt)
    return record


def refusal(record: Sequence[Attempt]):
    return restart_refusal(record, max_requeues=9)


FAIL_0 = (Ending.FAILED, 0)
FAIL_5 = (Ending.FAILED, 5)


# How attempts ended, with the steps that each gained, and whether another one follows.
ROWS = yaml.safe_load("""
- [failed 0, failed 0, failed 0, again]
- [failed 0, failed 0, failed 0, failed 0, end]
- [failed 0, failed 0, failed 0, failed 5, again]
- [failed 0, failed 5, failed 0, failed 0, failed 0, end]
# A preemption neither counts nor ends the row.
- [failed 0, failed 0, stopped 0, failed 0, failed 0, end]
- [failed 0, failed 0, failed 0, failed 0, stopped 0, again]
- [&s stopped 0, *s , *s , *s , *s , *s , *s , *s , *s , again]
- [*s , *s , *s , *s , *s , *s , *s , *s , *s , *s , end]
- [&f failed 5, *f , *f , *f , *f , *f , *f , *f , *f , *f , end]
""")


@every(row=ROWS)
def test_restarts_have_limits(row):
    *endings, follows = row
    pairs = [text.split() for text in endings]
    typed = [(Ending(ending), int(gained)) for ending, gained in pairs]
    record = attempts(*typed)
    assert (refusal(record) is None) == (follows == "again")


def test_another_job_and_storage_do_not_count():
    # A person who submits again has changed something.
    before = attempts(*[FAIL_0] * 4)
    now = attempts(FAIL_0, FAIL_0, job_id="18")
    assert refusal(before) is not None
    assert refusal([*before, *now]) is None

    # A full disk says nothing of the run, however long it stays full.
    outage = [replace(attempt, kind=FailureKind.STORAGE) for attempt in before]
    assert refusal(outage) is None


# Attempts, by what they differ in from a failure on n2, and the node that the next one avoids.
@rows("""
- [record, node]
- [[{}], null]
- [[{}, {}], n2]
# A node that lacks what others have is not tried again.
- [[{kind: node}], n2]
- [[{}, {kind: node, failed_node: n1}], n1]
- [[{kind: node, failed_node: null}], null]
# Two nodes, an unknown one, another job, or a stop between: the cause may be the run itself.
- [[{}, {failed_node: n1}], null]
- [[{failed_node: null}, {}], null]
- [[{job_id: "16"}, {}], null]
- [[{}, {ending: stopped}, {}], null]
""")
def test_two_failures_in_a_row_blame_a_node(record, node):
    (failed,) = attempts(FAIL_5)  # progress does not acquit it
    found = []
    for facts in record:
        if "kind" in facts:
            facts = facts | {"kind": FailureKind(facts["kind"])}
        found.append(replace(failed, **facts))
    assert blamed_node(found) == node


def test_storage_is_waited_for(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    pauses = []

    # The folder is back after three pauses; the pauses are the only time that passes.
    def sleep(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            folder.mkdir()

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "time", lambda: sum(pauses))
    wait_for_storage(folder, until=time.time() + 60)
    assert len(pauses) == 3
    assert not list(folder.iterdir())
    assert capsys.readouterr().err.count("waiting before the next start") == 1

    # Without time there is no pause, and without a limit the wait ends after half an hour.
    wait_for_storage(tmp_path / "gone", until=time.time() - 1)
    assert len(pauses) == 3
    wait_for_storage(tmp_path / "gone", until=math.inf)
    assert sum(pauses[3:]) == 1800


def test_storage_needs_room_for_a_checkpoint(tmp_path):
    step = tmp_path / "checkpoints/step-00000001"
    for folder in (step, step.with_name("step-00000002")):  # the largest counts
        folder.mkdir(parents=True)
    with open(step / "rank-00000.safetensors", "wb") as file:
        file.truncate(1 << 16)
        assert storage_refusal(tmp_path) is None
        file.truncate(2 * shutil.disk_usage(tmp_path).free)  # takes no space itself
        assert " free, and a checkpoint needs " in str(storage_refusal(tmp_path))

    # The file that tries whether writing works is gone again.
    assert len(list(step.parent.iterdir())) == 2


def test_sizes_have_three_digits_at_most():
    sizes = "0 bytes|999 bytes|1 kB|293 kB|1 MB|12.5 GB|1 GB|2,000 TB"
    # Rounding may reach the next unit: 999,600 bytes are not "1000 kB".
    numbers = (0, 999, 1000, 292_990, 999_600, 12_500_000_000, 999_500_000, 2e15)
    assert "|".join(map(format_size, numbers)) == sizes


@pytest.fixture
def follows(tmp_path, monkeypatch, capsys):
    """What is said after an attempt that ended with this line of srun, and the job's code."""
    fields = f"JobState=RUNNING Partition=p NumNodes=1 EndTime={time.time() + 50:.0f}"

    def ask(program, *arguments, **options):
        if program == "sinfo":
            return "n1 n2"
        # Names of nodes are expanded; these have no brackets.
        return arguments[-1] if "hostnames" in arguments else fields

    def finish(folder, line, *, restart=0, job="17", code=137):
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
        options = argparse.Namespace(
            run_folder=tmp_path / folder,
            job=job,
            code=code,
            signal_delay=30,
            max_requeues=9,
            fewest_nodes=None,
            script=tmp_path / "job.sh",
        )
        job_code = finish_attempt(options, line.splitlines())
        return f"{capsys.readouterr().err}code {job_code}"

    (tmp_path / "run").mkdir()
    monkeypatch.setattr(queue, "ask_slurm", ask)
    # With 50 s to the time limit no wait may begin.
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("no time is left"))
    return finish


def test_a_moved_folder_is_not_made_again(follows, tmp_path):
    # A requeued job would train from the start in an empty folder.
    text = follows("moved", "", code=0)
    assert "was moved or removed" in text
    assert text.endswith("code 74")
    assert not (tmp_path / "moved").exists()

    # The folder of an array's task is made at its start.
    assert "requeueing job 17_3 (1 of 9)" in follows("run", KILLED, job="17_3")


def test_the_second_failure_on_a_node_excludes_it(follows):
    first = follows("run", KILLED)
    assert "requeueing job 17 (1 of 9)" in first
    assert "excluded" not in first
    second = follows("run", KILLED, restart=1)
    assert "requeueing job 17 (2 of 9)" in second
    assert "n2 is excluded from job 17: its last two attempts failed there" in second


def test_a_node_that_lacks_something_is_excluded_at_once(follows, tmp_path):
    lacks = replace(REPORTS["other"], kind=FailureKind.NODE, attempt="17/0")
    record_failure(tmp_path / "run", lacks)
    assert "n2 is excluded from job 17: it lacks" in follows("run", KILLED)


def test_the_time_limit_comes_before_storage_may_be_back(follows, tmp_path):
    # A checkpoint as large as this one no longer fits on the disk.
    full = tmp_path / "run/checkpoints/step-00000010/rank-00000.safetensors"
    full.parent.mkdir(parents=True)
    with open(full, "wb") as file:
        file.truncate(2 * shutil.disk_usage(tmp_path).free)
    record_failure(tmp_path / "run", replace(REPORTS["storage"], attempt="17/0"))
    assert "requeueing job 17 (1 of 9)" in follows("run", EXITED)

    # Whatever srun says, a training that has its last checkpoint is done.
    record_start(tmp_path / "run", first_step=0, total_steps=10)
    (full.parent / "manifest.json").touch()
    assert follows("run", "", restart=1) == "code 0"


def test_the_code_of_srun_is_its_cause(tmp_path):
    """128 and a signal's number is what a shell says of a command that a signal ended."""
    assert "srun was ended by SIGTERM" in outcome(tmp_path / "a", "", code=143).reason
    assert "code 7" in outcome(tmp_path / "b", "", code=7).reason


# ---- the record --------------------------------------------------------------------------------


FAILED = Outcome(
    ending=Ending.FAILED,
    reason="rank 1 on n2",
    exit_code=1,
    failed_node="n2",
)


def begin(folder, *, restart=0) -> Attempt:
    return begin_attempt(
        folder,
        cluster="slurm",
        job_id="17",
        restart=restart,
        nodes=["n1", "n2"],
    )


def log(folder, step):
    row = {
        "step": step,
        "time": 1e9 + step,
        "train/loss": 1.0,
    }
    with open(folder / "journal.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def test_an_attempt_records_how_it_ended(tmp_path):
    assert read_attempts(tmp_path) == []
    running = begin(tmp_path)
    assert read_attempts(tmp_path) == [running]
    assert running.ended is None

    # What the end will say: the last checkpoint, and the last step that was logged.
    (tmp_path / "checkpoints/step-00000030").mkdir(parents=True)
    for step in (31, 37):
        log(tmp_path, step)
    (events,) = (tmp_path / EVENTS_NAME).iterdir()
    before = events.read_bytes()
    ended = end_attempt(running, tmp_path, FAILED)
    assert read_attempts(tmp_path) == [ended]
    assert ended.checkpoint_step == 30
    assert ended.last_step == 37
    assert ended.ending == Ending.FAILED
    assert ended.failed_node == "n2"
    assert ended.ended >= ended.started

    # A line is added and none is rewritten, so that a crash here loses no earlier one.
    assert events.read_bytes().startswith(before)


def test_an_end_counts_where_the_clock_was_set_back(tmp_path, monkeypatch):
    running = begin(tmp_path)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 300)
    ended = end_attempt(running, tmp_path, FAILED)
    assert read_attempts(tmp_path) == [ended]

    # By time alone the first attempt would have ended before it began.
    begin(tmp_path, restart=1)
    endings = [attempt.ending for attempt in read_attempts(tmp_path)]
    assert endings == [Ending.FAILED, None]


def test_the_next_attempt_closes_one_without_an_end(tmp_path):
    begin(tmp_path)
    log(tmp_path, 5)

    # Its node died, so nobody was left to record its end.
    begin(tmp_path, restart=1)
    first, second = read_attempts(tmp_path)
    assert first.ending == Ending.LOST
    assert first.last_step == 5
    assert first.ended is not None

    assert second.number == 2
    assert second.restart == 1
    assert second.ended is None


# A write that a crash cut, and a whole line that lacks keys of an attempt.
@every(
    rest=[b'{"event": "attempt", "number": 7', b'{"event": "attempt", "number": 3}\n']
)
def test_a_damaged_line_hides_no_other(tmp_path, rest):
    first = begin(tmp_path)
    (events,) = (tmp_path / EVENTS_NAME).iterdir()
    with events.open("ab") as file:
        file.write(rest)

    # The next event must not be glued to the cut line.
    end_attempt(first, tmp_path, FAILED)
    begin(tmp_path)
    endings = [attempt.ending for attempt in read_attempts(tmp_path)]
    assert endings == [Ending.FAILED, None]
