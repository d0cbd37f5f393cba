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
from tests.support.ranks.fault_runs import fault
from tests.support.ranks.run_states import journal_rows
from tests.support.ranks.warm_ranks import WarmStarter
from tests.support.runs import run

pytestmark = pytest.mark.distributed

SETTINGS = (
    # Log lines, saves and evaluations fall on different steps.
    "schedule.steps=8",
    "tracking.log_every_steps=2",
    "checkpoint.every_steps=3",
    "evaluate=[{name: classification, every_steps: 4}]",
    # MLflow samples them by the clock.
    "tracking.system_metrics=false",
)
POINTS = "training/mlflow_points.json"


@pytest.fixture
def folder(mlflow_database) -> Path:
    return mlflow_database.parent


def train(starter: WarmStarter, folder: Path, *more: str, **how):
    more = (*SETTINGS, f"tracking.uri=sqlite:///{folder / 'mlflow.db'}", *more)
    run(starter, "pretrain/main.py", folder, *more, num_ranks=2, **how)


def sync(folder: Path, to: str = "mlflow"):
    """A training waits for MLflow only so long; what is left at its end is sent here."""
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    compare_sync([str(folder / "run"), "--uri", uri, "--to", to])


def tensorboard_points(folder: Path) -> list[tuple[str, int, float]]:
    # TensorBoard's own reader, which shows what its page would show.
    events = EventAccumulator(str(folder / "run/tensorboard")).Reload()
    read = []
    for key in events.Tags()["scalars"]:
        read += [(key, point.step, point.value) for point in events.Scalars(key)]
    return read


def wandb_points(file: Path) -> list[tuple[str, int, float]]:
    """What `wandb sync` would upload. Its records are in a log of LevelDB."""
    data = file.read_bytes()
    # After a header of W&B: parts, each with a checksum, its length and its kind before it.
    at = 7
    record = b""
    read = []
    while at < len(data):
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += 7
        record += data[at : at + length]
        at += length
        if kind in (1, 4):  # whole, or the last part
            history = Record.FromString(record).history
            record = b""
            for item in history.item:
                key = item.nested_key[0]
                # W&B's own values: _step, _runtime, _timestamp.
                if not key.startswith("_"):
                    value = float(json.loads(item.value_json))
                    read.append((key, history.step.num, value))
        if -at % 32768 < 7:  # the rest of a block
            at += -at % 32768
    return read


def query(folder: Path, sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(folder / "mlflow.db") as connection:
        return connection.execute(sql).fetchall()


def points(folder: Path) -> list[tuple[str, int, float]]:
    """All but those about speed and memory, which a repeated step measures anew."""
    sql = "select key, step, value from metrics where key not like 'vitals/%' order by key, step"
    return query(folder, sql)


def journal_points(folder: Path) -> set[tuple[str, int, float]]:
    points = set()
    for row in journal_rows(folder / "run"):
        step = row.pop("step")
        points |= {(key, step, value) for key, value in row.items()}
    return points


def test_a_killed_and_resumed_run_is_one_run_with_each_step_once(
    warm_starter, folder, golden
):
    """Killed in step 6, resumed at step 3; the points of step 4 are in MLflow already."""
    also = "tracking.also=[tensorboard,wandb]"
    killed = {1: [fault("backward", 12, "lag and kill")]}
    train(warm_starter, folder, also, faults=killed)
    train(warm_starter, folder, also)
    sync(folder)
    assert query(folder, "select name, status from runs") == [("tiny", "FINISHED")]
    in_mlflow = points(folder)
    written = journal_points(folder)
    assert len({(key, step) for key, step, _ in in_mlflow}) == len(in_mlflow)

    # Counts of events are sent from the first event on.
    assert not {*in_mlflow} - written
    assert not {point for point in written - {*in_mlflow} if point[2]}
    golden.json(POINTS, in_mlflow, rel=1e-5)

    # The last start wrote the whole run, as W&B's resume would append it.
    *_, last = sorted((folder / "run/wandb").glob("offline-run-*/*.wandb"))
    assert without_vitals(wandb_points(last)) == sorted(written)

    # A repeat adds nothing to what TensorBoard has, in fp32, from the training itself.
    before = tensorboard_points(folder)
    sync(folder, to="tensorboard")
    in_fp32 = [(key, step, float(np.float32(value))) for key, step, value in written]
    assert without_vitals(before) == sorted(in_fp32)
    assert tensorboard_points(folder) == before


def without_vitals(
    points: list[tuple[str, int, float]],
) -> list[tuple[str, int, float]]:
    return sorted(point for point in points if not point[0].startswith("vitals/"))
