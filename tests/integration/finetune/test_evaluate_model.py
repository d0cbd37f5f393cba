"""finetune/evaluate_model.py on a model trained here: the same numbers on one rank and on two."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.ranks.fault_runs import FaultRuns, wait_all
from tests.support.ranks.rank_processes import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

EVALUATIONS = "[{name: classification}, {name: confusion}]"
FILES = {"calibration.csv", "confusion.csv", "per_class.csv", "worst_classes.png"}


@pytest.fixture(scope="module")
def trained(fault_runs: FaultRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps that evaluates itself with `EVALUATIONS`."""
    folder = tmp_path_factory.mktemp("trained")
    steps = ("schedule.steps=3", "schedule.warmup_steps=0")
    assert fault_runs.run(folder, *steps, f"evaluate={EVALUATIONS}", num_ranks=2) == [0, 0]
    return folder / "run"


def evaluate(
    runs: FaultRuns, trained: Path, folder: Path, *settings: str, num_ranks: int
) -> tuple[list[int], str]:
    """Exit codes, and what rank 0 printed."""
    folder.mkdir()
    command = [ROOT / "finetune/evaluate_model.py", "--config", ROOT / "configs/eval/demo.yaml"]
    values = (f"init={trained}", f"data.path={runs.shards}", f"output={folder / 'out'}")
    more = (
        "tracking.uri=null",
        "compute.batch=50",
        "data.num_workers=1",
        f"evaluate={EVALUATIONS}",
    )
    ranks = runs.starter.start(
        [*command, *values, *more, *settings], num_ranks=num_ranks, folder=folder
    )
    return wait_all(ranks), ranks[0].output()


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def results_of(folder: Path) -> dict[str, dict[str, Any]]:
    stored = json.loads((folder / "out/results.json").read_text())
    assert stored["data"]["images"] == 360
    assert {row["image_size"] for row in stored["results"]} == {20}
    return {row["metric"]: row for row in stored["results"]}


def test_results_are_the_same_on_one_rank_and_two(
    fault_runs: FaultRuns, trained: Path, tmp_path: Path
) -> None:
    found, printed = {}, {}
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        codes, printed[num_ranks] = evaluate(
            fault_runs, trained, folder, "image_size=20", num_ranks=num_ranks
        )
        assert set(codes) == {0}, printed[num_ranks]
        found[num_ranks] = results_of(folder)
    assert found[1].keys() == found[2].keys() and len(found[1]) == 6
    for key, row in found[1].items():
        assert found[2][key]["value"] == pytest.approx(row["value"], abs=1e-6), key
    tables = [printed[num].partition("\n\n")[2].replace("/1/", "/2/") for num in (1, 2)]
    assert tables[0] == tables[1] and "95 % interval" in tables[0]
    files = tmp_path / "2/out/evaluation"
    assert {path.name for path in files.iterdir()} == FILES
    _check_files(files, found[2]["top1"], found[2]["class_mean_top1"])


def _check_files(files: Path, top1: dict[str, Any], class_mean: dict[str, Any]) -> None:
    """The files agree with the table, and count every image once."""
    images: dict[str, int] = defaultdict(int)
    right: dict[str, int] = defaultdict(int)
    for row in rows_of(files / "confusion.csv"):
        images[row["class"]] += int(row["images"])
        right[row["class"]] += int(row["images"]) * (row["class"] == row["predicted"])
    assert sum(images.values()) == top1["images"] == 360
    assert sum(right.values()) / 360 == pytest.approx(top1["value"])
    shares = [right[name] / images[name] for name in images]
    assert sum(shares) / len(shares) == pytest.approx(class_mean["value"])
    for row in rows_of(files / "per_class.csv"):
        assert (int(row["images"]), int(row["correct"])) == (
            images[row["class"]],
            right[row["class"]],
        )


def test_a_training_writes_the_same_files(trained: Path) -> None:
    for files in (trained / "evaluation", trained / "evaluation/ema"):
        assert {path.name for path in files.iterdir()} - {"ema"} == FILES
        assert sum(int(row["images"]) for row in rows_of(files / "confusion.csv")) == 360


def test_bad_input_is_one_error_before_any_work(
    fault_runs: FaultRuns, trained: Path, tmp_path: Path
) -> None:
    classes = [str(number) for number in (1, 0, *range(2, 10))]
    shards = {}
    for name, labels in (("few", classes[:2]), ("swapped", classes)):
        shards[name] = write_shard_folder(
            tmp_path / name, num_per_class=1, num_shards=1, classes=labels, split="val"
        )
    cases = {
        "few": ("2 classes", "head has 10"),
        "swapped": ("in another order", "label 0 is '1' here and '0' in the model"),
    }
    for name, parts in cases.items():
        codes, printed = evaluate(
            fault_runs,
            trained,
            tmp_path / f"of-{name}",
            *(f"data.path={shards[name]}", "data.val_split=val"),
            num_ranks=2,
        )
        assert codes == [2, 2] and all(part in printed for part in parts), printed
        assert not (tmp_path / f"of-{name}/out").exists()
    codes, printed = evaluate(
        fault_runs, trained, tmp_path / "into", f"output={trained}", num_ranks=1
    )
    assert codes == [2] and "is the run folder of a training" in printed
