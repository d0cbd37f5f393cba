"""launch/slurm.py on a real SLURM: snapshots of the code, second jobs of a run, checks."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.slurm.conftest import SlurmCluster
from tests.support.corpora.small_shards import make_shard_folder
from tests.support.waiting import PATIENCE_S
from vitscale.tracking.source_version import CODE_FOLDERS

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
RUN = """\
stage: pretrain
name: tiny
data: {path: shards, global_batch: 2, num_workers: 0}
model: {image_size: 8, patch_size: 4, width: 8, depth: 1, num_heads: 1, mlp_width: 8}
optim: {lr: 0.001}
schedule: {steps: 2}
engine: {device: cpu, zero_stage: 0, num_threads: 1}
tracking: {uri: "sqlite:///runs/mlflow.db"}
launch: {timeout_min: 10}
"""
HOLD = "launch.sbatch={hold: true}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkout:
    """A copy of this project with a commit of its own, which a test can edit."""

    slurm: SlurmCluster
    folder: Path

    def submit(self, *arguments: str) -> tuple[str, str]:
        """Job id, or '' if refused, and what launch/slurm.py prints."""
        environment = self.slurm.environment | {"PYTHONPATH": str(self.folder)}
        done = subprocess.run(
            [sys.executable, "launch/slurm.py", "--config", "run.yaml", *arguments],
            cwd=self.folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        output = done.stdout + done.stderr
        assert done.returncode in (0, 2), output
        found = re.search(r"^submitted job (\d+)", output, re.M)
        is_submitted = done.returncode == 0 and "--dry-run" not in arguments
        assert (found is not None) == is_submitted, output
        return found[1] if found else "", output

    def edit(self, name: str, line: str) -> None:
        path = self.folder / name
        path.write_text(f"{path.read_text()}{line}\n")

    def names(self, pattern: str) -> list[str]:
        """Names in the job folder of the run."""
        return sorted(path.name for path in (self.folder / "runs/tiny/slurm").glob(pattern))

    def log(self, job_id: str) -> str:
        return (self.folder / f"runs/tiny/slurm/{job_id}/{job_id}_0_log.out").read_text()


@pytest.fixture
def checkout(slurm: SlurmCluster, tmp_path: Path) -> Checkout:
    folder = tmp_path / "checkout"
    for name in CODE_FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    # As in the usual case, the runs are inside the checkout.
    (folder / ".gitignore").write_text("*.so\n__pycache__/\n/runs/\n")
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "all"]):
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
        subprocess.run(["git", "-C", folder, *identity, *arguments], check=True)
    make_shard_folder(folder / "shards")
    (folder / "run.yaml").write_text(RUN)
    return Checkout(slurm=slurm, folder=folder)


def test_a_job_runs_the_code_as_it_was_submitted(slurm: SlurmCluster, checkout: Checkout) -> None:
    checkout.edit("pretrain/main.py", "# edited before the submission")
    first, _ = checkout.submit(HOLD)
    # The job imports it, the submission does not.
    checkout.edit("vitscale/training/loop.py", "raise SystemExit('edited while queued')")
    refused, output = checkout.submit()
    assert not refused and f"job {first} (PENDING: JobHeldUser) of this run has not ended" in output
    second, output = checkout.submit("--after")
    assert second, output
    assert slurm.job(second)["Dependency"].startswith(f"afterany:{first}")
    slurm.run(["scontrol", "release", first])
    assert slurm.wait(first, states=["COMPLETED", "FAILED"])["JobState"] == "COMPLETED", (
        checkout.log(first)
    )
    assert slurm.wait(second, states=["COMPLETED", "FAILED"])["JobState"] == "FAILED"
    assert "edited while queued" in checkout.log(second)
    assert len(checkout.names("code-*")) == 2

    with sqlite3.connect(checkout.folder / "runs/mlflow.db") as connection:
        tags = dict(connection.execute("select key, value from tags"))
    head = slurm.run(["git", "rev-parse", "HEAD"], cwd=checkout.folder).strip()
    assert tags["mlflow.source.git.commit"] == head
    assert tags["mlflow.source.git.dirty"] == "true"
    (diff,) = (checkout.folder / "runs/mlflow-artifacts").rglob("source-*.diff")
    assert "+# edited before the submission" in diff.read_text()
    assert "while queued" not in diff.read_text()


def test_what_slurm_cannot_start_is_said_before(slurm: SlurmCluster, checkout: Checkout) -> None:
    # The cluster has nodes of 4 cores.
    _, output = checkout.submit("--dry-run", "launch.cpus_per_task=5")
    refusal = (
        "sbatch --test-only: allocation failure: Requested node configuration is not available"
    )
    assert f"SLURM          warning  {refusal}" in output
    _, output = checkout.submit("--dry-run", "launch.cpus_per_task=4")
    assert "SLURM          ok " in output
    assert not (checkout.folder / "runs").exists()
