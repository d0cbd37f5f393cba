"""The batch script, as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.submission import sbatch_text
from vitscale.runs.launching import LaunchSettings


def script(**fields: object) -> str:
    launch = LaunchSettings.model_validate(fields)
    return sbatch_text(launch, name="run", folder=Path("/jobs"))


def test_no_accounting_key_is_asked_for() -> None:
    assert "wckey" not in script()
    assert "#SBATCH --wckey=vit" in script(sbatch={"wckey": "vit"})


def test_cpus_are_repeated_for_srun_and_a_failing_task_ends_the_step() -> None:
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
def test_gpus_are_asked_for_in_the_sites_way(fields: dict[str, object], expected: str) -> None:
    assert expected in script(gpus_per_node=8, tasks_per_node=8, **fields).splitlines()


def test_gpus_can_come_with_the_partition() -> None:
    text = script(gpus_per_node=8, tasks_per_node=8, gpu_request="none")
    assert "gpus-per-node" not in text and "gres" not in text


def test_every_field_reaches_the_script() -> None:
    text = script(
        nodes=3, tasks_per_node=2, timeout_min=90, signal_delay_s=60, mem_gb=100, partition="p",
        account="a", qos="q", constraint="c", reservation="r", exclude="n[1-2]",
        comment="two words",
        setup=["module load cuda"], srun_args=["--cpu-bind=none"],
        python="apptainer exec image.sif python", sbatch={"exclusive": True, "nice": 5},
    )  # fmt: skip
    for line in (
        "--nodes=3", "--ntasks-per-node=2", "--time=90", "--signal=USR2@60", "--mem=100GB",
        "--partition=p", "--account=a", "--qos=q", "--constraint=c", "--reservation=r",
        "--exclude='n[1-2]'", "--comment='two words'", "--requeue", "--exclusive", "--nice=5",
    ):  # fmt: skip
        assert f"#SBATCH {line}" in text.splitlines()
    assert "\nmodule load cuda\n" in text
    assert "--cpu-bind=none apptainer exec image.sif python -u -m submitit" in text


def test_switched_off_options_are_left_out() -> None:
    assert "exclusive" not in script(sbatch={"exclusive": False})
