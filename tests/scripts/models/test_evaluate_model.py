"""Evaluations give equal metrics and files in training and outside, on one rank and on two."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.support.ranks.fault_runs import FaultRuns, output, wait_all
from tests.support.ranks.run_states import journal_rows
from tests.support.tables import rows
from tests.support.waiting import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

BANK = "{name: knn, k: 7, also_k: [100], max_bank_images: 300}, {name: few_shot, shots: [1, 5]}"
LINEAR = "name: linear_heads, steps: 40, batch: 64, learning_rates: [0.001, 0.1]"
FEATURES = f"{BANK}, {{{LINEAR}}}"
BLOCKS = f"{BANK}, {{{LINEAR}, inputs: blocks}}"
LOGITS = "{name: classification}, {name: confusion}"
FILES = {"calibration.csv", "confusion.csv", "per_class.csv", "predictions.png"}
SHORT = """
    data.num_workers=0 data.mixing=null model.depth=4 model.dropout=0 model.drop_path=0
    optim.lr=0.003 schedule.steps=6 schedule.warmup_steps=0
""".split()
OBJECTIVES = yaml.safe_load("""
mae:
  - "objective={name: mae, decoder_width: 16, decoder_depth: 1, decoder_heads: 2}"
  - model.positions=sincos2d_mae
masked: [objective.name=masked_patch_prediction]
distillation: [objective.name=distillation, model.distillation_token=true]
""")
# Two images of the 360.
TOLERANCE = 2 / 360 + 1e-9


def train(runs: FaultRuns, folder: Path, evaluate: str, *words: str) -> Path:
    words = (*SHORT, *words, f"evaluate=[{evaluate}]")
    assert runs.run(folder, *words) == [0, 0], output(folder)
    return folder / "run"


def evaluate_run(
    runs: FaultRuns, folder: Path, init: Path, *, num_ranks: int = 1
) -> str:
    """What rank 0 printed."""
    folder.mkdir(parents=True)
    words = (f"init={init}", f"output={folder / 'out'}", "compute.device=cpu")
    words += ("data.num_workers=0", "tracking.uri=null")
    script = [ROOT / "finetune/evaluate_model.py", *words]
    ranks = runs.starter.start(script, num_ranks=num_ranks, folder=folder)
    assert set(wait_all(ranks)) == {0}, ranks[0].output()
    return ranks[0].output()


@pytest.fixture(scope="module")
def supervised(fault_runs: FaultRuns, tmp_path_factory) -> Path:
    """With an average of the weights."""
    words = ("engine.zero_stage=3", "model.representation_layer=true")
    folder = tmp_path_factory.mktemp("supervised")
    return train(fault_runs, folder, f"{LOGITS}, {BLOCKS}", *words)


def check_outside(run: Path, folder: Path, *, prefix: str) -> dict[str, float]:
    """The results outside are those that the training logged; returns them."""
    logged = [each for row in journal_rows(run) for each in row.items()]
    of_weights = [
        (k.removeprefix(prefix), v) for k, v in logged if k.startswith(prefix)
    ]
    stored = json.loads((folder / "out/results.json").read_text())
    assert stored["data"]["images"] == 360
    outside = [(row["metric"], row["value"]) for row in stored["results"]]
    assert len(outside) >= 2 + 4 + 4
    for (name, value), (metric, found) in zip(of_weights, outside, strict=True):
        assert name == metric and value == pytest.approx(found, abs=TOLERANCE), name
    return dict(outside)


@rows("[[name, stage], [mae, 0], [mae, 3], [masked, 3], [distillation, 3]]")
def test_features_in_training_equal_those_outside(
    fault_runs: FaultRuns, supervised, tmp_path, name, stage
):
    evaluate = FEATURES
    words = (*OBJECTIVES[name], "optim.ema=null", f"engine.zero_stage={stage}")
    if name == "distillation":
        evaluate = BLOCKS
        words += (f"objective.teacher.weights={supervised}",)
    run = train(fault_runs, tmp_path / "a", evaluate, *words)
    evaluate_run(fault_runs, tmp_path / "b", run)
    check_outside(run, tmp_path / "b", prefix="val/")


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def test_the_average_is_the_same_on_one_rank_and_two(
    fault_runs: FaultRuns, supervised, tmp_path
):
    """Files agree with the table, and count every image once; the training writes the same."""
    tables = []
    for ranks in (1, 2):
        printed = evaluate_run(
            fault_runs, tmp_path / str(ranks), supervised, num_ranks=ranks
        )
        metrics = check_outside(supervised, tmp_path / str(ranks), prefix="val/ema_")
        tables.append(printed.partition("\n\n")[2].replace("/1/", "/2/"))
    assert tables[0] == tables[1]
    assert "95 % interval" in tables[0]
    for files in (tmp_path / "2/out/evaluation", supervised / "evaluation/ema"):
        assert {path.name for path in files.iterdir()} == FILES
        images = Counter[str]()
        right = Counter[str]()
        for row in rows_of(files / "confusion.csv"):
            images[row["class"]] += int(row["images"])
            right[row["class"]] += int(row["images"]) * (
                row["class"] == row["predicted"]
            )
        assert images.total() == 360
        assert right.total() / 360 == pytest.approx(metrics["top1"], abs=TOLERANCE)
        for row in rows_of(files / "per_class.csv"):
            name = row["class"]
            assert int(row["images"]) == images[name]
            assert int(row["correct"]) == right[name]
