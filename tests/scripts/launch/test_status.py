"""What launch/status.py shows of a run, and what its batch script decides at an attempt's end."""

import json
import re
import sys
import time

import pytest

from launch.jobs.attempts import read_attempts
from tests.support.tables import lines
from tests.support.waiting import ROOT

# What ranks leave behind: the start of a training of 100 steps, a logged step, its checkpoint.
STEP = """
now=$(date +%s.%N) checkpoint=$RUN/checkpoints/step-$(printf %08d {step})
started='"event": "started", "first_step": 0, "total_steps": 100'
mkdir -p $RUN/events
echo "{{$started, \\"time\\": $now}}" >> $RUN/events/n1.jsonl
logged='"step": {step}, "train/loss": 1.5, "vitals/images_per_s": 800.0'
echo "{{$logged, \\"time\\": $now}}" >> $RUN/journal.jsonl
mkdir -p $checkpoint
: > $checkpoint/manifest.json
"""
NAN = STEP.replace("1.5", '"NaN"')
ENDED = (
    "echo 'srun: error: n2: task 1: Exited with exit code {code}' >&2; exit {code}\n"
)
# Asks for the state while the ranks run.
ASK = f"""
cd $RUN/../..
{sys.executable} {ROOT}/launch/status.py runs/small > text
{sys.executable} {ROOT}/launch/status.py runs/small --json > json
"""


def commands_of(actions):
    """The shell lines of what ranks did."""
    parts = {"STEP": STEP, "NAN": NAN, "END": ENDED, "ASK": ASK}
    lines = ""
    for action in actions.split(", "):
        name, _, number = action.partition(" ")
        # What is no name is a shell line itself.
        lines += parts.get(name, action).format(step=number, code=number) + "\n"
    return lines


# The values of --json that other programs read, as paths.
KEYS = """
    name state logged/step logged/total_steps logged/images_per_s failure/what
""".split()


# What the ranks did (the last step that they logged, and their end), and the job's state and reason
# in the queue; without them SLURM does not answer.
@lines("""
name|ranks|state|reason
queued||PENDING|Resources
running|STEP 20, ASK, exit 0|RUNNING|None
paused|STEP 20, END 75|PENDING|BeginTime
queued_again|STEP 20, END 75|PENDING|Resources
failed|NAN 20, END 2|FAILED|NonZeroExitCode
finished|STEP 100, exit 0|COMPLETED|None
no_slurm|STEP 20, END 75||
""")
def test_status_shows(name, ranks, state, reason, slurm, golden):
    answers = state != ""
    if answers:
        (link,) = (slurm.run_folder / "slurm").glob("*.sh")
        now = int(time.time())
        nodes = ""
        if state == "RUNNING":
            nodes = "n[1-2]"
        number = "12"
        # Another job than the attempt's.
        if name == "queued_again":
            number = "13"
        # The columns that we ask squeue for: two numbers, state, reason, start, nodes, submission.
        row = f"{number}|{number}|{state}|{reason}|{now}|{nodes}|{now - 600}|/x/{link.name}\n"
        slurm.write("queue", row)
    if ranks:
        slurm.run_job(commands_of(ranks))

    # While the ranks run the attempt has no end: they asked themselves.
    if name == "running":
        text = (slurm.folder / "text").read_text()
        values = (slurm.folder / "json").read_text()
    else:
        text = slurm.call("launch/status.py", "runs/small", slurm=answers)
        values = slurm.call("launch/status.py", "runs/small", "--json", slurm=answers)
    # NaN is no JSON: other programs could not read it.
    (run,) = json.loads(values, parse_constant=pytest.fail)
    shown = [f"{key}: {json.dumps(value_at(run, key))}" for key in KEYS]
    golden.text(f"status/{name}.txt", "\n".join([normal(text), *shown, ""]))


def value_at(run, path):
    for key in path.split("/"):
        # A run that has not failed has no failure to look into.
        if run is not None:
            run = run[key]
    return run


def normal(text):
    """Without durations and times."""
    text = re.sub(r"\b\d+:\d\d:\d\d\b", "DURATION", text)
    return re.sub(r"(\d{4}-\d\d-\d\d )?\b\d\d:\d\d\b", "TIME", text)


