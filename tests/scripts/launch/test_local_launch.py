"""Local jobs: stand-in stages as real processes, started as launch/local.py does."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from launch.jobs.attempts import Ending, read_attempts
from launch.jobs.processes import StopFlag, run_here
from launch.jobs.submission import StageJob
from tests.support.tables import every, refused
from tests.support.waiting import PATIENCE_S, ROOT, run_python, wait_until
from vitscale.config.errors import FailureKind
from vitscale.distributed.processes import is_alive

pytestmark = pytest.mark.distributed

# What launch/local.py does after reading its configuration, with shorter waits.
PROGRAM = """
import sys
from pathlib import Path
from launch.jobs import processes
from launch.jobs.submission import StageJob
processes.GRACE_SECONDS = 0.5
stop = processes.StopFlag()
{before}
here = Path.cwd()
job = StageJob(script=str(here / "stage.py"), config=str(here / "c"), run_folder=str(here))
sys.exit(processes.run_here(job, python=None, num_procs=2, stop=stop))
"""


def start(folder, stage, *, before=""):
    """before: code that the program runs before it starts the job."""
    (folder / "stage.py").write_text(textwrap.dedent(stage))
    program = PROGRAM.format(before=textwrap.dedent(before))
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def pids(process, folder):
    """Process ids that the stages wrote, once both have."""

    def tell():
        process.kill()
        return "\n".join(process.communicate())

    def numbers():
        return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]

    def have_begun():
        # What it printed says why it has ended.
        assert process.poll() is None, tell()
        return len(numbers()) == 2

    wait_until(have_begun, else_say=tell)
    return numbers()


def wait_for_line(process, text):
    assert any(text in line for line in iter(process.stdout.readline, ""))


def await_end(pids):
    """Wait until all have ended; by themselves they would live longer than the test."""
    wait_until(lambda: not any(map(is_alive, pids)), else_say=lambda: f"{pids} live on")


def ended(process, code):
    """Wait for the end with this exit code; returns output and errors."""
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, errors
    return output, errors


def signalled(process, folder, number, *, code):
    """Send a signal once both ranks run; no rank may outlive the end, whose output is returned."""
    tasks = pids(process, folder)
    process.send_signal(number)
    texts = ended(process, code)
    await_end(tasks)
    return texts


# A stage that stops as a training does: at a signal, with a checkpoint that rank 0 still writes.
WAITING = """
    import os, pathlib, signal, sys, time
    stop = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.append(1))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    pathlib.Path(f"pid-{os.getpid()}").touch()
    while not stop:
        time.sleep(0.05)
    if os.environ["RANK"] == "0":
        time.sleep(1)  # longer than the grace of ranks after one has failed
        pathlib.Path("checkpoints/step-00000012").mkdir(parents=True)
    sys.exit(75)
