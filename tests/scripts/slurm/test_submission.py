"""launch/slurm.py on a real SLURM: snapshots of the code, second jobs of a run, checks."""

import json
import re
import shutil
import sqlite3
import subprocess

import pytest
import yaml

from tests.support.corpora.shard_folders import make_shard_folder
from tests.support.runs import TINY
from tests.support.waiting import PATIENCE_S, ROOT, run_python
from vitscale.config.packaged import CODE_FOLDERS

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

RUN = TINY | yaml.safe_load("""
stage: pretrain
data: {path: shards, global_batch: 2, num_workers: 0}
schedule: {steps: 2}
tracking: {uri: "sqlite:///runs/mlflow.db"}
launch: {timeout_min: 10}
""")
ENDED = ("COMPLETED", "FAILED")


@pytest.fixture
def checkout(tmp_path):
    """A copy of this project with a commit of its own, which a test can edit."""
    folder = tmp_path / "checkout"
    for name in CODE_FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)

    # As in the usual case, the runs are inside the checkout.
    (folder / ".gitignore").write_text("*.so\n__pycache__/\n/runs/\n")
    # A machine of tests may have no identity, without which git does not commit.
    git = ["git", "-C", folder, "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for arguments in ("init --quiet", "add .", "commit --quiet --message all"):
        subprocess.run([*git, *arguments.split()], check=True)
    make_shard_folder(folder / "shards")
    (folder / "run.yaml").write_text(json.dumps(RUN))
    return folder


def test_a_job_runs_the_code_as_it_was_submitted(slurm, checkout):
    jobs = checkout / "runs/tiny/slurm"

    def submit(*arguments):
        """Job id, or '' without one, and what launch/slurm.py prints."""
        done = run_python(
            *("launch/slurm.py", "--config", "run.yaml", *arguments),
            cwd=checkout,
            # The copy, and not the checkout that the tests are in.
            env=slurm.environment | {"PYTHONPATH": str(checkout)},
            timeout=PATIENCE_S,
        )
        output = done.stdout + done.stderr
        assert done.returncode in (0, 2), output
        job_ids = re.findall(r"^submitted job (\d+)", output, re.M)
        return "".join(job_ids), output

    def edit(name, line):
        path = checkout / name
        path.write_text(f"{path.read_text()}{line}\n")

    def log(job_id):
        return (jobs / f"{job_id}/{job_id}_0_log.out").read_text()

    # The nodes have 4 cores.
    _, output = submit("--dry-run", "launch.cpus_per_task=5")
    assert "warning  sbatch --test-only: allocation failure: Requested node" in output
    _, output = submit("--dry-run", "launch.timeout_min=61")
    assert "(test has MaxTime=01:00:00)" in output
    assert "=60, at which" in output
    assert "SLURM          ok " in submit("--dry-run", "launch.cpus_per_task=4")[1]
    assert not jobs.exists()

    # Not committed: the job has it all the same, and its run says so.
    edit("pretrain/main.py", "# edited before the submission")
    first, _ = submit("launch.sbatch={hold: true}")

    # The job imports it, the submission does not.
    edit("vitscale/training/session.py", "raise SystemExit('edited while queued')")
    refused, output = submit()
    assert not refused
    assert f"job {first} (PENDING: JobHeldUser) of this run has not ended" in output
    second, output = submit("--after")
    assert second, output
    assert slurm.job(second)["Dependency"].startswith(f"afterany:{first}")
    slurm.run(["scontrol", "release", first])
    assert slurm.wait(first, states=ENDED)["JobState"] == "COMPLETED", log(first)
    assert slurm.wait(second, states=ENDED)["JobState"] == "FAILED"
    assert "edited while queued" in log(second)
    # A copy for each state of the code.
    assert len([*jobs.glob("code-*")]) == 2

    # From the commit and the difference that MLflow has, anybody can restore the code of the run.
    slurm.script("launch/compare.py", "sync", jobs.parent, cwd=checkout)
    with sqlite3.connect(checkout / "runs/mlflow.db") as connection:
        tags = dict(connection.execute("select key, value from tags"))
    head = slurm.run(["git", "rev-parse", "HEAD"], cwd=checkout).strip()
    assert tags["mlflow.source.git.commit"] == head
    assert re.fullmatch(rf"{head[:12]}\+[0-9a-f]{{8}}", tags["vitscale.code"])
    (diff,) = (checkout / "runs/mlflow-artifacts").rglob("source-*.diff")
    assert "+# edited before the submission" in diff.read_text()
    assert "while queued" not in diff.read_text()
