"""Requests of GPUs, and the files of refused submissions."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from launch.jobs.submission import sbatch_text, submit_to_slurm
from vitscale.config.errors import UserError
from vitscale.runs.launching import LaunchSettings


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"gpu_request": "gpus_per_node", "gpu_type": "h200"}, "--gpus-per-node=h200:8"),
        ({"gpu_request": "gres"}, "--gres=gpu:8"),
        ({"gpu_request": "none"}, None),  # they come with the partition
    ],
)
def test_gpus_are_requested_in_the_sites_way(fields: dict[str, Any], option: str | None) -> None:
    launch = LaunchSettings(gpus_per_node=8, tasks_per_node=8, **fields)
    text = sbatch_text(launch, name="run", folder=Path("/jobs"))
    found = [line for line in text.splitlines() if "--gpus" in line or "--gres" in line]
    assert found == ([] if option is None else [f"#SBATCH {option}"])


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