"""


def test_a_wrong_data_path_is_an_error_before_a_rank_starts(tmp_path):
    done = run_python(
        ROOT / "launch/local.py",
        "--config=digits/pretrain",
        "data.path=no",
        "launch.nodes=3",  # a local run has one
        cwd=tmp_path,
    )
    error = "error:\nno: no such folder\n  next: correct the path"
    assert done.returncode == 2
    assert done.stderr.startswith(error)
    # No run folder either, with which a corrected command would have to agree.
    assert [*tmp_path.iterdir()] == []


# Death -> how the attempt is recorded, and code before the start. Of a rank that was killed, the
# others know nothing better, so the launcher must not wait for them at all.
DEATHS = {
    "raise RuntimeError('out of ideas')": (FailureKind.OTHER, ""),
    "os.kill(os.getpid(), signal.SIGKILL)": (
        FailureKind.KILLED,
        "processes.GRACE_SECONDS = 1e9",
    ),
}


@every(death=DEATHS)
def test_one_failing_rank_ends_the_others_and_is_named(tmp_path, death):
    kind, before = DEATHS[death]
    process = start(
        tmp_path,
        f"""
        import os, signal, time
        print("rank", os.environ["RANK"], "was here")
        if os.environ["RANK"] == "1":
            {death}
        time.sleep(1000)
        """,
        before=before,
    )
    output, errors = ended(process, 1)
    # Rank 0's output is the run's; another rank's log is shown when that rank fails.
    assert "rank 0 was here" in output
    assert "rank 1 was here" not in output
    assert "rank 1" in errors
    assert "rank 1 was here" in errors
    assert ("out of ideas" in errors) == ("out of ideas" in death)
    (attempt,) = read_attempts(tmp_path)
    assert attempt.ending is Ending.FAILED
    assert attempt.kind is kind
    assert attempt.reason.startswith("rank 1 ")


def test_a_signal_before_a_rank_is_started_is_not_lost(tmp_path):
    signal_itself = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    ended(start(tmp_path, WAITING, before=signal_itself), 75)
    (attempt,) = read_attempts(tmp_path)
    assert attempt.ending is Ending.STOPPED


@every(number=[signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_stops_with_a_checkpoint(tmp_path, number):
    process = start(tmp_path, WAITING)
    output, _ = signalled(process, tmp_path, number, code=75)
    # Rank 0 had the time for its checkpoint, although rank 1 had ended.
    stopped = "stopped: 12 steps are kept; the same command resumes the run\n"
    assert output.endswith(stopped)
    (attempt,) = read_attempts(tmp_path)
    assert attempt.ending is Ending.STOPPED


def test_ranks_do_not_obey_what_the_shell_says_of_another_job(tmp_path, monkeypatch):
    # A shell inside a job, or one that a launcher of another library has set up.
    words = """
    MASTER_ADDR=192.0.2.1 WORLD_SIZE=64 GLOO_SOCKET_IFNAME=ib7 NCCL_SOCKET_IFNAME=ib7
    LOCAL_SIZE=8 LOCAL_RANK=7 SLURM_PROCID=3 VITSCALE_SITE=site.yaml
    """.split()
    stale = dict(word.split("=") for word in words)
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    stage = f"""
        import os
        own = {{name: os.environ.get(name) for name in {[*stale]}}}
        print(*map(repr, own.values()), file=open("seen-" + os.environ["RANK"], "w"))
    """
    output, errors = ended(start(tmp_path, stage), 0)
    for rank in (0, 1):
        seen = (tmp_path / f"seen-{rank}").read_text().split()
        # In the order of `words`: of this launcher, or gone.
        expected = ["127.0.0.1", "2", None, None, None, str(rank), None, ""]
        assert seen == [*map(repr, expected)], errors
    assert "GLOO_SOCKET_IFNAME" in output
    assert "not used" in output


# Ignores Ctrl-C, and has a child in a session of its own, which no signal to a group reaches.
STUBBORN = """
    import os, pathlib, signal, subprocess, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    pathlib.Path(f"pid-{child.pid}").touch()
    time.sleep(1000)
