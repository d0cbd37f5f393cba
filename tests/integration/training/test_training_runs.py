"""pretrain/main.py and finetune/main.py on two real processes.

A cold start takes about ten seconds, so several tests share one run and the others start warm,
which gives the same bits.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.ranks.rank_processes import ROOT, run_ranks
from tests.support.ranks.run_states import differences, journal_rows, read_state
from tests.support.ranks.warm_ranks import WarmRank, WarmStarter
from tests.support.waiting import PATIENCE_S, wait_until
from vitscale.checkpoint.folders import Checkpoint, newest_checkpoint
from vitscale.distributed.processes import free_port

pytestmark = pytest.mark.distributed

PRETRAIN, FINETUNE = ROOT / "pretrain/main.py", ROOT / "finetune/main.py"
STEPS = 60
# Workers, mixup, drop path, dropout, an average and accumulation on. A log line at every step: the
# save after a signal would end an interval that an uninterrupted run does not end.
SETTINGS = [
    f"schedule.steps={STEPS}",
    "schedule.epochs=null",
    "schedule.warmup_steps=5",
    "data.global_batch=32",
    "engine.max_micro_batch=8",
    "engine.num_threads=1",
    "model.width=48",
    "model.depth=2",
    "model.mlp_width=96",
    "model.dropout=0.1",
    "model.drop_path=0.1",
    "data.mixing.mixup_alpha=0.2",
    "optim.ema.decay=0.9",
    "checkpoint.every_steps=7",
    "tracking.log_every_steps=1",
    "evaluate=[{name: classification, every_steps: 25}]",
    "tracking.uri=null",
]
StartWarm = Callable[..., list[WarmRank]]


def command(shards: Path, folder: Path, *more: str) -> list[str | Path]:
    config = ROOT / "configs/digits/pretrain.yaml"
    places = [f"data.path={shards}", f"output={folder}"]
    return [PRETRAIN, "--config", config, *SETTINGS, *places, *more]


def last_checkpoint(folder: Path) -> Checkpoint:
    checkpoint, complaints = newest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None and complaints == []
    return checkpoint


@dataclass(frozen=True)
class Finished:
    folder: Path
    output: str
    shards: Path


@pytest.fixture(scope="module")
def uninterrupted(digits_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    # Profiled, unlike the runs that are compared with it: it changes nothing.
    run = command(digits_shards, folder, "engine.profile_steps=2")
    finished = run_ranks(run, num_ranks=2, cwd=folder.parent)
    assert [code for code, _ in finished] == [0, 0], finished[0][1]
    return Finished(folder, finished[0][1], digits_shards)


@pytest.fixture
def start_warm(warm_starter: WarmStarter, tmp_path: Path) -> StartWarm:
    """Start ranks, which leave their logs in tmp_path."""

    def start(what: list[str | Path], *, num_ranks: int) -> list[WarmRank]:
        return warm_starter.start(what, num_ranks=num_ranks, folder=tmp_path)

    return start


def outcome(ranks: list[WarmRank]) -> list[tuple[int, str]]:
    """Wait for the end; (exit code, output) of every rank."""
    return [(rank.wait(timeout_s=PATIENCE_S), rank.output()) for rank in ranks]


def wait_for_step(folder: Path, step: int, ranks: list[WarmRank]) -> None:
    def is_reached() -> bool:
        rows = journal_rows(folder)
        assert all(rank.poll() is None for rank in ranks), "ended too early"
        return bool(rows) and rows[-1]["step"] >= step

    wait_until(is_reached, else_say=ranks[0].output)


def stop_ranks(ranks: list[WarmRank], *, number: int, which: list[int]) -> list[int]:
    for rank in which:
        ranks[rank].send_signal(number)
    return [rank.wait(timeout_s=PATIENCE_S) for rank in ranks]


def test_killed_and_resumed_equals_uninterrupted(
    uninterrupted: Finished, start_warm: StartWarm, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    again = command(uninterrupted.shards, folder)
    # Killed between two checkpoints.
    ranks = start_warm(again, num_ranks=2)
    wait_for_step(folder, 20, ranks)
    stop_ranks(ranks, number=signal.SIGKILL, which=[0, 1])
    killed_at = last_checkpoint(folder).step
    assert 0 < killed_at < STEPS
    # Stopped by a signal to one rank only: all ranks save and end with the code for a resume.
    ranks = start_warm(again, num_ranks=2)
    wait_for_step(folder, 35, ranks)
    assert stop_ranks(ranks, number=signal.SIGTERM, which=[1]) == [75, 75]
    assert killed_at < last_checkpoint(folder).step < STEPS
    finished = outcome(start_warm(again, num_ranks=2))
    assert [code for code, _ in finished] == [0, 0], finished[0][1]
    assert finished[0][1].count("resuming") == 2
    assert differences(read_state(folder), read_state(uninterrupted.folder)) == []


def test_run_folder_holds_the_documented_files(uninterrupted: Finished) -> None:
    folder = uninterrupted.folder
    steps = {row["step"] for row in journal_rows(folder) if "train/loss" in row}
    assert steps == set(range(1, STEPS + 1))
    evaluated = [row for row in journal_rows(folder) if "val/top1" in row]
    assert [row["step"] for row in evaluated] == [25, 50, STEPS]
    assert evaluated[-1]["val/top1"] > 0.2  # chance is 0.1
    averages = [row for row in journal_rows(folder) if "val/ema_top1" in row]
    assert [row["step"] for row in averages] == [25, 50, STEPS]
    rows = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert all(0 < row["vitals/data_wait"] < 1 for row in rows if "train/loss" in row)
    assert averages[-1]["val/ema_loss"] != evaluated[-1]["val/loss"]
    assert f"step {STEPS}/{STEPS} loss" in (folder / "logs/rank0.log").read_text()
    assert "width: 48" in (folder / "config.yaml").read_text()
    assert "digits-pretrain: from random weights; 0." in uninterrupted.output
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["step-00000056", "step-00000060"]


def test_a_finished_run_repeated_changes_nothing(
    uninterrupted: Finished, start_warm: StartWarm
) -> None:
    folder = uninterrupted.folder

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = contents()
    again = outcome(start_warm(command(uninterrupted.shards, folder), num_ranks=2))
    assert [code for code, _ in again] == [0, 0]
    assert f"done before: {folder} at step {STEPS}\n" in again[0][1]
    assert contents() == before


def test_profiled_steps_are_traced(uninterrupted: Finished) -> None:
    trace = json.loads((uninterrupted.folder / "profile.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 2
    assert names.count("aten::addmm") > 0 and "gloo:all_reduce" in " ".join(names)


@pytest.mark.slow
def test_checkpoint_resumes_on_another_number_of_ranks(
    uninterrupted: Finished, start_warm: StartWarm, tmp_path: Path
) -> None:
    """Without dropout, which is drawn per rank; with augmented and mixed images, which are not."""
    still = ["model.dropout=0", "model.drop_path=0", "evaluate=[{name: classification}]"]
    still += ["data.augment.randaugment.magnitude=10", "data.augment.erasing.probability=0.25"]
    still += ["data.mixing.mixup_alpha=0.8", "data.mixing.cutmix_alpha=1", "data.mixing.mode=pair"]
    losses = {}
    for name, split in (("two", None), ("moved", 28)):
        folder = tmp_path / name
        run = command(uninterrupted.shards, folder, *still)
        if split is not None:
            started = start_warm(run, num_ranks=2)
            wait_for_step(folder, split + 2, started)
            stop_ranks(started, number=signal.SIGKILL, which=[0, 1])
        ranks = 2 if split is None else 1
        stage = "engine.zero_stage=1" if split is None else "engine.zero_stage=0"
        finished = outcome(start_warm([*run, stage], num_ranks=ranks))
        assert finished[0][0] == 0, finished[0][1]
        losses[name] = [row["train/loss"] for row in journal_rows(folder) if "train/loss" in row]
    assert len(losses["two"]) == STEPS
    assert losses["moved"] == pytest.approx(losses["two"], rel=1e-5)


@pytest.mark.slow
def test_finetuning_at_a_higher_resolution_through_the_launcher(
    uninterrupted: Finished, tmp_path: Path
) -> None:
    launcher = Path(sys.executable).with_name("deepspeed")
    folder = tmp_path / "finetune"
    overrides = [
        f"data.path={uninterrupted.shards}",
        f"output={folder}",
        f"init={uninterrupted.folder}",
        "schedule.steps=10",
        "schedule.warmup_steps=2",
        "model.width=48",
        "model.depth=2",
        "model.mlp_width=96",
        "tracking.uri=null",
        "engine.zero_stage=3",
    ]
    finished = subprocess.run(
        [
            launcher,
            "--num_gpus=2",
            f"--master_port={free_port()}",
            FINETUNE,
            "--config",
            ROOT / "configs/digits/finetune.yaml",
            *overrides,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "on 360 images of 'test'" in finished.stdout
    assert f": from {uninterrupted.folder}; 0." in finished.stdout
    weights = last_checkpoint(folder).tensors(prefix="model.")
    assert weights["pos_embed"].shape == (1, 1 + 6 * 6, 48)
    assert (folder / "pictures/test_predictions.png").stat().st_size > 1000


BAD_INPUT = {
    "another model": (["model.width=96"], "belongs to another run"),
    "shards missing": (["data.path=nowhere", "output=runs/x"], "no such folder"),
    "class count": (["model.num_classes=7", "output=new"], "label map"),
    "raw key": (
        ["deepspeed.zero_optimization.reduce_scatter=7", "output=new"],
        "does not start with them",
    ),
}


@pytest.mark.parametrize("case", sorted(BAD_INPUT))
def test_bad_input_ends_with_one_clear_message(
    uninterrupted: Finished,
    start_warm: StartWarm,
    tmp_path: Path,
    case: str,
) -> None:
    overrides, message = BAD_INPUT[case]
    run = command(uninterrupted.shards, uninterrupted.folder, *overrides)
    ((code, output),) = outcome(start_warm(run, num_ranks=1))
    assert code == 2, output
    assert output.count(message) == 1 and "Traceback" not in output
    assert not (tmp_path / "new").exists()


def test_wrong_init_leaves_no_run_folder(
    uninterrupted: Finished, start_warm: StartWarm, tmp_path: Path
) -> None:
    config = ROOT / "configs/digits/finetune.yaml"
    overrides = [f"data.path={uninterrupted.shards}", f"output={tmp_path / 'run'}", "init=nowhere"]
    finished = outcome(start_warm([FINETUNE, "--config", config, *overrides], num_ranks=2))
    assert [code for code, _ in finished] == [2, 2]
    assert "init=nowhere: no such run or checkpoint folder" in finished[0][1]
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0.log", "rank-1.log"}


def test_second_job_in_the_same_folder_is_refused(
    uninterrupted: Finished, start_warm: StartWarm, tmp_path: Path
) -> None:
    import fcntl

    folder = tmp_path / "run"
    folder.mkdir()
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ((code, output),) = outcome(start_warm(command(uninterrupted.shards, folder), num_ranks=1))
    assert code == 2 and "another job is training in this run folder" in output
