"""Plan, checks, batch scripts word for word and refusals of launch/slurm.py; sweeps typed there."""

import re
import sys

from launch.planning.dry_run import has_gpu, slurm_check
from tests.scripts.launch.conftest import FakeSlurm
from tests.support.tables import every
from tests.support.waiting import ROOT

# As `scontrol show partition` prints them: times as days, as hours, and without a limit.
PARTITIONS = """\
PartitionName=day Default=YES DefaultTime=NONE MaxTime=1-00:00:00 State=UP
PartitionName=short Default=NO MaxTime=00:30:59 State=UP
PartitionName=free Default=NO MaxTime=UNLIMITED State=UP
"""
# Partition of the job, its minutes, and those that it is told of.
LIMITS = """\
- 1440
- 1441 1440
day 1440
short 30
short 31 30
short,day 1440
short,day 1441 1440
short,free 9999
elsewhere 9999
"""
DATA = """\
stage: data_prep
output: shards
source: {path: images}
launch: {num_tasks: 64, cpus_per_task: 8, timeout_min: 720}
"""
# What one cluster needs beside what all have; with characters that a shell would interpret.
SITE = (
    "launch.setup=[module load cuda, export NCCL_DEBUG=WARN]",
    "launch.sbatch={constraint: a100&ib, exclusive: true, comment: a 'quoted' word}",
    "launch.srun_args=[--cpu-bind=none, --mpi=none]",
    "launch.python=apptainer exec --nv image.sif python",
)
LARGE = """
    launch.nodes=8 launch.tasks_per_node=4 launch.gpus_per_node=4 launch.gpu_request=gres
    launch.gpu_type=h200 launch.mem_gb=512 launch.partition=long,short launch.account=vision
    launch.signal_delay_s=300 data.global_batch=64
""".split()
# Each has lines of its own in the batch script.
DRY_RUNS = {
    "one_node": ["run.yaml", "launch.nodes=1", "launch.cpus_per_task=4"],
    "many_nodes": ["run.yaml", *LARGE],
    "site": ["run.yaml", *SITE],
    "free_nodes": ["run.yaml", *LARGE, "launch.nodes=2-8"],
    "array": ["data.yaml"],
    "h14": [f"{ROOT}/configs/vit_h14.yaml", "data.path=shards"],
}


def normal(text, slurm: FakeSlurm):
    """A script without the paths of this machine and the hash of its code."""
    for path, name in ((slurm.folder, "FOLDER"), (sys.executable, "PYTHON")):
        text = text.replace(str(path), name)
    # A job runs a copy of the code, not the checkout, which its owner goes on to change.
    assert str(ROOT) not in text
    return re.sub(r"/code-[0-9a-f]{12}\b", "/code-HASH", text.strip()) + "\n"


@every(name=DRY_RUNS)
def test_a_dry_run_shows_the_batch_script(name, submitted, golden):
    (submitted.folder / "data.yaml").write_text(DATA)
    before = sorted(submitted.folder.rglob("*"))
    config, *words = DRY_RUNS[name]
    output = submitted.launch("--dry-run", *words, config=config)
    # Not even the run folder.
    assert sorted(submitted.folder.rglob("*")) == before
    script = output.partition("# Batch script\n")[2]
    golden.text(f"sbatch/{name}.sh", normal(script, submitted))


def test_a_later_job_waits_for_the_earlier_one(slurm, golden):
    # A row of squeue: the name of its script is what ties a job to a run.
    (link,) = (slurm.run_folder / "slurm").glob("*.sh")
    row = f"12|12|RUNNING|None|1764000000|n[1-2]|1763990000|/x/{link.name}\n"
    slurm.write("queue", row)
    errors = slurm.launch(code=2)
    assert "job 12 (RUNNING on n[1-2]) of this run has not ended" in errors
    slurm.launch("--after")
    script = (slurm.folder / "slurm/script").read_text()
    golden.text("sbatch/after.sh", normal(script, slurm))

    # squeue fails: a job that must wait is refused, and any other one is not held up.
    (slurm.folder / "slurm/queue").unlink()
    errors = slurm.launch("--after", code=2)
    assert "cannot look up the earlier job for --after" in errors
    assert "submitted job 12" in slurm.launch()


def test_a_job_of_a_chain_runs_only_after_a_success(slurm):
    """After a failure of what it needs, SLURM cancels it (man sbatch, --kill-on-invalid-dep)."""
    stages = "{name: a, config: run.yaml}, {name: b, config: run.yaml, after: [a]}"
    chain = f"stage: chain\nname: two\nstages: [{stages}]\n"
    (slurm.folder / "chain.yaml").write_text(chain)
    output = slurm.launch(config="chain.yaml")
    assert "submitted b: job 12, after 12" in output
    script = (slurm.folder / "slurm/script").read_text()
    assert "--dependency=afterok:12\n" in script
    assert "--kill-on-invalid-dep=yes\n" in script


def test_a_sweep_on_the_command_line_shows_its_runs(submitted):
    before = sorted(submitted.folder.rglob("*"))
    output = submitted.launch(
        "--dry-run",
        "optim.lr=[1e-3, 2e-3]",
        "name=grid",
        "launch.gpus_per_node=1",
        "launch.gpu_request=none",  # they come with the partition
    )
    assert sorted(submitted.folder.rglob("*")) == before
    # Each value names a run of its own.
    one = {*re.findall(r"\S*lr\S*0.001\S*", output)}
    other = {*re.findall(r"\S*lr\S*0.002\S*", output)}
    assert one and other and not one & other, output
    assert "#SBATCH --nodes=2" in output
    assert "=gpu" not in output
    assert "--gpu" not in output


