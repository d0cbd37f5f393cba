"""Batch scripts of launch/slurm.py, word for word, and a sweep on the command line."""

from __future__ import annotations

import re
import sys

import pytest

from tests.scripts.launch.conftest import REPOSITORY, FakeSlurm
from tests.support.golden import Golden

DATA = """\
stage: data_prep
output: shards
source: {path: images}
launch: {num_tasks: 64, cpus_per_task: 8, timeout_min: 720}
"""
SITE = (
    "launch.setup=[module load cuda, export NCCL_DEBUG=WARN]",
    "launch.sbatch={constraint: a100&ib, exclusive: true, comment: a 'quoted' word}",
    "launch.srun_args=[--cpu-bind=none, --mpi=none]",
    "launch.python=apptainer exec --nv image.sif python",
)
LARGE = (
    "launch.nodes=8",
    "launch.tasks_per_node=4",
    "launch.gpus_per_node=4",
    "launch.gpu_request=gres",
    "launch.gpu_type=h200",
    "launch.mem_gb=512",
    "launch.partition=long,short",
    "launch.account=vision",
    "launch.signal_delay_s=300",
    "data.global_batch=64",
)
DRY_RUNS = {
    "one_node": ("run.yaml", "launch.nodes=1", "launch.cpus_per_task=4"),
    "many_nodes": ("run.yaml", *LARGE),
    "site": ("run.yaml", *SITE),
    "array": ("data.yaml",),
    "h14": (str(REPOSITORY / "configs/vit_h14.yaml"), "data.path=shards"),
}


def normal(text: str, slurm: FakeSlurm) -> str:
    """A script without the paths of this machine and the hash of its code."""
    for path, name in ((slurm.folder, "FOLDER"), (sys.executable, "PYTHON")):
        text = text.replace(str(path), name)
    assert str(REPOSITORY) not in text
    return re.sub(r"/code-[0-9a-f]{12}\b", "/code-HASH", text.strip()) + "\n"


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run_shows_the_batch_script(name: str, submitted: FakeSlurm, golden: Golden) -> None:
    (submitted.folder / "data.yaml").write_text(DATA)
    before = sorted(submitted.folder.rglob("*"))
    output = submitted.call("launch/slurm.py", "--dry-run", "--config", *DRY_RUNS[name])
    assert sorted(submitted.folder.rglob("*")) == before
    script = output.partition("# Batch script\n")[2]
    golden.text(f"sbatch/{name}.sh", normal(script, submitted))


def test_a_later_job_waits_for_the_earlier_one(slurm: FakeSlurm, golden: Golden) -> None:
    (link,) = (slurm.run_folder / "slurm").glob("*.sh")
    slurm.write("queue", f"12|12|RUNNING|None|1764000000|n[1-2]|1763990000|/x/{link.name}\n")
    slurm.call("launch/slurm.py", "--config", "run.yaml", "--after")
    golden.text("sbatch/after.sh", normal((slurm.folder / "slurm/script").read_text(), slurm))


def test_a_sweep_on_the_command_line_shows_its_runs(submitted: FakeSlurm) -> None:
    before = sorted(submitted.folder.rglob("*"))
    sweep = ("optim.lr=[1e-3, 2e-3]", "name=grid")
    output = submitted.call("launch/slurm.py", "--dry-run", "--config", "run.yaml", *sweep)
    assert sorted(submitted.folder.rglob("*")) == before
    runs = [set(re.findall(rf"\S*lr\S*{rate}\S*", output)) for rate in ("0.001", "0.002")]
    assert all(runs) and not runs[0] & runs[1], output
    assert "#SBATCH --nodes=2" in output
