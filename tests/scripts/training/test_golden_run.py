"""A stored run folder is read, resumed and opened as a model.

Two ranks at ZeRO 1 trained until rank 1 was killed in step 13; one rank at ZeRO 0 resumed at step
10 and was stopped by a signal after step 16.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.golden import Golden
from tests.support.ranks.fault_runs import fault
from tests.support.ranks.warm_ranks import WarmStarter
from tests.support.runs import CURVES, MIXED, REL, SHARDS, TINY, journal, run
from vitscale.checkpoint.folders import (
    MANIFEST,
    manifest_text,
    newest_checkpoint,
    read_manifest,
    step_folders,
)
from vitscale.distributed.events import cause, read_events, read_failures, read_start

pytestmark = pytest.mark.distributed

SETTINGS = (*MIXED, "checkpoint.every_steps=10")
KILLED = fault("backward", 26, "lag and kill")
STOPPED = fault("backward", 21, "SIGTERM")


@pytest.fixture(scope="module")
def stored(
    golden: Golden, warm_starter: WarmStarter, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    def make(path: Path) -> None:
        place = tmp_path_factory.mktemp("made")
        train(warm_starter, place, num_ranks=2, faults={1: [KILLED]})
        zero = "engine.zero_stage=0"
        train(warm_starter, place, zero, faults={0: [STOPPED]})
        path.mkdir()
        for name in ("journal.jsonl", "classes.json"):
            shutil.copy(place / "run" / name, path)
        shutil.copytree(place / "run/checkpoints", path / "checkpoints")
        (path / "events").mkdir()
        events = next((place / "run/events").iterdir()).read_text()
        (path / "events/node1.jsonl").write_text(events.replace(socket.gethostname(), "node1"))
        values: Any = TINY | {"stage": "pretrain", "name": "golden"}
        values["data"] = values["data"] | {"path": "shards"}
        (path / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        for folder in step_folders(path / "checkpoints"):
            drop_facts_of_this_machine(folder / MANIFEST)

    return golden.folder("training/run", make)


def drop_facts_of_this_machine(path: Path) -> None:
    """Keep what a resume needs in the description of a checkpoint."""
    manifest = read_manifest(path)
    del manifest["format_version"]
    description = manifest.pop("description").items()
    kept = {key: value for key, value in description if value is not None}
    path.write_text(manifest_text(**manifest, description=kept))


def train(starter: WarmStarter, folder: Path, *settings: str, **how: Any) -> str:
    return run(starter, "pretrain/main.py", folder, *SETTINGS, *settings, **how)


def test_it_is_read(stored: Path) -> None:
    checkpoint, complaints = newest_checkpoint(stored / "checkpoints")
    assert checkpoint is not None and complaints == []
    assert (checkpoint.step, checkpoint.progress["samples_seen"]) == (16, 16 * 8)
    assert [path.name for path in step_folders(stored / "checkpoints")] == [
        "step-00000016",
        "step-00000010",
    ]
    assert journal(stored, "step")["step"] == list(range(1, 17))
    events = [row["event"] for row in read_events(stored)]
    assert events == ["started", "failed", "started"]
    start, failure = read_start(stored), cause(read_failures(stored))
    assert start is not None and (start.first_step, start.total_steps) == (10, 20)
    assert failure is not None and (failure.rank, failure.step) == (1, 12)


@pytest.mark.parametrize(
    ("step", "layout", "num_ranks"),
    [
        pytest.param(10, "engine.zero_stage=1", 2, id="the same"),
        pytest.param(10, "engine.zero_stage=0", 1, id="fewer ranks"),
        pytest.param(16, "engine.zero_stage=3", 2, id="more ranks"),
    ],
)
def test_it_resumes_with_the_golden_losses(
    stored: Path,
    golden: Golden,
    warm_starter: WarmStarter,
    tmp_path: Path,
    step: int,
    layout: str,
    num_ranks: int,
) -> None:
    shutil.copytree(stored, tmp_path / "run")
    if step == 10:
        shutil.rmtree(tmp_path / "run/checkpoints/step-00000016")
    printed = train(warm_starter, tmp_path, layout, num_ranks=num_ranks)
    assert f"resuming {tmp_path / 'run'} at step {step}\n" in printed
    golden.json("training/curves/supervised.json", journal(tmp_path / "run", *CURVES), rel=REL)


@pytest.mark.parametrize("step", [10, 16])
def test_it_predicts(
    stored: Path, golden: Golden, warm_starter: WarmStarter, tmp_path: Path, step: int
) -> None:
    init = f"init={stored}/checkpoints/step-{step:08d}"
    arguments: Sequence[str] = (init, str(SHARDS), "output=predicted.parquet", "num_workers=0")
    run(warm_starter, "finetune/predict.py", tmp_path, *arguments, "compute.device=cpu")
    rows = pq.read_table(tmp_path / "predicted.parquet").to_pylist()
    golden.json(f"training/predictions/step_{step}.json", rows, rel=REL)
