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
from tests.support.ranks.fault_runs import fault
from tests.support.ranks.thread_ranks import run_ranks
from tests.support.ranks.warm_ranks import WarmStarter
from tests.support.runs import CURVES, MIXED, REL, SHARDS, TINY, journal, run
from tests.support.tables import every, rows
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
# In step 13, with two micro-batches a step on each of two ranks.
KILLED = fault("backward", 26, "lag and kill")
# In step 16: one rank has four a step, and its first step is 11.
STOPPED = fault("backward", 21, "SIGTERM")


@pytest.fixture(scope="module")
def stored(golden, warm_starter, tmp_path_factory) -> Path:
    def make(path):
        folder = tmp_path_factory.mktemp("made")
        train(warm_starter, folder, num_ranks=2, faults={1: [KILLED]})
        zero = "engine.zero_stage=0"
        train(warm_starter, folder, zero, faults={0: [STOPPED]})

        # Without what differs on the next machine: its name, its paths and its versions.
        made = folder / "run"
        path.mkdir()
        for name in ("journal.jsonl", "classes.json"):
            shutil.copy(made / name, path)
        shutil.copytree(made / "checkpoints", path / "checkpoints")
        (path / "events").mkdir()
        (events,) = (made / "events").iterdir()
        text = events.read_text().replace(socket.gethostname(), "node1")
        (path / "events/node1.jsonl").write_text(text)
        values = TINY | {"stage": "pretrain", "name": "golden"}
        values["data"] = values["data"] | {"path": "shards"}
        (path / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        for step_folder in step_folders(path / "checkpoints"):
            drop_facts_of_this_machine(step_folder / MANIFEST)

    return golden.folder("training/run", make)


def drop_facts_of_this_machine(path: Path):
    """Keep what a resume needs in the description of a checkpoint."""
    manifest = read_manifest(path)
    # It is written with the manifest, which is the version of this code.
    del manifest["format_version"]
    description = manifest.pop("description").items()
    kept = {key: value for key, value in description if value is not None}
    path.write_text(manifest_text(**manifest, description=kept))


def train(starter: WarmStarter, folder: Path, *settings: str, **how) -> str:
    return run(starter, "pretrain/main.py", folder, *SETTINGS, *settings, **how)


def test_it_is_read(stored):
    checkpoint, complaints = newest_checkpoint(stored / "checkpoints")
    assert complaints == []
    assert checkpoint.step == 16
    assert checkpoint.progress["samples_seen"] == 16 * 8
    names = [path.name for path in step_folders(stored / "checkpoints")]
    assert names == ["step-00000016", "step-00000010"]

    # Steps 11 and 12 were trained twice, and are in the journal once.
    assert journal(stored, "step")["step"] == [*range(1, 17)]
    events = [row["event"] for row in read_events(stored)]
    assert events == ["started", "failed", "started"]
    start = read_start(stored)
    assert start.first_step == 10
    assert start.total_steps == 20
    failure = cause(read_failures(stored))
    assert failure.rank == 1
    assert failure.step == 12


# The same layout, fewer ranks, and more ranks at the stage that divides all.
@rows("""
- [step, layout, num_ranks]
- [10, engine.zero_stage=1, 2]
- [10, engine.zero_stage=0, 1]
- [16, engine.zero_stage=3, 2]
""")
def test_it_resumes_with_the_golden_losses(
    stored, golden, warm_starter, tmp_path, step, layout, num_ranks
):
    folder = tmp_path / "run"
    shutil.copytree(stored, folder)
    if step == 10:
        shutil.rmtree(folder / "checkpoints/step-00000016")
    printed = train(warm_starter, tmp_path, layout, num_ranks=num_ranks)
    assert f"resuming {folder} at step {step}\n" in printed
    # The curves of test_golden_curves, which no one interrupts.
    curves = journal(folder, *CURVES)
    golden.json("training/curves/supervised.json", curves, rel=REL)


@every(step="10, 16")
def test_it_predicts(stored, golden, warm_starter, tmp_path, step):
    # The older one was written by two ranks, as slices; the newer one by one.
    run(
        warm_starter,
        "finetune/predict.py",
        tmp_path,
        f"init={stored}/checkpoints/step-{step:08d}",
        str(SHARDS),
        "output=predicted.parquet",
        "num_workers=0",
        "compute.device=cpu",
    )
    rows = pq.read_table(tmp_path / "predicted.parquet").to_pylist()
    golden.json(f"training/predictions/step_{step}.json", rows, rel=REL)


# Fewer ranks than files, as many, and more; a checkpoint, and a run, whose newest one is opened.
@every(num_ranks="1, 2, 5", path="checkpoints/step-00000010, ''")
def test_ranks_that_open_it_share_its_verification(
    stored, monkeypatch, num_ranks, path
):
    """Each file is hashed once, by one of them: it has more than the model that all read."""
    init = str(stored / path)
    files = stored / (path or "checkpoints/step-00000016")
    expected = open_model(init).network.state_dict()
    hashed = []
    blake3_of_file = folders.blake3_of_file

    def counted(path, **how):
        hashed.append(path)
        return blake3_of_file(path, **how)

    # Ranks are threads here, each with an exchange of its own.
    of_thread = local()
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

    models = run_ranks(num_ranks, work)
    assert sorted(hashed) == sorted(files.glob("*.safetensors"))
    for model in models:
        tensors = model.network.state_dict()
        assert all(tensors[name].equal(value) for name, value in expected.items())

    # One that sees no such folder: all of them end, with its error.
    if path:  # the folders in a run are those of rank 0
        (message,) = {*run_ranks(num_ranks, partial(work, blind=num_ranks - 1))}
        assert "nowhere" in message


@pytest.mark.slow
def test_replaced_samples_are_counted_since_step_0(warm_starter, tmp_path):
    """A run that two ranks began and one resumed has the numbers of one that was not stopped."""
    # Two images whose headers are overwritten: the loader takes another one in their place.
    shards = shutil.copytree(SHARDS, tmp_path / "shards")
    index = read_split(shards, split="train")
    for sample in (1, 5):
        place = index.locate(sample)
        with open(place.tar, "r+b") as file:
            file.seek(place.offset)
            file.write(b"\xff" * 60)
    settings = (f"data.path={shards}", "data.max_unreadable_fraction=1")

    parts = tmp_path / "parts"
    train(warm_starter, tmp_path / "whole", *settings)
    train(warm_starter, parts, *settings, num_ranks=2, faults={1: [KILLED]})
    train(warm_starter, parts, *settings)
    rows = journal(tmp_path / "whole/run", "step", "vitals/unreadable")
    assert journal(parts / "run", "step", "vitals/unreadable") == rows
    counts = rows["vitals/unreadable"]
    total = counts[-1]
    assert total > 4
    assert counts == sorted(counts)

    # The limit, too, counts those before a stop, here just before the last one.
    few = tmp_path / "few"
    last = 20 - len(counts) + counts.index(total)
    train(warm_starter, few, *settings, f"schedule.steps={last}")
    # Half a sample less than there will be, of all that are seen by then.
    limit = f"data.max_unreadable_fraction={(total - 0.5) / (8 * (last + 1))}"
    message = f"{total:.0f} samples could not be read, more"
    with pytest.raises(AssertionError, match=message):
        train(warm_starter, few, *settings, limit)
