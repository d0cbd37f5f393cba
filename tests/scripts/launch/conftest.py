"""A job on a SLURM of shell scripts: submitted by launch/slurm.py, and run by bash."""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from tests.support.corpora.indexing import run
from tests.support.golden import FOLDER
from tests.support.waiting import PATIENCE_S, ROOT

PROGRAMS = ROOT / "tests/support/fake_slurm"
CONFIG = f"""\
stage: pretrain
name: small
data: {{path: {FOLDER}/shards/folder, val_split: test, global_batch: 2, num_workers: 0}}
model: {{preset: Ti/16, image_size: 32}}
optim: {{lr: 0.001}}
schedule: {{steps: 100}}
tracking: {{uri: null}}
launch: {{nodes: 2, max_requeues: 9, snapshot: false}}
"""


@dataclass
class FakeSlurm:
    """A folder with a run, and the answers of the fake programs."""

    folder: Path

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs/small"

    @property
    def environment(self) -> dict[str, str]:
        path = f"{PROGRAMS}:{os.environ['PATH']}"
        return os.environ | {"PATH": path, "FAKE_SLURM": str(self.folder / "slurm")}

    def write(self, name: str, text: str):
        """An answer: queue, state or ranks."""
        (self.folder / "slurm" / name).write_text(text)

    def call(
        self, script: str, *arguments: str, slurm: bool = True, code: int = 0
    ) -> str:
        """Output of a script of launch/, called in the folder; its errors if it is to fail."""
        # Without SLURM: no program at all is found.
        variables = {"PATH": str(self.folder)}
        if slurm:
            variables = self.environment
        with contextlib.chdir(self.folder), mock.patch.dict(os.environ, variables):
            done = run(ROOT / script, *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        if code:
            return done.stderr
        return done.stdout

    def launch(self, *arguments: str, config: str = "run.yaml", **how) -> str:
        return self.call("launch/slurm.py", "--config", config, *arguments, **how)

    def run_job(self, ranks: str, *, restart: int = 0, state: str = "RUNNING") -> int:
        """Run the batch script once, as SLURM does. Returns the exit code of the job."""
        # Ranks are what the fake srun runs; the calls are those of this attempt.
        self.write("ranks", ranks)
        self.write("state", state)
        self.write("calls", "")
        script = (self.folder / "slurm/script").read_text()

        # Quoted where a folder for temporary files has a space.
        (option,) = re.findall(r"#SBATCH --output=(.*)", script)
        (log,) = shlex.split(option.replace("%j", "12"))
        # What SLURM tells a batch script, and what the ranks' shell lines write to.
        words = "SLURM_JOB_ID=12 SLURM_JOB_NODELIST=n[1-2] SLURM_JOB_NUM_NODES=2 SLURMD_NODENAME=n1"
        variables = dict(word.split("=") for word in words.split())
        variables["RUN"] = str(self.run_folder)
        # At the first start the variable is not set.
        if restart:
            variables["SLURM_RESTART_COUNT"] = str(restart)
        with open(log, "a") as output:
            done = subprocess.run(
                ["bash", str(self.folder / "slurm/script")],
                cwd=self.folder, env=self.environment | variables, timeout=PATIENCE_S,
                stdout=output, stderr=output,
            )  # fmt: skip
        return done.returncode

    @property
    def is_requeued(self) -> bool:
        calls = [line for line in self.calls if line.startswith("scontrol requeue")]
        # Twice would start the job twice; another number would start another job.
        assert calls in ([], ["scontrol requeue 12"])
        return bool(calls)

    @property
    def calls(self) -> list[str]:
        return (self.folder / "slurm/calls").read_text().splitlines()

    @property
    def log(self) -> str:
        return (self.run_folder / "slurm/12/12_0_log.out").read_text()


@pytest.fixture(scope="session")
def submitted(tmp_path_factory) -> FakeSlurm:
    """A job that was submitted and never ran; not to be changed."""
    slurm = FakeSlurm(folder=tmp_path_factory.mktemp("slurm"))
    (slurm.folder / "slurm").mkdir()
    (slurm.folder / "run.yaml").write_text(CONFIG)
    slurm.write("queue", "")
    output = slurm.launch()
    assert "submitted job 12: small, 2 task(s)" in output
    return slurm


@pytest.fixture
def slurm(submitted, tmp_path) -> FakeSlurm:
    folder = tmp_path / "job"
    shutil.copytree(submitted.folder, folder, symlinks=True)
    slurm = FakeSlurm(folder=folder)
    # The script has absolute paths, as it must on a node.
    script = (folder / "slurm/script").read_text()
    slurm.write("script", script.replace(str(submitted.folder), str(folder)))
    return slurm
