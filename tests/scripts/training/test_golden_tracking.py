"""What MLflow, TensorBoard and W&B have of a run: each step once, with the journal's values."""

import json
import sqlite3
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from launch.comparison.sync import sync as compare_sync
from tests.support.golden import Golden
from tests.support.ranks.fault_runs import fault
from tests.support.ranks.warm_ranks import WarmStarter
from tests.support.runs import run

pytestmark = pytest.mark.distributed

SETTINGS = (
    *("schedule.steps=8", "tracking.log_every_steps=2", "checkpoint.every_steps=3"),
    *(
        "tracking.system_metrics=false",
        "evaluate=[{name: classification, every_steps: 4}]",
    ),
)
POINTS = "training/mlflow_points.json"


@pytest.fixture
def folder(mlflow_database: Path) -> Path:
    return mlflow_database.parent


def train(starter: WarmStarter, folder: Path, *more: str, **how) -> None:
    more = (*SETTINGS, f"tracking.uri=sqlite:///{folder / 'mlflow.db'}", *more)
    run(starter, "pretrain/main.py", folder, *more, num_ranks=2, **how)


def sync(folder: Path, to: str = "mlflow") -> None:
    """A training waits for MLflow only so long; what is left at its end is sent here."""
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    compare_sync([str(folder / "run"), "--uri", uri, "--to", to])


def tensorboard_points(folder: Path) -> list[tuple[str, int, float]]:
    events = EventAccumulator(str(folder / "run/tensorboard")).Reload()
    return [
        (key, p.step, p.value)
        for key in events.Tags()["scalars"]
        for p in events.Scalars(key)
    ]


def wandb_points(file: Path) -> list[tuple[str, int, float]]:
    """What `wandb sync` would upload. Its records are in a log of LevelDB."""
    data = file.read_bytes()
    at = 7
    record = b""
    points = []
    while at < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            history = Record.FromString(record).history
            record = b""
            points += [
                (
                    each.nested_key[0],
                    history.step.num,
                    float(json.loads(each.value_json)),
                )
                for each in history.item
                if each.nested_key[0][0] != "_"
            ]
        if -at % 32768 < 7:  # the rest of a block
            at += -at % 32768
    return points


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / "mlflow.db") as connection:
        return connection.execute(sql).fetchall()


def points(folder: Path) -> list[tuple[str, int, float]]:
    """All but those about speed and memory, which a repeated step measures anew."""
    sql = "select key, step, value from metrics where key not like 'vitals/%' order by key, step"
    return query(folder, sql)


def journal_points(folder: Path) -> set[tuple[str, int, float]]:
    rows = map(json.loads, (folder / "run/journal.jsonl").read_text().splitlines())
    return {
        (key, row["step"], value)
        for row in rows
        for key, value in row.items()
        if key not in ("step", "time") and not key.startswith("vitals/")
    }


def test_a_killed_and_resumed_run_is_one_run_with_each_step_once(
    warm_starter: WarmStarter, folder, golden: Golden
):
    """Killed in step 6, resumed at step 3; the points of step 4 are in MLflow already."""
    also = "tracking.also=[tensorboard,wandb]"
    train(
        warm_starter, folder, also, faults={1: [fault("backward", 12, "lag and kill")]}
    )
    train(warm_starter, folder, also)
    sync(folder)
    assert query(folder, "select name, status from runs") == [("tiny", "FINISHED")]
    found = points(folder)
    written = journal_points(folder)
    assert len({(key, step) for key, step, _ in found}) == len(found)

    # Counts of events are sent from the first event on.
    assert not set(found) - written
    assert not {point for point in written - set(found) if point[2]}
    golden.json(POINTS, found, rel=1e-5)

    # The last start wrote the whole run, as W&B's resume would append it.
    *_, last = sorted((folder / "run/wandb").glob("offline-run-*/*.wandb"))
    in_wandb = [
        each for each in wandb_points(last) if not each[0].startswith("vitals/")
    ]
    assert sorted(in_wandb) == sorted(written)
    before = tensorboard_points(folder)
    sync(folder, to="tensorboard")
    in_tensorboard = [each for each in before if not each[0].startswith("vitals/")]
    in_fp32 = [(key, step, float(np.float32(value))) for key, step, value in written]
    assert sorted(in_tensorboard) == sorted(in_fp32)
    assert tensorboard_points(folder) == before
