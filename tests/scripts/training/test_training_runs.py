"""pretrain/main.py and finetune/main.py as their users meet them: files, messages, exit codes.

Left out: runs that are disturbed (test_resume).
"""

import fcntl
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

import pytest
import yaml

from tests.support.levels import by_level
from tests.support.ranks.fault_runs import STEPS, FaultRuns, fault, output, wait_all
from tests.support.ranks.warm_ranks import ROOT, WarmRank
from tests.support.tables import every, rows
from tests.support.waiting import PATIENCE_S
from vitscale.checkpoint.folders import newest_checkpoint, step_of
from vitscale.checkpoint.store import read_tensors
from vitscale.config.errors import FailureKind
from vitscale.distributed.events import cause, read_failures
from vitscale.distributed.processes import free_port
from vitscale.evaluation.trained_model import read_source

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def finished(fault_runs) -> Path:
    """A run folder."""
    return fault_runs.undisturbed()


def test_run_folder_holds_the_documented_files(finished):
    journal = (finished / "journal.jsonl").read_text()
    rows = [json.loads(line) for line in journal.splitlines()]
    trained = [row for row in rows if "train/loss" in row]

    # Every fourth step, and every fifth with its checkpoint.
    assert [row["step"] for row in trained] == [4, 5, 8, 10, 12, 15, 16, 20, 24]
    assert all(0 < row["vitals/data_wait"] < 1 for row in trained)
    assert trained[-1]["train/loss"] != trained[0]["train/loss"]
    # The weights and their average, which are evaluated together, give other results.
    evaluated = [row for row in rows if "val/top1" in row]
    averages = [row for row in rows if "val/ema_top1" in row]
    assert [row["step"] for row in evaluated] == [12, STEPS]
    assert [row["step"] for row in averages] == [12, STEPS]
    assert averages[-1]["val/ema_loss"] != evaluated[-1]["val/loss"]

    text = output(finished.parent)
    assert f"step {STEPS}/{STEPS} loss" in (finished / "logs/rank0.log").read_text()
    assert "width: 24" in (finished / "config.yaml").read_text()
    assert "digits-pretrain: from random weights; 0." in text
    assert "[WARNING]" not in text  # of a library
    # The two newest, and the first of those that are best by the average, which commands take.
    best = max(averages, key=lambda row: row["val/ema_top1"])
    kept = {step_of(path) for path in (finished / "checkpoints").iterdir()}
    assert kept == {20, STEPS, best["step"]}
    # A training that starts from it takes the end of its schedule.
    for takes_best, step in ((True, best["step"]), (False, STEPS)):
        weights, source = read_source(str(finished), takes_best=takes_best)
        assert source.checkpoint.step == step
        assert ("the best by val/ema_top1" in weights.format) == takes_best
    end = f"best val/ema_top1 {best['val/ema_top1']:.4f} at step {best['step']}\nnext: vitscale"
    assert end in text
    # As a shell takes it: the folder's name may have a space.
    assert f"predict init={quote(str(finished))} IMAGES" in text


def test_a_finished_run_repeated_changes_nothing(fault_runs, finished):
    folder = finished.parent

    def contents():
        files = [path for path in finished.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files}

    before = contents()
    assert fault_runs.run(folder) == [0, 0]
    done = f"done before: {finished} at step {STEPS}\n"
    assert done in output(folder)
    assert "not used" not in output(folder)
    assert contents() == before

    # Other settings are not used, which is said.
    assert fault_runs.run(folder, "optim.lr=0.5") == [0, 0]
    refused = f"{done}not used, since the run is finished:\n    optim.lr: 0.001 -> 0.5\n  next: "
    assert refused in output(folder)
    assert contents() == before


def test_profiled_steps_are_traced(fault_runs, tmp_path):
    settings = ("engine.profile_steps=2", "schedule.steps=8")
    assert fault_runs.run(tmp_path, *settings) == [0, 0]
    trace = json.loads((tmp_path / "run/profile.json").read_text())
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert sum(name.startswith("ProfilerStep#") for name in names) == 2
    # What computes, and what the ranks exchange.
    assert "aten::addmm" in names
    assert "gloo:all_reduce" in " ".join(names)


