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
def finished(fault_runs: FaultRuns) -> Path:
    """A run folder."""
    return fault_runs.undisturbed()


def test_run_folder_holds_the_documented_files(finished):
    rows = [
        json.loads(line)
        for line in (finished / "journal.jsonl").read_text().splitlines()
    ]
    trained = [row for row in rows if "train/loss" in row]

    # Every fourth step, and every fifth with its checkpoint.
    assert [row["step"] for row in trained] == [4, 5, 8, 10, 12, 15, 16, 20, 24]
    assert all(0 < row["vitals/data_wait"] < 1 for row in trained)
    assert trained[-1]["train/loss"] != trained[0]["train/loss"]
    evaluated = [row for row in rows if "val/top1" in row]
    averages = [row for row in rows if "val/ema_top1" in row]
    assert (
        [row["step"] for row in evaluated]
        == [row["step"] for row in averages]
        == [12, STEPS]
    )
    assert averages[-1]["val/ema_loss"] != evaluated[-1]["val/loss"]
    assert f"step {STEPS}/{STEPS} loss" in (finished / "logs/rank0.log").read_text()
    assert "width: 24" in (finished / "config.yaml").read_text()
    assert "digits-pretrain: from random weights; 0." in output(finished.parent)
    assert "[WARNING]" not in output(finished.parent)  # of a library
    # The two newest, and the first of those that are best by the average, which commands take.
    best = max(averages, key=lambda row: row["val/ema_top1"])
    kept = {step_of(path) for path in (finished / "checkpoints").iterdir()}
    assert kept == {20, STEPS, best["step"]}
    # A training that starts from it takes the end of its schedule.
    for takes_best, step in ((True, best["step"]), (False, STEPS)):
        weights, source = read_source(str(finished), takes_best=takes_best)
        assert source is not None and source.checkpoint.step == step
        assert ("the best by val/ema_top1" in weights.format) == takes_best
    said = output(finished.parent)
    end = f"best val/ema_top1 {best['val/ema_top1']:.4f} at step {best['step']}\nnext: vitscale"
    assert end in said and f"predict init={quote(str(finished))} IMAGES" in said


def test_a_finished_run_repeated_changes_nothing(fault_runs: FaultRuns, finished):
    def contents():
        return {
            path: path.read_bytes() for path in finished.rglob("*") if path.is_file()
        }

    before = contents()
    assert fault_runs.run(finished.parent) == [0, 0]
    done = f"done before: {finished} at step {STEPS}\n"
    assert done in output(finished.parent)
    assert "not used" not in output(finished.parent)
    assert contents() == before

    # Other settings are not used, which is said.
    assert fault_runs.run(finished.parent, "optim.lr=0.5") == [0, 0]
    refused = f"{done}not used, since the run is finished:\n    optim.lr: 0.001 -> 0.5\n  next: "
    assert refused in output(finished.parent)
    assert contents() == before


def test_profiled_steps_are_traced(fault_runs: FaultRuns, tmp_path):
    settings = ("engine.profile_steps=2", "schedule.steps=8")
    assert fault_runs.run(tmp_path, *settings) == [0, 0]
    trace = json.loads((tmp_path / "run/profile.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 2
    assert names.count("aten::addmm") > 0
    assert "gloo:all_reduce" in " ".join(names)


@pytest.mark.slow
def test_finetuning_at_a_higher_resolution_through_the_launcher(
    fault_runs: FaultRuns, finished, tmp_path
):
    """Start by DeepSpeed's launcher, in fresh processes."""
    command = [Path(sys.executable).with_name("deepspeed"), "--num_gpus=2"]
    command += [f"--master_port={free_port()}", ROOT / "finetune/main.py"]
    command += ["--config", ROOT / "configs/digits/finetune.yaml", f"init={finished}"]
    command += [f"data.path={fault_runs.shards}", f"output={tmp_path / 'run'}"]
    command += ["schedule.steps=10", "schedule.warmup_steps=2", "engine.zero_stage=3"]
    command += [
        "model.patch_size=4",
        "init_patch=same",
        "model.width=24",
        "model.depth=2",
        "model.mlp_width=48",
        "tracking.uri=null",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 360 images of 'test'" in done.stdout
    assert f": from {finished}; 0." in done.stdout
    checkpoint, _ = newest_checkpoint(tmp_path / "run/checkpoints")
    assert read_tensors(checkpoint.files, prefix="model.")["pos_embed"].shape == (
        1,
        1 + 6 * 6,
        24,
    )
    assert (tmp_path / "run/evaluation/predictions.png").stat().st_size > 1000


# Work that every node does, the index once, what one reads while all is well, and the tracker,
# which rank 0 alone opens. The places and ranks of a case are tried at the same time, since their
# runs mostly wait.
LACKING = {
    "index": [("index", 1)],
    "index of the first": [("index", 0), ("init", 0)],
    "prepare": [("prepare", 1), ("prepare", 0)],
    "decoder": [("decoder", 1), ("decoder", 0)],
    "private folder": [("private folder", 1)],
}


def start_lacking(
    fault_runs: FaultRuns, folder: Path, place: str, ranks: Sequence[int]
) -> list[WarmRank]:
    """Start two nodes, of which some lack something."""
    (folder / "run").mkdir(parents=True)  # as a launcher does
    settings = ["engine.compile=true"] if place == "private folder" else []
    stage = "pretrain"
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
    fault_runs: FaultRuns, tmp_path, case
):
    started = []
    for place, rank in LACKING[case]:
        folder = tmp_path / f"{place}-{rank}"
        ranks = start_lacking(fault_runs, folder, place, [rank])
        started.append((folder, rank, ranks))
    for folder, rank, ranks in started:
        assert set(wait_all(ranks)) == {FailureKind.NODE.exit_code}, output(folder)
        for each in ranks:
            named = f"rank {rank} on n{rank}: what the run needs: is not here"
            assert named in each.output()
        found = cause(read_failures(folder / "run"))
        assert found.kind == FailureKind.NODE
        assert found.rank == rank
        assert found.node == f"n{rank}"


@pytest.mark.slow
@rows("[[places], [[prepare, index]], [[init, tracker]]]")
def test_what_all_nodes_lack_is_bad_input(fault_runs: FaultRuns, tmp_path, places):
    started = {}
    for place in places:
        lacking = [0] if place == "tracker" else [0, 1]
        started[place] = start_lacking(fault_runs, tmp_path / place, place, lacking)
    for place, ranks in started.items():
        assert set(wait_all(ranks)) == {FailureKind.BAD_INPUT.exit_code}, place
        for each in ranks:
            assert "what the run needs: is not here" in each.output(), place
        found = cause(read_failures(tmp_path / place / "run"))
        assert found.kind is FailureKind.BAD_INPUT, place


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
def test_bad_input_ends_with_one_clear_message(
    fault_runs: FaultRuns, finished, tmp_path, case
):
    words, message = BAD_INPUT[case]
    stage = "finetune" if case == "wrong init" else "pretrain"
    overrides = [f"output={finished}", *words.split()]
    (tmp_path / "locked").mkdir()
    with open(tmp_path / "locked/.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ranks = fault_runs.start(tmp_path, *overrides, num_ranks=1, stage=stage)
        assert wait_all(ranks) == [2]
    assert output(tmp_path).count(message) == 1
    assert "Traceback" not in output(tmp_path)
    assert not (tmp_path / "new/checkpoints").exists()
    assert case != "few tars" or not (tmp_path / "new").exists()
    if case == "raw key":  # the engine refuses it
        failure = cause(read_failures(tmp_path / "new"))
        assert failure is not None
        assert "ended with an error: " in failure.what