# ---- the batch script: requeue the job, or end it -----------------------------------------------

FAILED = "echo 'srun: error: n2: task 1: Exited with exit code {code}' >&2; exit {code}"
KILLED = "echo 'srun: error: n2: task 1: Killed' >&2; exit 137"
RECORDED = """mkdir -p "$RUN/events" && cat >> "$RUN/events/n1.jsonl" << END
{"event": "failed", "time": 1, "attempt": "$VITSCALE_ATTEMPT", "kind": "device", "what": "no bus"}
END
"""


# What the ranks do, exit code of the job (?: any failure), whether it is requeued, in the log.
@lines("""
ranks|code|requeued|text
exit 0|0|no|
FAIL 1|1|yes|rank 1 on n2 ended with code 1
KILLED|?|yes|rank 1 on n2 was ended by SIGKILL
kill -9 $$|?|yes|srun was ended by SIGKILL
RECORDED|?|yes|ended: no bus (device)
FAIL 75|75|yes|stopped by a signal
FAIL 74|74|yes|rank 1 on n2 ended with code 74
FAIL 2|2|no|a restart would fail in the same way
FAIL 76|76|no|the training diverged
""")
def test_the_end_of_the_ranks_decides(ranks, code, requeued, text, slurm):
    ranks = re.sub(r"FAIL (\d+)", lambda match: FAILED.format(code=match[1]), ranks)
    ranks = ranks.replace("KILLED", KILLED)
    # A rank wrote why it ended; what srun says of all nodes knows nothing better.
    ranks = ranks.replace("RECORDED", RECORDED + KILLED.replace("n2", "n[1-2]"))
    ended_with = slurm.run_job(ranks)
    if code == "?":
        assert ended_with != 0, slurm.log
    else:
        assert str(ended_with) == code, slurm.log
    assert slurm.is_requeued == (requeued == "yes"), slurm.log
    # What status shows later agrees with what was done.
    assert read_attempts(slurm.run_folder)[-1].is_requeued == slurm.is_requeued
    assert text in slurm.log


def test_ranks_are_started_on_all_nodes(slurm):
    slurm.run_job('echo "port $MASTER_PORT, attempt $VITSCALE_ATTEMPT"; exit 0')
    (srun,) = [line for line in slurm.calls if line.startswith("srun")]
    # Otherwise ranks whose peer is gone would hold their nodes.
    assert "--kill-on-bad-exit=1" in srun
    assert f"_submit {slurm.run_folder}/slurm/" in srun
    # By the attempt events are told apart; the port must be the same for all ranks.
    assert "attempt 12/0" in slurm.log
    assert "port ," not in slurm.log


def test_ranks_are_started_on_as_many_nodes_as_the_batch_divides_over(slurm):
    # SLURM gives 2 of 1 to 3 nodes: over their 4 tasks 6 images do not divide.
    free = ("launch.nodes=1-3", "launch.tasks_per_node=2", "data.global_batch=6")
    slurm.launch(*free)
    slurm.run_job('echo "$SLURM_NTASKS tasks on $SLURM_NNODES"; exit 0')
    assert "using 1 of 2 nodes, over which" in slurm.log
    assert "2 tasks on 1" in slurm.log


def test_a_job_that_slurm_ends_is_left_alone(slurm):
    # As after scancel: its owner does not want it to start again.
    assert slurm.run_job(FAILED.format(code=75), state="COMPLETING") == 75
    assert not slurm.is_requeued


def test_a_job_is_requeued_where_python_does_not_start(slurm):
    script = (slurm.folder / "slurm/script").read_text()
    broken = script.replace("# setup\n", "# setup\nexport PYTHONHOME=/nowhere\n")
    slurm.write("script", broken)
    # Another start may be on a sound node; after a few in a row the fault is not the node's.
    for restart in range(4):
        assert slurm.run_job(KILLED, restart=restart) != 0
        assert slurm.is_requeued == (restart < 3), slurm.log

    # The last line is the node of the last start.
    with (slurm.run_folder / "slurm/12/12.failed_starts").open("a") as file:
        file.write("n2\n")
    shown = slurm.call("launch/status.py", "runs/small")
    failed = "small: failed: Python did not start on n2, or was killed; log runs/small/"
    assert failed in shown