def test_a_dry_run_shows_the_plan_without_slurm(submitted):
    output = submitted.launch("--dry-run", "optim.lr=0.002", slurm=False)
    plan = output.partition("# Plan\n")[2].partition("\n\n")[0]
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in plan.splitlines())
    assert "lr: 0.002" in output
    # Two nodes with a rank each; 100 steps of two images.
    assert rows["batch"] == "global batch 2 = 2 ranks x 1 images"
    assert rows["steps"].startswith("100 steps, 200 images = ")
    assert "0.002" in rows["learning rate"]
    assert "GFLOPs per training image" in rows["compute"]
    # On a laptop there is no SLURM to ask, and nothing wrong with that.
    checks = output.partition("# Checks\n")[2].partition("\n\n")[0]
    assert "configuration  ok" in checks
    assert "SLURM" not in checks

    # A range of nodes: with 4 tasks each, 64 images divide over 2, 4 and 8 of them.
    more = ("launch.nodes=2-8", "launch.tasks_per_node=4", "data.global_batch=64")
    output = submitted.launch("--dry-run", *more)
    used = "used: 8, 4, 2 (the global batch divides over these)"
    assert f"2 to 8, as many as are free at each start; {used}" in output
    assert "32 ranks x 2 images" in output
    assert "(on 2 nodes, ZeRO " in output


def test_a_data_preparation_is_an_array(submitted):
    (submitted.folder / "data.yaml").write_text(DATA)
    output = submitted.launch("--dry-run", config="data.yaml")
    assert "64 task(s) x 8 core(s) = 512 core(s), as a SLURM array" in output

    # A task uses the cores that it requested, not all that the node has.
    assert "\nnum_workers: 8\n" in output
    # Its tasks end at different times.
    errors = submitted.launch("--after", config="data.yaml", code=2)
    assert "is for one job" in errors


def test_what_slurm_refuses_is_said_and_leaves_no_files(slurm):
    copied = "launch.snapshot=true"
    assert "SLURM          ok " in slurm.launch(copied, "--dry-run")
    slurm.write("refusal", "sbatch: error: no such nodes")
    refused = "SLURM          warning  sbatch --test-only: sbatch: error: no such nodes"
    assert refused in slurm.launch(copied, "--dry-run")

    # Of a run that is there, and of a new one: neither a folder nor a copy of the code is left.
    before = sorted(slurm.folder.rglob("*"))
    for name in ("name=small", "name=other"):
        errors = slurm.launch(copied, name, "--after", code=2)
        assert "error:\nsbatch refused the job: no such nodes" in errors
    assert sorted(slurm.folder.rglob("*")) == before


def test_more_time_than_a_partition_allows_is_said(submitted, monkeypatch):
    for name, value in submitted.environment.items():
        monkeypatch.setenv(name, value)
    submitted.write("partitions", PARTITIONS)
    for case in LIMITS.splitlines():
        partition, minutes, *allowed = case.split()
        script = f"#SBATCH --time={minutes}\n"
        # "-": none is named, so the default one counts.
        if partition != "-":
            script += f"#SBATCH --partition={partition}\n"
        [check] = slurm_check(script)
        advised = re.findall(r"launch.timeout_min=(\d+),", check.next_step)
        assert advised == allowed, case
        assert (check.result == "warning") == bool(allowed), case
    # Where partitions cannot be looked up, nothing is said about them.
    (submitted.folder / "slurm/partitions").unlink()
    [check] = slurm_check(script)
    assert check.result == "ok"


def test_refusals_are_short_and_complete(slurm):
    (slurm.folder / "sbatch").symlink_to("/bin/true")  # without srun
    without = slurm.launch("name=other", slurm=False, code=2)
    assert "no SLURM on this machine" in without
    assert "vitscale launch --local" in without
    assert "--dry-run" in without

    # Two faults in one report: a batch that does not divide, and a GPU that is not requested.
    bad = ("launch.nodes=3", "data.global_batch=64", "engine.device=cuda")
    errors = slurm.launch("name=other", *bad, code=2)
    assert "64 images are not divisible by 3 tasks" in errors
    assert "63 or 66" in errors
    assert "launch.gpus_per_node" in errors
    assert "Traceback" not in errors + without

    # Ranges: no number in it divides the batch, its ends are exchanged, it is none.
    free = ("name=other", "launch.tasks_per_node=2", "data.global_batch=6")
    wrong = {
        "2-3": "6 images are not divisible by 4 tasks",
        "3-2": "turn it",
        "x": "2-8",
    }
    for nodes, error in wrong.items():
        assert error in slurm.launch(*free, f"launch.nodes={nodes}", code=2)
    assert not (slurm.folder / "runs/other").exists()


def test_a_plan_for_a_gpu_says_that_this_machine_has_none(slurm):
    command = ("launch/local.py", "--dry-run", "--config", "run.yaml")
    assert "# Checks" in slurm.call(*command, "engine.device=cpu")
    if not has_gpu():
        planned = slurm.call(*command, "engine.device=cuda", code=2)
        assert "cuda needs a GPU" in planned
