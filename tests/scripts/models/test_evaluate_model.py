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

# Those on features, with a bank of training images that does not hold all of them.
BANK = "{name: knn, k: 7, also_k: [100], max_bank_images: 300}, {name: few_shot, shots: [1, 5]}"
LINEAR = "name: linear_heads, steps: 40, batch: 64, learning_rates: [0.001, 0.1]"
FEATURES = f"{BANK}, {{{LINEAR}}}"
BLOCKS = f"{BANK}, {{{LINEAR}, inputs: blocks}}"
LOGITS = "{name: classification}, {name: confusion}"
FILES = {"calibration.csv", "confusion.csv", "per_class.csv", "predictions.png"}
# Steps enough to move the weights; without what is random in a forward pass.
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
    script = [
        ROOT / "finetune/evaluate_model.py",
        f"init={init}",
        f"output={folder / 'out'}",
        "compute.device=cpu",
        "data.num_workers=0",
        "tracking.uri=null",
    ]
    ranks = runs.starter.start(script, num_ranks=num_ranks, folder=folder)
    assert set(wait_all(ranks)) == {0}, ranks[0].output()
    return ranks[0].output()


@pytest.fixture(scope="module")
def supervised(fault_runs, tmp_path_factory) -> Path:
    """With an average of the weights."""
    words = ("engine.zero_stage=3", "model.representation_layer=true")
    folder = tmp_path_factory.mktemp("supervised")
    return train(fault_runs, folder, f"{LOGITS}, {BLOCKS}", *words)


def check_outside(run: Path, folder: Path, *, prefix: str) -> dict[str, float]:
    """The results outside are those that the training logged; returns them."""
    logged = {}
    for row in journal_rows(run):
        for name, value in row.items():
            metric = name.removeprefix(prefix)
            if metric != name:
                # Evaluated once, at the end.
                assert metric not in logged
                logged[metric] = value
    stored = json.loads((folder / "out/results.json").read_text())
    assert stored["data"]["images"] == 360
    outside = {row["metric"]: row["value"] for row in stored["results"]}
    # k-NN twice, few-shot twice with their spread, and linear heads with theirs.
    assert len(outside) >= 2 + 4 + 4
    # In the same order, too, in which tables show them.
    assert [*outside] == [*logged]
    for name, value in logged.items():
        assert value == pytest.approx(outside[name], abs=TOLERANCE), name
    return outside


# Each objective has modules of its own that an evaluation leaves out; ZeRO 3 gathers the weights.
@rows("[[name, stage], [mae, 0], [mae, 3], [masked, 3], [distillation, 3]]")
def test_features_in_training_equal_those_outside(
    fault_runs, supervised, tmp_path, name, stage
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


def test_the_average_is_the_same_on_one_rank_and_two(fault_runs, supervised, tmp_path):
    """Files agree with the table, and count every image once; the training writes the same."""
    tables = []
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        printed = evaluate_run(fault_runs, folder, supervised, num_ranks=num_ranks)
        metrics = check_outside(supervised, folder, prefix="val/ema_")
        # The table is what follows the first empty line; it names the output.
        tables.append(printed.partition("\n\n")[2].replace("/1/", "/2/"))
    assert tables[0] == tables[1]
    assert "95 % interval" in tables[0]
    for files in (tmp_path / "2/out/evaluation", supervised / "evaluation/ema"):
        assert {path.name for path in files.iterdir()} == FILES
        images = Counter[str]()
        right = Counter[str]()
        for row in rows_of(files / "confusion.csv"):
            num = int(row["images"])
            images[row["class"]] += num
            if row["class"] == row["predicted"]:
                right[row["class"]] += num
        # 360 is no multiple of the batches of two ranks: what pads them must not count.
        assert images.total() == 360
        assert right.total() / 360 == pytest.approx(metrics["top1"], abs=TOLERANCE)
        for row in rows_of(files / "per_class.csv"):
            name = row["class"]
            assert int(row["images"]) == images[name]
            assert int(row["correct"]) == right[name]
