"""What a batch script decides at the end of an attempt: requeue the job, or end it."""

from __future__ import annotations

import pytest

from tests.scripts.launch.conftest import FakeSlurm

FAILED = "echo 'srun: error: n2: task 1: Exited with exit code {code}' >&2; exit {code}"
KILLED = "echo 'srun: error: n2: task 1: Killed' >&2; exit 137"
RECORDED = """mkdir -p "$RUN/events" && cat >> "$RUN/events/n1.jsonl" << END
{"event": "failed", "time": 1, "attempt": "$VITSCALE_ATTEMPT", "kind": "device", "what": "no bus"}
END
"""
ENDINGS = {  # what the ranks do, exit code of the job (None: any failure), requeued, in the log
    "success": ("exit 0", 0, False, ""),
    "failure": (FAILED.format(code=1), 1, True, "rank 1 on n2 ended with code 1"),
    "killed": (KILLED, None, True, "rank 1 on n2 was ended by SIGKILL"),
    "srun killed": ("kill -9 $$", None, True, "srun was ended by SIGKILL"),
    "recorded": (RECORDED + KILLED.replace("n2", "n[1-2]"), None, True, "ended: no bus (device)"),
    "stop": (FAILED.format(code=75), 75, True, "stopped by a signal"),
    "storage": (FAILED.format(code=74), 74, True, "rank 1 on n2 ended with code 74"),
    "bad input": (FAILED.format(code=2), 2, False, "a restart would fail in the same way"),
    "divergence": (FAILED.format(code=76), 76, False, "the training diverged"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_the_end_of_the_ranks_decides(name: str, slurm: FakeSlurm) -> None:
    ranks, code, is_requeued, text = ENDINGS[name]
    found = slurm.run_job(ranks)
    assert found if code is None else found == code, slurm.log
    assert slurm.is_requeued == is_requeued, slurm.log
    assert text in slurm.log


def test_ranks_are_started_on_all_nodes(slurm: FakeSlurm) -> None:
    slurm.run_job('echo "port $MASTER_PORT, attempt $VITSCALE_ATTEMPT"; exit 0')
    (srun,) = [line for line in slurm.calls if line.startswith("srun")]
    assert "--kill-on-bad-exit=1" in srun and f"_submit {slurm.run_folder}/slurm/" in srun
    assert "attempt 12/0" in slurm.log and "port ," not in slurm.log


def test_ranks_are_started_on_as_many_nodes_as_the_batch_divides_over(slurm: FakeSlurm) -> None:
    free = ("launch.nodes=1-3", "launch.tasks_per_node=2", "data.global_batch=6")
    slurm.call("launch/slurm.py", "--config", "run.yaml", *free)
    slurm.run_job('echo "$SLURM_NTASKS tasks on $SLURM_NNODES"; exit 0')
    assert "using 1 of 2 nodes, over which" in slurm.log and "2 tasks on 1" in slurm.log


def test_a_job_that_slurm_ends_is_left_alone(slurm: FakeSlurm) -> None:
    assert slurm.run_job(FAILED.format(code=75), state="COMPLETING") == 75
    assert not slurm.is_requeued


def test_a_job_is_requeued_where_python_does_not_start(slurm: FakeSlurm) -> None:
    script = (slurm.folder / "slurm/script").read_text()
    slurm.write("script", script.replace("# setup\n", "# setup\nexport PYTHONHOME=/nowhere\n"))
    for restart in range(4):
        assert slurm.run_job(KILLED, restart=restart) != 0
        assert slurm.is_requeued == (restart < 3), slurm.log
    shown = slurm.call("launch/status.py", "runs/small")
    assert "small: failed: Python did not start on n1, or was killed; log runs/small/" in shown
