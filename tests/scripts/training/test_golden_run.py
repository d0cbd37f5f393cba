"""A stored run folder is read, resumed and opened as a model.

Two ranks at ZeRO 1 trained until rank 1 was killed in step 13; one rank at ZeRO 0 resumed at step
10 and was stopped by a signal after step 16.
"""

import shutil
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import local

import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.engine.subjects import WORLD
from tests.support.golden import Golden
from tests.support.ranks.fault_runs import fault
from tests.support.ranks.thread_ranks import run_ranks
from tests.support.ranks.warm_ranks import WarmStarter
from tests.support.runs import CURVES, MIXED, REL, SHARDS, TINY, journal, run
from tests.support.tables import every
from vitscale.checkpoint import folders
from vitscale.checkpoint.folders import (
    MANIFEST,
    manifest_text,
    newest_checkpoint,
    read_manifest,
    step_folders,
)
from vitscale.config.errors import UserError
from vitscale.data.index import read_split
from vitscale.distributed.events import cause, read_events, read_failures, read_start
from vitscale.evaluation import trained_model
from vitscale.evaluation.trained_model import open_model

pytestmark = pytest.mark.distributed

SETTINGS = (*MIXED, "checkpoint.every_steps=10")
KILLED = fault("backward", 26, "lag and kill")
STOPPED = fault("backward", 21, "SIGTERM")


@pytest.fixture(scope="module")
def stored(golden: Golden, warm_starter: WarmStarter, tmp_path_factory) -> Path:
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
        (path / "events/node1.jsonl").write_text(
            events.replace(socket.gethostname(), "node1")
        )
        values = TINY | {"stage": "pretrain", "name": "golden"}
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


def train(starter: WarmStarter, folder: Path, *settings: str, **how) -> str:
    return run(starter, "pretrain/main.py", folder, *SETTINGS, *settings, **how)


def test_it_is_read(stored):
    checkpoint, complaints = newest_checkpoint(stored / "checkpoints")
    assert checkpoint is not None
    assert complaints == []
    assert checkpoint.step == 16
    assert checkpoint.progress["samples_seen"] == 16 * 8
    assert [path.name for path in step_folders(stored / "checkpoints")] == [
        "step-00000016",
        "step-00000010",
    ]
    assert journal(stored, "step")["step"] == list(range(1, 17))
    events = [row["event"] for row in read_events(stored)]
    assert events == ["started", "failed", "started"]
    start = read_start(stored)
    failure = cause(read_failures(stored))
    assert start.first_step == 10
    assert start.total_steps == 20
    assert failure.rank == 1
    assert failure.step == 12


@pytest.mark.parametrize(
    ("step", "layout", "num_ranks"),
    [
        pytest.param(10, "engine.zero_stage=1", 2, id="the same"),
        pytest.param(10, "engine.zero_stage=0", 1, id="fewer ranks"),
        pytest.param(16, "engine.zero_stage=3", 2, id="more ranks"),
    ],
)
def test_it_resumes_with_the_golden_losses(
    stored, golden: Golden, warm_starter: WarmStarter, tmp_path, step, layout, num_ranks
):
    shutil.copytree(stored, tmp_path / "run")
    if step == 10:
        shutil.rmtree(tmp_path / "run/checkpoints/step-00000016")
    printed = train(warm_starter, tmp_path, layout, num_ranks=num_ranks)
    assert f"resuming {tmp_path / 'run'} at step {step}\n" in printed
    golden.json(
        "training/curves/supervised.json", journal(tmp_path / "run", *CURVES), rel=REL
    )


@every(step="10, 16")
def test_it_predicts(stored, golden: Golden, warm_starter: WarmStarter, tmp_path, step):
    init = f"init={stored}/checkpoints/step-{step:08d}"
    arguments = (
        init,
        str(SHARDS),
        "output=predicted.parquet",
        "num_workers=0",
    )
    run(warm_starter, "finetune/predict.py", tmp_path, *arguments, "compute.device=cpu")
    rows = pq.read_table(tmp_path / "predicted.parquet").to_pylist()
    golden.json(f"training/predictions/step_{step}.json", rows, rel=REL)


@every(num_ranks="1, 2, 5", place="checkpoints/step-00000010, ''")
def test_ranks_that_open_it_share_its_verification(
    stored, monkeypatch, num_ranks, place
):
    """Each file is hashed once, by one of them: it has more than the model that all read."""
    init = str(stored / place)
    hashed = []
    of_thread = local()
    files = stored / (place or "checkpoints/step-00000016")
    expected = open_model(init).network.state_dict()
    whole = folders.blake3_of_file

    def counted(path, **how):
        hashed.append(path)
        return whole(path, **how)

    monkeypatch.setattr(folders, "blake3_of_file", counted)
    monkeypatch.setattr(
        trained_model, "gather_objects", lambda value: of_thread.gather(value)
    )

    def work(rank, gather, *, blind=None):
        of_thread.gather = gather
        world = replace(WORLD, rank=rank, world_size=num_ranks)
        try:
            return open_model("nowhere" if rank == blind else init, world=world)
        except UserError as error:
            return str(error)

    found = run_ranks(num_ranks, work)
    assert sorted(hashed) == sorted(files.glob("*.safetensors"))
    for model in found:
        tensors = model.network.state_dict()
        assert all(tensors[name].equal(value) for name, value in expected.items())
    if place:  # the folders in a run are those of rank 0
        (said,) = set(run_ranks(num_ranks, partial(work, blind=num_ranks - 1)))
        assert "nowhere" in said


@pytest.mark.slow
def test_replaced_samples_are_counted_since_step_0(warm_starter: WarmStarter, tmp_path):
    """A run that two ranks began and one resumed has the numbers of one that was not stopped."""
    shards = shutil.copytree(SHARDS, tmp_path / "shards")
    index = read_split(shards, split="train")
    for sample in (1, 5):
        with open(index.shards[index.shard_of[sample]], "r+b") as file:
            file.seek(int(index.offset[sample]))
            file.write(b"\xff" * 60)
    settings = (f"data.path={shards}", "data.max_unreadable_fraction=1")
    train(warm_starter, tmp_path / "whole", *settings)
    train(
        warm_starter, tmp_path / "parts", *settings, num_ranks=2, faults={1: [KILLED]}
    )
    train(warm_starter, tmp_path / "parts", *settings)
    whole, parts = (
        journal(tmp_path / name / "run", "step", "vitals/unreadable")
        for name in ("whole", "parts")
    )
    assert whole == parts
    assert (counts := whole["vitals/unreadable"])[-1] > 4
    assert counts == sorted(counts)

    # The limit, too, counts those before a stop, here just before the last one.
    last = 20 - len(counts) + counts.index(counts[-1])
    train(warm_starter, tmp_path / "few", *settings, f"schedule.steps={last}")
    limit = f"data.max_unreadable_fraction={(counts[-1] - 0.5) / (8 * (last + 1))}"
    with pytest.raises(
        AssertionError, match=f"{counts[-1]:.0f} samples could not be read, more"
    ):
        train(warm_starter, tmp_path / "few", *settings, limit)
