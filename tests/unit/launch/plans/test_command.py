"""Commands of plans that start nothing, and what they show."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.comparison.runs import load_runs
from launch.plans.chains.command import names_a_plan, plan_command
from launch.plans.command import LOCAL_COUNTS, PlanCommand, run_locally, run_on_slurm
from launch.plans.running import FailedRun, report
from launch.plans.stages import as_known_now
from tests.support.corpora.small_shards import make_shard_folder
from tests.support.study_runs import chain_of, plan_of, write_all, write_chain, write_study
from vitscale.config.errors import UserError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # without SLURM
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def study(*words: str) -> PlanCommand:
    overrides = "overrides=[tracking.uri=null]"
    argv = ["--study", "study.yaml", overrides, *words]
    assert names_a_plan(argv) and not names_a_plan(["--config", "study.yaml"])
    return plan_command(argv, script="launch/local.py", counts=LOCAL_COUNTS)


def test_a_finished_study_says_how_to_compare(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_study(folder)
    stage = plan_of(path, "overrides=[tracking.uri=null]").stages[0]
    assert stage.grid is not None
    write_all(stage.grid, {})
    for run in (run_locally, run_on_slurm):
        assert run(study()) == 0
        output = capsys.readouterr().out
        assert "Study small: 18 trainings (18 done)" in output
        assert ("small: done before" in output) == (run is run_locally)
        assert output.endswith("  compare  python launch/compare.py runs/small\n")
    assert len(load_runs(["small"], uri=None)) == 18


def test_a_dry_run_starts_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_study(folder)
    assert run_locally(study("--dry-run")) == 0
    output = capsys.readouterr().out
    assert "(18 missing)" in output and "#SBATCH" not in output
    assert run_on_slurm(study("--dry-run")) == 0
    output = capsys.readouterr().out
    assert "# small-pretrain: array of 8 tasks\n#!" in output
    assert "# small-finetune: array of 10 tasks\n#!" in output
    assert not (folder / "runs").exists()
    with pytest.raises(UserError, match="no shards in shards"):
        run_on_slurm(study("pretrain.overrides=[data.planned_num_samples=null]"))


def test_lengths_are_known_once_the_shards_are_made(folder: Path) -> None:
    path = write_chain(folder)
    for name in ("pretrain", "finetune"):
        file = folder / f"{name}.yaml"
        text = file.read_text().replace(", planned_num_samples: 1000", "")
        file.write_text(text.replace("steps: 20", "epochs: 2").replace("steps: 12", "epochs: 1"))
    chain = chain_of(path)
    stages = {stage.name: stage for stage in chain.stages}
    make_shard_folder(folder / "shards", classes=("a", "b", "c", "d", "e"))
    for name in ("pretrain", "finetune"):
        before = [step.training for step in stages[name].steps]
        after = as_known_now(stages[name])
        assert [t.steps for t in before if t is not None] == [None] * len(before)
        assert all(s.training is not None and s.training.steps for s in after.steps)
        assert after.grid is None or all(t.steps for t in after.grid.trainings.values())


def test_the_report_names_what_is_not_done(folder: Path) -> None:
    plan = plan_of(write_study(folder))
    failed = FailedRun(name="a", what="ended with code 3", command="python x")
    assert report([failed, FailedRun(name="b", what="not started: a failed")], plan=plan) == (
        "2 part(s) of the study are not done:\n"
        "  a: ended with code 3\n"
        "    alone: python x\n"
        "  b: not started: a failed\n"
        "the same command runs what is not done"
    )
