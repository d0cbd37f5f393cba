"""A trained run is exported, loaded by other libraries, and predicts on any number of ranks."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.corpora.photographs import jpeg, photograph
from tests.support.ranks.fault_runs import FaultRuns, wait_all
from tests.support.ranks.warm_ranks import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

RUN = {
    "base": str(ROOT / "configs/digits/finetune.yaml"),
    "model": {"width": 24, "depth": 2, "mlp_width": 48, "drop_path": 0.0, "head_std": 0.01},
    "engine": {"device": "cpu", "num_threads": 1, "zero_stage": 0, "max_micro_batch": 16},
    "schedule": {"steps": 6, "warmup_steps": 1},
    "checkpoint": {"every_steps": 6},
    "evaluate": [{"name": "classification"}],
    "tracking": {"uri": None, "log_every_steps": 3},
}


@pytest.fixture(scope="module")
def trained(fault_runs: FaultRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    data = {"path": str(fault_runs.shards), "num_workers": 0}
    values = {**RUN, "output": str(folder / "run"), "data": data}
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    command: list[str | Path] = [ROOT / "finetune/main.py", "--config", folder / "run.yaml"]
    ranks = fault_runs.starter.start(command, num_ranks=1, folder=folder)
    assert set(wait_all(ranks)) == {0}, ranks[0].output()
    return folder / "run"


def predict(
    fault_runs: FaultRuns, folder: Path, *words: str | Path, num_ranks: int = 1, code: int = 0
) -> str:
    command: list[str | Path] = [ROOT / "finetune/predict.py", "compute.device=cpu", *words]
    folder.mkdir(exist_ok=True)
    ranks = fault_runs.starter.start(command, num_ranks=num_ranks, folder=folder)
    assert set(wait_all(ranks)) == {code}, ranks[0].output()
    return ranks[0].output()


def test_predictions_do_not_depend_on_ranks(
    fault_runs: FaultRuns, trained: Path, tmp_path: Path
) -> None:
    """Top-1 is that of the run's own evaluation."""
    for ranks in (1, 2):
        table = tmp_path / f"{ranks}.csv"
        words = (f"init={trained}", f"output={table}", fault_runs.shards, "num_workers=1")
        said = predict(fault_runs, tmp_path / str(ranks), *words, num_ranks=ranks)
        assert "360 images, 0 of them unreadable" in said
    rows = [list(csv.DictReader(open(tmp_path / f"{ranks}.csv"))) for ranks in (1, 2)]
    assert [row["image"] for row in rows[0]] == [row["image"] for row in rows[1]]
    for name in ("label", "class_1", "class_5"):
        assert [row[name] for row in rows[0]] == [row[name] for row in rows[1]]
    lines = [json.loads(line) for line in open(trained / "journal.jsonl")]
    top1 = [line["val/top1"] for line in lines if "val/top1" in line][-1]
    assert np.mean([row["label"] == row["class_1"] for row in rows[1]]) == pytest.approx(top1)


def test_unreadable_images_do_not_end_the_command(
    fault_runs: FaultRuns, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "in/below").mkdir(parents=True)
    for name in ("a.jpg", "below/b.jpg", "below/d.jpg"):
        (tmp_path / "in" / name).write_bytes(jpeg(photograph(60, 40)))
    (tmp_path / "in/below/c.jpg").write_bytes(b"\xff\xd8\xff no image")
    output = tmp_path / "out/table.parquet"
    words = (f"init={trained}", tmp_path / "in", f"output={output}", "top=2")
    said = predict(fault_runs, tmp_path / "1", *words, num_ranks=2)
    assert "4 images, 1 of them unreadable" in said
    rows = pq.read_table(output).to_pylist()
    names = ["a.jpg", "below/b.jpg", "below/c.jpg", "below/d.jpg"]
    assert [row["image"] for row in rows] == [str(tmp_path / "in" / name) for name in names]
    assert [row["error"] is None for row in rows] == [True, True, False, True]
    assert rows[0]["class_1"] == rows[1]["class_1"] and rows[2]["class_1"] is None
    assert [path.name for path in output.parent.iterdir()] == ["table.parquet"]
    printed = predict(fault_runs, tmp_path / "2", *words[:2])
    assert "c.jpg: cannot be read" in printed
    assert printed.count("%") == 15
    bad = f"output={tmp_path}/in/a.jpg/table.csv"
    printed = predict(fault_runs, tmp_path / "3", *words[:2], bad, code=2)
    assert f"{bad}: cannot be written" in printed and "Traceback" not in printed