"""


def test_a_second_ctrl_c_kills_and_a_third_leaves_no_process(tmp_path):
    process = start(tmp_path, STUBBORN)
    tasks = pids(process, tmp_path)
    process.send_signal(signal.SIGINT)
    wait_for_line(process, "Ctrl-C again kills")
    # The third comes while the second one's work is done: a traceback would leave it half done.
    for _ in range(2):
        process.send_signal(signal.SIGINT)
    output, errors = ended(process, 130)
    assert errors == ""
    assert output == "stopped; the same command starts the run again\n"
    await_end(tasks)
    (attempt,) = read_attempts(tmp_path)
    assert (attempt.ending, attempt.reason) == (Ending.STOPPED, "killed by Ctrl-C")


def test_ctrl_c_ends_ranks_that_are_not_in_their_loop(tmp_path):
    """Such as an evaluation: one line, by the launcher."""
    process = start(
        tmp_path,
        """
        import os, pathlib, time
        from vitscale.distributed.processes import run_rank_script
        pathlib.Path(f"pid-{os.getpid()}").touch()
        run_rank_script(lambda: time.sleep(1000))
        """,
    )
    output, errors = signalled(process, tmp_path, signal.SIGINT, code=130)
    assert errors == ""
    assert output.endswith("kills\nstopped; the same command starts the run again\n")


def test_a_second_start_is_refused_and_records_nothing(tmp_path):
    """From the first moment on, and where ranks that no launcher has started hold the folder."""

    def content():
        """The events, of which there is one file; then the logs."""
        paths = [*(tmp_path / "events").iterdir(), *tmp_path.glob("*/rank_0_log.out")]
        return [path.read_bytes() for path in paths]

    process = start(tmp_path, WAITING)
    wait_for_line(process, "running 2 proc")
    # Not the logs, to which the first start still writes.
    before = content()[:1]
    _, errors = ended(start(tmp_path, WAITING), 1)
    assert "another job is training in this run" in errors
    assert content()[:1] == before
    signalled(process, tmp_path, signal.SIGTERM, code=75)

    # As `run_folder_lock` does in ranks that SLURM or a person started.
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("process 17 on n1", file=lock, flush=True)
        before = content()
        _, errors = ended(start(tmp_path, WAITING), 1)
    assert ": process 17 on n1" in errors
    assert content() == before


def test_a_closed_output_pipe_leaves_no_process(tmp_path):
    process = start(
        tmp_path,
        """
        import os, pathlib, time
        pathlib.Path(f"pid-{os.getpid()}").touch()
        while True:
            print("still here", flush=True)
            time.sleep(0.05)
        """,
    )
    tasks = pids(process, tmp_path)
    # As `| head` does.
    process.stdout.close()
    assert "BrokenPipeError" in process.stderr.read()
    # Neither a success nor a stop: nobody may take the run for done.
    assert process.wait(timeout=PATIENCE_S) not in (0, 75)
    await_end(tasks)


# Rank 0 ends with rank 1, which the signal kills; or fails by itself, which is a failure.
@pytest.mark.parametrize(
    ("rank_0", "code"),
    [
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", 75),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))", 1),
    ],
    ids=["waits for rank 1", "fails"],
)
def test_sigterm_before_tasks_handle_it_is_not_a_failure(tmp_path, rank_0, code):
    process = start(
        tmp_path,
        f"""
        import os, pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.environ["RANK"] == "0":
            {rank_0}
        pathlib.Path(f"pid-{{os.getpid()}}").touch()
        time.sleep(1000)
        """,
    )
    signalled(process, tmp_path, signal.SIGTERM, code=code)


def test_a_missing_interpreter_is_one_error(tmp_path):
    job = StageJob(
        script="stage.py",
        config=str(tmp_path / "c"),
        run_folder=str(tmp_path),
    )
    with refused("'/lost/python' cannot be started"):
        run_here(job, python="/lost/python", num_procs=2, stop=StopFlag())
    # It was an attempt: its end is recorded as that of any other.
    endings = [attempt.ending for attempt in read_attempts(tmp_path)]
    assert endings == [Ending.FAILED]


def test_a_log_is_shown_whole(tmp_path, capsys):
    # Long enough for the launcher to look while a character of two bytes is half written.
    stage = """
import os, time
for part in (b"\\xc3", b"\\xa9a"):
    os.write(1, part)
    time.sleep(0.3)
"""
    (tmp_path / "stage.py").write_text(stage)
    job = StageJob(script=str(tmp_path / "stage.py"), config=str(tmp_path / "c"))
    assert run_here(job, python=None, num_procs=1, stop=StopFlag()) == 0
    assert "éa" in capsys.readouterr().out


def test_a_signal_before_the_script_handles_it_ends_a_task_of_a_job(tmp_path):
    program = """
import os, signal
from types import SimpleNamespace
from launch.jobs import submission
submission._enter_task = lambda: SimpleNamespace(global_rank=1)
submission.StageJob(script="stage.py", config="c")()
"""
    stage = (
        "import os; print(repr(os.environ['VITSCALE_SITE'])); os.kill(os.getpid(), 12)"
    )
    (tmp_path / "stage.py").write_text(stage)
    variables = {"PYTHONPATH": str(ROOT), "VITSCALE_SITE": "site.yaml"}
    done = run_python(
        "-u",
        "-c",
        program,
        cwd=tmp_path,
        env=os.environ | variables,
    )
    assert done.returncode == 75
    # The site file is in the run's configuration already; read again it could have changed.
    assert done.stdout == "''\nstopped by SIGUSR2; finished work is kept\n"
