"""Validation of the launch section."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.jobs.submission import sbatch_text
from vitscale.runs.launching import FIELD_PATTERNS, LaunchSettings, launch_problems


def keys_of(*, independent_tasks: bool = False, **fields: object) -> list[str]:
    launch = LaunchSettings.model_validate(fields)
    return [key for key, _ in launch_problems(launch, independent_tasks=independent_tasks)]


def test_defaults_have_no_problem() -> None:
    assert keys_of() == []


@pytest.mark.parametrize("field", FIELD_PATTERNS)
@pytest.mark.parametrize("value", ["a\ntouch canary", "a\rb", "a\x00b", "", "a\u2028b"])
def test_no_field_may_start_another_line(field: str, value: str) -> None:
    assert keys_of(**{field: value}) == [f"launch.{field}"]


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"setup": ["module load cuda\nrm -rf x"]}, "launch.setup[0]"),
        ({"srun_args": ["--cpu-bind=none", "bash"]}, "launch.srun_args[1]"),
        ({"srun_args": ["--x=\n"]}, "launch.srun_args[0]"),
        ({"sbatch": {"mail-user": "a\nb"}}, "launch.sbatch.mail-user"),
        ({"sbatch": {"mail-type=END\nx": 1}}, "launch.sbatch"),
        ({"sbatch": {"signal": "TERM@5"}}, "launch.sbatch.signal"),
        ({"sbatch": {"ntasks_per_node": 2}}, "launch.sbatch.ntasks_per_node"),
        ({"sbatch": {"array": "0-9"}}, "launch.sbatch.array"),
        ({"partition": "gpu; rm"}, "launch.partition"),
        ({"partition": "--wrap=x"}, "launch.partition"),
        ({"gpus_per_node": 8, "tasks_per_node": 1}, "launch.tasks_per_node"),
    ],
)
def test_refused(fields: dict[str, object], key: str) -> None:
    assert keys_of(**fields) == [key]


def test_ranks_and_independent_tasks_have_different_keys() -> None:
    array = {"num_tasks": 64, "max_running_tasks": 8}
    assert keys_of(**array) == ["launch.num_tasks", "launch.max_running_tasks"]
    assert keys_of(independent_tasks=True, **array) == []
    (text, _) = (text for _, text in launch_problems(LaunchSettings.model_validate(array)))
    assert "is for data preparation only" in text and "launch.tasks_per_node" in text
    ranks = {"nodes": 2, "tasks_per_node": 8, "gpus_per_node": 8}
    assert keys_of(**ranks) == []
    assert keys_of(independent_tasks=True, **ranks) == [f"launch.{field}" for field in ranks]


@pytest.mark.parametrize(
    "fields",
    [
        {"setup": ["export A=$(hostname)\t# a tab", "module load 'a b'"]},
        {"constraint": "[rack1*2&ib]|h200", "exclude": "node[3,5-7],other"},
        {"sbatch": {"mail-type": "END", "exclusive": True, "wckey": "vit"}},
        {"python": "apptainer exec --nv image.sif python"},
        {"gpus_per_node": 8, "tasks_per_node": 8, "gpu_type": "h200"},
    ],
)
def test_accepted(fields: dict[str, object]) -> None:
    assert keys_of(**fields) == []


@pytest.mark.parametrize(
    ("timeout_min", "signal_delay_s", "accepted"),
    [
        (1440, 120, True),
        (5, 120, True),
        (2, 120, False),  # longer than the job
        (3, 120, False),  # SLURM may warn a minute early
        (60, 600, True),
        (60, 800, False),  # would count as a preemption
        (1440, 3600, True),
    ],
)
def test_signal_delay_fits_the_time_limit(
    timeout_min: int, signal_delay_s: int, accepted: bool
) -> None:
    keys = keys_of(timeout_min=timeout_min, signal_delay_s=signal_delay_s)
    assert keys == ([] if accepted else ["launch.signal_delay_s"])


ROOT = Path(__file__).resolve().parents[4]
TEXT = st.text(min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(comment=TEXT, partition=TEXT, extra=TEXT)
def test_accepted_values_stay_on_their_option_line(
    comment: str, partition: str, extra: str
) -> None:
    fields = {"comment": comment, "partition": partition, "sbatch": {"mail-user": extra}}
    if keys_of(**fields):
        return
    launch = LaunchSettings.model_validate(fields)
    lines = sbatch_text(launch, name="run", folder=Path("/jobs")).splitlines()
    plain = sbatch_text(LaunchSettings(), name="run", folder=Path("/jobs")).splitlines()
    assert [line for line in lines if not line.startswith("#SBATCH")] == [
        line for line in plain if not line.startswith("#SBATCH")
    ]
    assert len(lines) == len(plain) + 3


def test_quoting_survives_a_shell(tmp_path: Path) -> None:
    # Run as a plain script, the batch script must do nothing but call srun.
    comment = "'; touch canary; echo $(touch canary) `touch canary`"
    assert keys_of(comment=comment) == []
    text = sbatch_text(LaunchSettings(comment=comment), name="run", folder=tmp_path)
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "srun").chmod(0o755)
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        ["bash", "-c", text],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", **job},
        check=True,
    )
    assert not (tmp_path / "canary").exists()