@pytest.mark.slow
def test_finetuning_at_a_higher_resolution_through_the_launcher(
    fault_runs, finished, tmp_path
):
    """Start by DeepSpeed's launcher, in fresh processes."""
    run = tmp_path / "run"
    # The model of the finished run, on images of 24 pixels instead of 16.
    settings = """
        schedule.steps=10 schedule.warmup_steps=2 engine.zero_stage=3 tracking.uri=null
        model.patch_size=4 init_patch=same model.width=24 model.depth=2 model.mlp_width=48
    """
    command = [
        Path(sys.executable).with_name("deepspeed"),
        "--num_gpus=2",
        f"--master_port={free_port()}",
        ROOT / "finetune/main.py",
        "--config",
        ROOT / "configs/digits/finetune.yaml",
        f"init={finished}",
        f"data.path={fault_runs.shards}",
        f"output={run}",
        *settings.split(),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 360 images of 'test'" in done.stdout
    assert f": from {finished}; 0." in done.stdout
    checkpoint, _ = newest_checkpoint(run / "checkpoints")
    positions = read_tensors(checkpoint.files, prefix="model.")["pos_embed"]
    assert positions.shape == (1, 1 + 6 * 6, 24)
    assert (run / "evaluation/predictions.png").stat().st_size > 1000


# Work that every node does, the index once, what one reads while all is well, and the tracker,
# which rank 0 alone opens. The places and ranks of a case are tried at the same time, since their
# runs mostly wait.
LACKING = yaml.safe_load("""
index: [[index, 1]]
index of the first: [[index, 0], [init, 0]]
prepare: [[prepare, 1], [prepare, 0]]
decoder: [[decoder, 1], [decoder, 0]]
private folder: [[private folder, 1]]
""")


def start_lacking(
    fault_runs: FaultRuns, folder: Path, place: str, ranks: Sequence[int]
) -> list[WarmRank]:
    """Start two nodes, of which some lack something."""
    (folder / "run").mkdir(parents=True)  # as a launcher does
    settings = []
    stage = "pretrain"
    # Only a compiled model needs it, and only a fine-tuning has weights to start from.
    if place == "private folder":
        settings = ["engine.compile=true"]
    if place == "init":
        settings = [f"init={fault_runs.undisturbed()}"]
        stage = "finetune"
    return fault_runs.start(
        folder,
        *settings,
        stage=stage,
        faults={rank: [fault(place, 1, "lack")] for rank in ranks},
        is_node_of_its_own=True,
    )


@every(case=by_level(LACKING, fast=["index"], slow=LACKING.keys() - {"index"}))
def test_what_one_node_lacks_is_its_fault_and_every_rank_names_it(
    fault_runs, tmp_path, case
):
    started = []
    for place, rank in LACKING[case]:
        folder = tmp_path / f"{place}-{rank}"
        ranks = start_lacking(fault_runs, folder, place, [rank])
        started.append((folder, rank, ranks))
    for folder, rank, ranks in started:
        assert {*wait_all(ranks)} == {FailureKind.NODE.exit_code}, output(folder)
        # In every log, since nobody knows which one a person opens first.
        named = f"rank {rank} on n{rank}: what the run needs: is not here"
        for warm_rank in ranks:
            assert named in warm_rank.output()
        failure = cause(read_failures(folder / "run"))
        assert failure.kind == FailureKind.NODE
        assert failure.rank == rank
        assert failure.node == f"n{rank}"


@pytest.mark.slow
@rows("[[places], [[prepare, index]], [[init, tracker]]]")
def test_what_all_nodes_lack_is_bad_input(fault_runs, tmp_path, places):
    started = {}
    for place in places:
        lacking = [0, 1]
        if place == "tracker":
            lacking = [0]
        started[place] = start_lacking(fault_runs, tmp_path / place, place, lacking)
    for place, ranks in started.items():
        # Another node would not help, so the job must not be requeued.
        assert {*wait_all(ranks)} == {FailureKind.BAD_INPUT.exit_code}, place
        for rank in ranks:
            assert "what the run needs: is not here" in rank.output(), place
        failure = cause(read_failures(tmp_path / place / "run"))
        assert failure.kind is FailureKind.BAD_INPUT, place


# Overrides of a start in the folder of the finished run, and what is said of them.
BAD_INPUT = yaml.safe_load("""
another model: [model.width=48, belongs to another run]
shards missing: [data.path=nowhere output=runs/x, no such folder]
class count: [model.num_classes=7 output=new, label map]
raw key:
- deepspeed.zero_optimization.reduce_bucket_size=no output=new
- does not start with them
wrong init: [init=nowhere output=new, "init=nowhere: no such run or checkpoint"]
few tars:
- data.reader=webdataset data.webdataset.num_samples=1437 data.val_split=null
  data.webdataset.num_classes=10 evaluate=[] data.num_workers=99 output=new
- than loader processes (99 = 1 rank(s) x 99)
second job: [output=locked, another job is training in this run folder]
""")


@every(case=sorted(BAD_INPUT))
def test_bad_input_ends_with_one_clear_message(fault_runs, finished, tmp_path, case):
    words, message = BAD_INPUT[case]
    stage = "pretrain"
    if case == "wrong init":
        stage = "finetune"
    overrides = [f"output={finished}", *words.split()]
    # Held by this process, as by a training that runs.
    (tmp_path / "locked").mkdir()
    with open(tmp_path / "locked/.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ranks = fault_runs.start(tmp_path, *overrides, num_ranks=1, stage=stage)
        assert wait_all(ranks) == [2]
    text = output(tmp_path)
    assert text.count(message) == 1
    assert "Traceback" not in text

    # A run that never began leaves nothing that a corrected command would meet.
    new = tmp_path / "new"
    assert not (new / "checkpoints").exists()
    if case == "few tars":
        assert not new.exists()
    if case == "raw key":  # the engine refuses it
        failure = cause(read_failures(new))
        assert "ended with an error: " in failure.what
