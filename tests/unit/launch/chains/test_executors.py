"""What a chain submits, keeps and cancels, with programs of SLURM that record their arguments."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.chains.executors import describe_chain, submit_chain
from tests.support.chain_runs import CHAIN, chain_of, steps_of, write_chain, write_training
from tests.support.corpora.small_shards import make_shard_folder

# One job for each run: shards, pretrain, four fine-tunings, four evaluations.
PROGRAMS = {
    "sbatch": 'if [ "$1" = --test-only ]; then exit 0; fi\n'
    'number=$(ls script-* 2>/dev/null | wc -l); cp "$1" "script-$number"; job=$((71 + number))\n'
    'echo "$job $1" >> jobs; echo "Submitted batch job $job"',
    "srun": "true",
    "scancel": 'echo "$@" >> cancelled',
    "squeue": "cat queue 2>/dev/null || true",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    make_shard_folder(tmp_path / "shards", classes=("a", "b", "c", "d", "e"))
    (tmp_path / "images").mkdir()
    return tmp_path


def submit(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    submit_chain(chain_of(path, "overrides=[launch.snapshot=false]", cluster="slurm"))
    words = ("skipped", "kept", "cancelled", "submitted")
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(words)]


def queue(folder: Path, states: dict[str, str]) -> None:
    """What squeue answers: these jobs in these states."""
    scripts = dict(line.split(" ", 1) for line in (folder / "jobs").read_text().splitlines())
    rows = [f"{job}|{job}|{s}|Dependency|N/A||1|{scripts[job]}\n" for job, s in states.items()]
    (folder / "queue").write_text("".join(rows))


def test_runs_wait_for_those_they_need(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_chain(folder, CHAIN.replace(", seed: [3, 4]", ""))
    lines = submit(path, capsys)
    assert lines[:3] == [
        "skipped   shards: done",
        "submitted pretrain: job 71",
        "submitted finetune/lr-0.01: job 72, after 71",
    ]
    assert lines[-1] == "submitted evaluate/lr-0.001: job 75, after 73"
    script = (folder / "script-1").read_text()
    assert "--dependency=afterok:71\n" in script and "--kill-on-invalid-dep=yes" in script

    # The fine-tunings are left in the queue, and the pre-training is submitted again.
    queue(folder, {"72": "PENDING", "73": "RUNNING"})
    assert submit(path, capsys)[1:5] == [
        "submitted pretrain: job 76",
        "cancelled finetune/lr-0.01: job 72 waited for jobs that have failed",
        "submitted finetune/lr-0.01: job 77, after 76",
        "kept      finetune/lr-0.001: job 73 is running",
    ]
    assert (folder / "cancelled").read_text() == "72\n"


def test_finished_runs_are_skipped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = CHAIN[: CHAIN.index("  - {name: evaluate")]
    path = write_chain(folder, text)
    chain = chain_of(path)
    for stage in ("pretrain", "finetune"):
        for step in steps_of(chain, stage):
            write_training(step, at=20)
    submit_chain(chain)
    output = capsys.readouterr().out
    assert "Chain small: 6 runs, 6 done" in output and "submitted" not in output
    assert output.endswith("  compare  python launch/compare.py runs/small\n")


def test_a_dry_run_writes_nothing(folder: Path) -> None:
    text = describe_chain(chain_of(write_chain(folder), cluster="slurm"))
    assert "finetune/lr-0.001_seed-4  finetune   shards, pretrain  1 tasks x 1 cores" in text
    assert text.count("#!/bin/bash") == 3 and "# Batch script of evaluate/lr-0.01_seed-3" in text
    assert not (folder / "runs").exists()
