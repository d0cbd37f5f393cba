"""Batch scripts, job folders, and the files of refused submissions."""

from __future__ import annotations

import fcntl
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from submitit.local import local as submitit_local

from launch.jobs.attempts import task_record_path
from launch.jobs.submission import Submission, sbatch_text, start_locally, submit_to_slurm
from vitscale.config.errors import UserError
from vitscale.runs.launching import LaunchSettings


def script(**fields: object) -> str:
    launch = LaunchSettings.model_validate(fields)
    return sbatch_text(launch, name="run", folder=Path("/jobs"))


def test_no_accounting_key_is_requested() -> None:
    assert "wckey" not in script()
    assert "#SBATCH --wckey=vit" in script(sbatch={"wckey": "vit"})


def test_srun_repeats_cpus_and_ends_on_a_failed_task() -> None:
    srun = next(line for line in script(cpus_per_task=12).splitlines() if line.startswith("srun"))
    assert "--cpus-per-task=12" in srun
    assert "--kill-on-bad-exit=1" in srun


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"gpu_request": "gpus_per_node"}, "#SBATCH --gpus-per-node=8"),
        ({"gpu_request": "gpus_per_node", "gpu_type": "h200"}, "#SBATCH --gpus-per-node=h200:8"),
        ({"gpu_request": "gres"}, "#SBATCH --gres=gpu:8"),
        ({"gpu_request": "gres", "gpu_type": "h200"}, "#SBATCH --gres=gpu:h200:8"),
    ],
)
def test_gpus_are_requested_in_the_sites_way(fields: dict[str, object], expected: str) -> None:
    assert expected in script(gpus_per_node=8, tasks_per_node=8, **fields).splitlines()


def test_gpus_can_come_with_the_partition() -> None:
    text = script(gpus_per_node=8, tasks_per_node=8, gpu_request="none")
    assert "gpus-per-node" not in text and "gres" not in text


def test_every_field_reaches_the_script() -> None:
    text = script(
        nodes=3, tasks_per_node=2, timeout_min=90, signal_delay_s=60, mem_gb=100, partition="p",
        account="a", qos="q", exclude="n[1-2]",
        setup=["module load cuda"], srun_args=["--cpu-bind=none"],
        python="apptainer exec image.sif python",
        sbatch={"exclusive": True, "nice": 5, "constraint": "c", "comment": "two words"},
    )  # fmt: skip
    for line in (
        "--nodes=3", "--ntasks-per-node=2", "--time=90", "--signal=USR2@60", "--mem=100GB",
        "--partition=p", "--account=a", "--qos=q", "--constraint=c",
        "--exclude='n[1-2]'", "--comment='two words'", "--requeue", "--exclusive", "--nice=5",
    ):  # fmt: skip
        assert f"#SBATCH {line}" in text.splitlines()
    assert "\nmodule load cuda\n" in text
    assert "--cpu-bind=none apptainer exec image.sif python -u -m submitit" in text


def test_independent_tasks_are_an_array_with_one_log_each() -> None:
    text = script(num_tasks=64, cpus_per_task=8)
    lines = text.splitlines()
    assert "#SBATCH --array=0-63%64" in lines
    assert "#SBATCH --nodes=1" in lines and "#SBATCH --ntasks-per-node=1" in lines
    assert "#SBATCH --output=/jobs/%A/%A_%a_0_log.out" in lines
    srun = next(line for line in lines if line.startswith("srun"))
    assert "--output /jobs/%A/%A_%a_%t_log.out" in srun and "--cpus-per-task=8" in srun
    job = Submission(job_id="12", num_tasks=64, folder=Path("/jobs/12"), is_array=True)
    assert str(job.log(3)) == "/jobs/12/12_3_0_log.out"


def test_the_number_of_running_tasks_can_be_limited() -> None:
    assert "#SBATCH --array=0-63%16" in script(num_tasks=64, max_running_tasks=16).splitlines()
    # Without submitit's own limit of 256.
    assert "#SBATCH --array=0-999%1000" in script(num_tasks=1000).splitlines()


def test_one_task_is_not_an_array() -> None:
    text = script(num_tasks=1)
    assert "--array" not in text and "%A" not in text


def test_switched_off_options_are_left_out() -> None:
    assert "exclusive" not in script(sbatch={"exclusive": False})


def test_each_local_job_has_its_own_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Process ids are reused: in a container, two starts often get the same one.
    monkeypatch.setattr(submitit_local, "start_controller", lambda **_: SimpleNamespace(pid=7))
    jobs = [
        start_locally(int, launch=LaunchSettings(), num_procs=1, folder=tmp_path) for _ in range(2)
    ]
    assert jobs[0].job_id == jobs[1].job_id
    paths = [task_record_path(job.folder, job_id=job.job_id, rank=0) for job in jobs]
    assert paths[0] != paths[1]
    assert sorted(tmp_path.iterdir()) == sorted(job.folder for job in jobs)
    for job in jobs:
        assert stat.S_IMODE(job.folder.stat().st_mode) == 0o700
        assert (job.folder / "controller.log").exists()


# Refuses partition "full", but not before the other command waits for its turn or runs sbatch. The
# other command is accepted after the refusal.
SBATCH = """#!/bin/sh
if grep -q -e --partition=full "$1"; then
    mkdir {folder}/11
    touch {folder}/config-new.yaml {folder}/asked
    until test -e {folder}/waiting || test -e {folder}/between; do sleep 0.02; done
    exit 1
fi
touch {folder}/between
until test -e {folder}/refused; do sleep 0.02; done
echo Submitted batch job 12
"""


def test_a_refusal_removes_no_files_of_other_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, folder = tmp_path / "bin", tmp_path / "slurm"
    for each in (programs, folder):
        each.mkdir()
    for name, text in {"sbatch": SBATCH.format(folder=folder), "srun": "#!/bin/sh\n"}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    lock = fcntl.flock

    def announce_and_lock(fd: int, operation: int) -> None:
        if threading.current_thread() is threading.main_thread():
            (folder / "waiting").touch()
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", announce_and_lock)

    def be_refused() -> None:
        with pytest.raises(UserError, match="sbatch refused"):
            launch = LaunchSettings(partition="full")
            submit_to_slurm(int, launch=launch, name="first", folder=folder)
        (folder / "refused").touch()

    first = threading.Thread(target=be_refused)
    first.start()
    while not (folder / "asked").exists():
        assert first.is_alive()
        time.sleep(0.02)
    second = submit_to_slurm(int, launch=LaunchSettings(), name="second", folder=folder)
    first.join()
    assert second.job_id == "12" and (second.folder / "12_submitted.pkl").exists()
    # submitit leaves a link to the script of the one that was accepted.
    (link,) = folder.glob(".submission_file_*")
    assert link.resolve() == second.folder / "12_submission.sh"
    names = {path.name for path in folder.iterdir()} - {link.name}
    assert names == {"11", "12", "asked", "between", "config-new.yaml", "refused", "waiting"}
