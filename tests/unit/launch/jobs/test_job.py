"""Stage scripts run inside a task's process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from launch.jobs.job import STAGE_SCRIPTS, StageJob, run_in_process, stage_job
from launch.jobs.preparation import RUN_TYPES


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(75)", 75),
        ("raise SystemExit(2)", 2),
        ("raise SystemExit('a sentence')", 1),
    ],
)
def test_exit_codes_are_those_of_a_script(tmp_path: Path, body: str, code: int) -> None:
    script = tmp_path / "main.py"
    script.write_text(f"if __name__ == '__main__':\n    {body}\n")
    assert run_in_process(str(script), arguments=[]) == code
    assert subprocess.run([sys.executable, script], capture_output=True).returncode == code


def test_the_script_sees_its_own_arguments(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text("import sys\nraise SystemExit(sys.argv[1:] != ['--config', 'a b.yaml'])\n")
    before = list(sys.argv)
    assert run_in_process(str(script), arguments=["--config", "a b.yaml"]) == 0
    assert sys.argv == before


def test_every_launchable_stage_has_a_script() -> None:
    assert set(STAGE_SCRIPTS) == set(RUN_TYPES)
    for stage in STAGE_SCRIPTS:
        assert Path(stage_job(stage, config=Path("c.yaml")).script).is_file()


def test_only_data_preparation_has_independent_tasks() -> None:
    jobs = {stage: stage_job(stage, config=Path("c")) for stage in STAGE_SCRIPTS}
    assert [stage for stage, job in jobs.items() if job.independent] == ["data_prep"]


def test_a_job_is_small_and_survives_pickling() -> None:
    job = StageJob(script="/p/main.py", config="/r/config.yaml")
    text = pickle.dumps(job)
    assert pickle.loads(text) == job
    assert len(text) < 500


def test_launching_needs_no_torch() -> None:
    program = (
        "import sys, launch.jobs.preparation, launch.planning.dry_run, launch.jobs.monitor;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
