"""A model is evaluated and predicts on the images and classes that are its own, or says why not."""

import csv
import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from pydantic import ValidationError

from finetune.evaluating import (
    as_rows,
    evaluate_run,
    log_model,
    open_tracker,
    splits,
    write_results,
)
from finetune.exporting.to_huggingface import HuggingFaceFormat
from finetune.exporting.to_vitscale import SafetensorsFormat
from finetune.predicting import find_inputs, predict_images
from finetune.settings import EvaluateRun, PredictRun, settings_of_run
from tests.support.corpora.shard_folders import make_shard_folder, write_shard_folder
from tests.support.engine.small_models import small_model
from tests.support.engine.subjects import WORLD
from tests.support.tables import Values, every, refused, rows
from vitscale.config.errors import UserError
from vitscale.config.loader import load_run
from vitscale.data.index import read_split, sample_keys
from vitscale.evaluation.evaluation import Share
from vitscale.evaluation.few_shot import FewShotSettings
from vitscale.evaluation.trained_model import open_model
from vitscale.tracking.settings import TrackingSettings
from vitscale.tracking.tracker import Tracker

# Metrics are sums over the ranks of a group; here it has one.
pytestmark = pytest.mark.usefixtures("world")

CLASSES = ("cat", "dog", "eel")
PROBES, LOGITS = yaml.safe_load("""
- [{name: knn, k: 3}, {name: few_shot, shots: [2]}, {name: linear_heads, steps: 2, batch: 4}]
- [{name: classification}, {name: confusion}, {name: subset}]
""")


def keys_of(numbers, split):
    return [f"{split}-c{int(number) % 3}-{number}" for number in numbers.split()]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Sample i of a split is of class i modulo three; keys are SPLIT-cLABEL-I."""
    folder = tmp_path_factory.mktemp("shards") / "animals"
    lengths = {"train": (9, 9), "test": (6,)}
    make_shard_folder(folder, lengths=lengths, classes=CLASSES)
    return folder


@pytest.fixture(scope="module")
def mixed_in(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards") / "more"
    lengths = {"train": (3,), "test": (3,)}
    make_shard_folder(folder, lengths=lengths, classes=CLASSES)
    return folder


def animals():
    return small_model(num_classes=3, classes=CLASSES)


def saved(folder, model):
    """A folder as an export writes it, without its check."""
    folder.mkdir()
    SafetensorsFormat().write(model, folder)
    return folder


def evaluation(init, shards, evaluate, **data):
    values = yaml.safe_load(
        "{name: x, tracking: {uri: null}, compute: {device: cpu, batch: 4}}"
    )
    values |= {
        "init": str(init),
        "output": f"{init}-results",
        "evaluate": evaluate,
    }
    values["data"] = {
        "path": str(shards),
        "num_workers": 0,
        **data,
    }
    return EvaluateRun.model_validate(values)


def results(run):
    evaluate_run(run, WORLD)
    stored = json.loads((Path(run.folder) / "results.json").read_text())
    return {row["metric"]: row["value"] for row in stored["results"]}


# ---- classes -------------------------------------------------------------------------------------


def reordered(model, order):
    """Weights of the same model whose output i is that of class order[i]."""
    weights = dict(model.network.state_dict())
    for name in ("head.weight", "head.bias"):
        weights[name] = weights[name][order]
    return weights


def test_classes_in_another_order_give_the_same_metrics(shards, tmp_path, capsys):
    model = animals()
    expected = results(evaluation(saved(tmp_path / "same", model), shards, LOGITS))
    # Without a difference there is nothing to say.
    assert "matched by" not in capsys.readouterr().out

    other = small_model(num_classes=3, classes=("eel", "cat", "dog"))
    other.network.load_state_dict(reordered(model, [2, 0, 1]))
    metrics = results(evaluation(saved(tmp_path / "other", other), shards, LOGITS))
    assert metrics == pytest.approx(expected)
    assert 0 < expected["loss"]
    assert "the classes of model and shards: matched by name" in capsys.readouterr().out

    # Files have the order of the shards' classes, too, so that tables of models can be compared.
    table = tmp_path / "other-results/evaluation/per_class.csv"
    rows = csv.DictReader(table.open())
    assert [row["class"] for row in rows] == list(CLASSES)


LINEAR: Values = yaml.safe_load(
    "{name: linear_heads, steps: 60, batch: 8, learning_rates: [0.0001, 0.3]}"
)


# Models whose features have other forms: a class token, means of patches, no head at all, a layer
# before the head.
@rows("""
- [settings]
- [{}]
- [{pool: gap}]
- [{pool: cls_mean, pool_norm: false}]
- [{num_classes: 0}]
- [{representation_layer: true}]
""")
def test_a_linear_probe_leaves_a_model(shards, tmp_path, settings):
    """Of other classes and pixels than the shards': with its new head it predicts as measured."""
    pixels = {"mean": (0.4, 0.5, 0.6), "eval_resize": "center_crop"}
    model = small_model(**{"num_classes": 7, "preprocessing": pixels, **settings})
    init = saved(tmp_path / "init", model)
    run = evaluation(
        init,
        shards,
        [LINEAR, {"name": "knn", "k": 3}],
        train_split="test",  # six images teach 18
        val_split="train",
    )
    expected = results(run)

    # The new model has the shards' classes, and what the first one expects of its pixels.
    folder = Path(run.folder) / "evaluation/linear_model"
    opened = open_model(str(folder))
    assert opened.classes == CLASSES
    assert opened.preprocessing == model.preprocessing

    # It is evaluated as any other model, on its own logits.
    again = evaluation(folder, shards, LOGITS[:1], val_split="train")
    metrics = results(again.model_copy(update={"output": str(tmp_path / "again")}))
    assert metrics["top1"] == pytest.approx(expected["linear_top1"], abs=1e-9)
    assert 0 < metrics["top1"] < 1

    # The probe trained a head alone.
    trunk = {k: v for k, v in model.network.state_dict().items() if "head" not in k}
    opened_weights = opened.network.state_dict()
    assert all(
        torch.equal(value, opened_weights[name]) for name, value in trunk.items()
    )


def test_no_model_is_left_where_no_single_head_saw_the_features(
    shards, tmp_path, capsys
):
    # Two heads, of which the probe replaces none.
    distilled = small_model(distillation_token=True, depth=4)
    results(evaluation(saved(tmp_path / "a", distilled), shards, [LINEAR]))

    # Features of four blocks, which no head of a ViT sees.
    plain = saved(tmp_path / "b", small_model(depth=4))
    results(evaluation(plain, shards, [LINEAR | {"inputs": "blocks"}]))
    assert not list(tmp_path.rglob("linear_model"))
    assert "linear head" not in capsys.readouterr().out


# No names; a class that the model lacks; names that say nothing; one class too many.
@rows("""
- [classes, message]
- [null, "outputs are unknown.*'cat'.*classes.json"]
- [[cat, dog, fox], "1 of 3 classes are none of the model's 3.*'eel'.*subset"]
- [["0", "1", "2"], "3 of 3 classes are none.*'cat'"]
- [[cat, dog, eel, fox], "3 classes, but the model's head has 4.*subset"]
""")
def test_other_classes_are_neither_evaluated_nor_counted(
    shards, tmp_path, classes, message
):
    num_classes = len(classes or CLASSES)
    model = small_model(num_classes=num_classes, classes=classes and tuple(classes))
    folder = saved(tmp_path / "model", model)
    for evaluate in LOGITS[:2]:
        with refused(f"(?s){message}"):
            evaluate_run(evaluation(folder, shards, [evaluate]), WORLD)

    # A prediction of one more class is wrong, and may be counted.
    has_accuracy = num_classes == 4
    lines, _ = predicted(folder, shards, tmp_path)
    assert any(line.startswith("top-1") for line in lines) == has_accuracy
    assert any("no accuracy: " in line for line in lines) != has_accuracy


def predicted(model, shards, folder):
    """Lines, the last one of an error, and rows of the table. The last batch is not full."""
    output = folder / "predictions.csv"
    run = PredictRun.model_validate(
        {
            "init": str(model),
            "images": [str(shards)],
            "num_workers": 0,
            "output": str(output),
            "top": 2,
            "compute": {"batch": 4},
        }
    )
    opened = open_model(str(model))
    lines = []
    try:
        # One by one: lines before an error must not be lost.
        for line in predict_images(run, opened, find_inputs(run), WORLD):
            lines.append(line)
    except UserError as error:
        lines.append(error.what)

    # An error may come before any row.
    if not output.exists():
        return lines, []
    return lines, list(csv.DictReader(output.open()))


def num_right(rows):
    return sum(row["label"] == row["class_1"] for row in rows)


def test_predictions_meet_labels_whatever_their_order(shards, tmp_path):
    model = animals()
    lines, rows = predicted(saved(tmp_path / "same", model), shards, tmp_path)
    assert lines[1] == f"top-1 {num_right(rows) / 6:.2%} of 6 images with a label"

    # The same model with its outputs in another order says the same of every image.
    other = small_model(num_classes=3, classes=("eel", "cat", "dog"))
    other.network.load_state_dict(reordered(model, [2, 0, 1]))
    folder = saved(tmp_path / "other", other)
    lines_of_other, rows_of_other = predicted(folder, shards, tmp_path)
    assert lines_of_other == lines
    for row, expected in zip(rows_of_other, rows, strict=True):
        assert row["class_1"] == expected["class_1"]
        share = float(expected["p_1"])
        assert float(row["p_1"]) == pytest.approx(share, rel=1e-5)


def test_images_that_cannot_be_read_are_neither_right_nor_wrong(shards, tmp_path):
    """The first four of six are damaged in their shard: one part has no readable image at all."""
    damaged = Path(shutil.copytree(shards, tmp_path / "damaged"))
    index = read_split(str(damaged), split="test")
    for number in range(4):
        place = index.locate(number)
        with open(place.tar, "r+b") as file:
            file.seek(place.offset)
            file.write(bytes(place.length))

    # Each image has a row, with a class or with an error.
    lines, rows = predicted(saved(tmp_path / "model", animals()), damaged, tmp_path)
    assert [row["image"] for row in rows] == keys_of("0 1 2 3 4 5", "test")
    assert [row["label"] for row in rows] == [*CLASSES, *CLASSES]
    for row in rows:
        assert bool(row["error"]) != bool(row["class_1"])
    assert lines[0].endswith(": 6 images, 4 of them unreadable")
    assert lines[1] == f"top-1 {num_right(rows) / 2:.2%} of 2 images with a label"

    # Three are named: thousands would hide all other lines.
    named = [line.split(": ")[1] for line in lines[2:5]]
    assert named == keys_of("0 1 2", "test")
    # The last one is an error, so that the command's exit code is 2.
    more = "... 1 more, with the reason in column error"
    assert lines[5:] == [more, "4 of 6 could not be read"]


def test_outputs_are_named_as_the_shards_name_their_classes(tmp_path):
    """Words on one side, WordNet's ids on the other."""
    ids = ("n01440764", "n01443537")
    words = ("goldfish, Carassius auratus", "tench, Tinca tinca")
    fish = tmp_path / "fish"
    make_shard_folder(fish, lengths={"test": (4,)}, classes=ids)
    folder = saved(tmp_path / "model", small_model(num_classes=2, classes=words))
    lines, rows = predicted(folder, fish, tmp_path)
    assert len(rows) == 4
    for row in rows:
        assert {row["class_1"], row["class_2"]} == set(ids)
    assert lines[1].startswith(f"top-1 {num_right(rows) / 4:.2%}")

    # A spreadsheet would run a name that starts with "=" as a formula.
    formulas = small_model(num_classes=2, classes=("=a", "=b"))
    _, rows = predicted(saved(tmp_path / "other", formulas), fish, tmp_path)
    assert rows[0]["class_1"].startswith("'=")


@every(independent="false, true")
def test_shares_stand_alone_where_the_loss_was_a_sigmoid(shards, tmp_path, independent):
    model = replace(animals(), independent=independent)

    # Shares that are rounded to 1 and 0 leave the order of the classes as it is.
    bias = model.network.head.bias
    bias.data = torch.tensor([200.0, 400.0, 600.0])
    folder = saved(tmp_path / "model", model)
    assert open_model(str(folder)).independent == independent

    # transformers' problem_type carries it through a folder of Hugging Face.
    HuggingFaceFormat().write(model, tmp_path)
    assert open_model(str(tmp_path)).independent == independent

    _, rows = predicted(folder, shards, tmp_path)
    best, second = CLASSES[:0:-1]
    for row in rows:
        assert row["class_1"] == best
        assert row["class_2"] == second

    # Shares of a softmax have the sum 1; those of sigmoids may all be 1.
    sums = [float(row["p_1"]) + float(row["p_2"]) for row in rows]
    assert any(total > 1 for total in sums) == independent


# ---- numbers -------------------------------------------------------------------------------------


@every(value=[math.nan, math.inf])
def test_outputs_that_are_no_numbers_are_an_error(shards, tmp_path, value):
    model = animals()
    model.network.get_parameter("blocks.1.mlp.fc1.weight").data[0, 0] = value
    folder = saved(tmp_path / "model", model)
    for evaluate in (*LOGITS, *PROBES):
        with refused(r"not finite .NaN or infinity.: \d+ of \d+ images"):
            evaluate_run(evaluation(folder, shards, [evaluate]), WORLD)

    # argmax of NaN is a class: without a check it would be predicted.
    lines, rows = predicted(folder, shards, tmp_path)
    assert "outputs are not finite" in lines[-1]
    assert rows == []


# What is evaluated now, after the results of another evaluation -> the setting that differs.
OTHERS = """
- [{preprocessing: {mean: [0.4, 0.5, 0.5]}}, model.preprocessing.mean]
- [{preprocessing: {eval_antialias: false}}, model.preprocessing.eval_antialias]
- [{image_size: 8}, model.architecture.image_size]
- [{compute: {precision: bf16}}, model.precision]
- [{data: {only_classes: [cat, eel]}}, data.only_classes]
- [{evaluate: [{name: subset}]}, evaluate]
- [{}, data.fingerprint]
"""


def test_results_of_another_evaluation_are_never_replaced(tmp_path, monkeypatch):
    """The last change is to the images themselves: of the same names, as many of each class."""
    write_images = partial(
        write_shard_folder,
        num_per_class=2,
        num_shards=1,
        classes=CLASSES,
        split="test",
    )
    monkeypatch.chdir(tmp_path)
    data = write_images(tmp_path / "data", seed=0)
    model = saved(tmp_path / "model", animals())
    given = evaluation(model, data, LOGITS[:1]).model_dump()
    given["output"] = None  # a folder of its own may be written over

    def evaluate(change):
        changed = dict(given)
        for key, value in change.items():
            # Of a section only the given keys change.
            changed[key] = given[key] | value if isinstance(value, dict) else value
        evaluate_run(EvaluateRun.model_validate(changed), WORLD)
        return Path("runs/x/results.json").read_bytes()

    # The same evaluation again is welcome, and leaves no file of an earlier one.
    before = evaluate({})
    stale = Path("runs/x/evaluation/confusion.csv")
    stale.touch()
    assert evaluate({}) == before
    assert not stale.exists()

    for change, key in yaml.safe_load(OTHERS):
        if key == "data.fingerprint":
            shutil.rmtree(data)
            write_images(data, seed=1)
        with refused(f"another evaluation(?s:.*)\n    {key}"):
            evaluate(change)
    assert Path("runs/x/results.json").read_bytes() == before


def test_a_metric_that_is_no_number_is_null_in_json(tmp_path):
    metrics = {"knn_top1": Share(0, 0), "x": 5e-4}
    rows = as_rows("knn", metrics, image_size=8)
    write_results(tmp_path, rows, description={"name": "x"})

    # Python writes NaN into JSON, where no other reader takes it.
    text = (tmp_path / "results.json").read_text()
    stored = json.loads(text, parse_constant=pytest.fail)["results"]
    assert [(row["value"], row["low"], row["images"]) for row in stored] == [
        (None, None, 0),
        (5e-4, None, None),
    ]

    # A small value keeps its digits in the table for people.
    lines = (tmp_path / "results.md").read_text().splitlines()
    shown = [line.split("|")[4].strip() for line in lines[2:4]]
    assert shown == ["nan", "5.0e-04"]


# ---- images --------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", PROBES, ids=[probe["name"] for probe in PROBES])
def test_probes_never_learn_from_the_images_they_are_scored_on(shards, tmp_path, probe):
    folder = saved(tmp_path / "model", animals())

    # The same split on both sides, whole or in part; the number of images they share.
    for data, number in yaml.safe_load(f"""
    - [{{val_split: train}}, 18]
    - [{{train_split: test}}, 6]
    - [{{val_split: train, first_percent: 50}}, 9]
    - [{{val_split: train, dev_percent: 50}}, 9]
    - [{{train_split: test, mixture: [{{path: {shards}, share: 0.5}}]}}, 6]
    """):
        with refused(f"{probe['name']}: {number} of the .* it learns from"):
            evaluate_run(evaluation(folder, shards, [probe], **data), WORLD)

    # The cut of one split shares no image.
    assert results(evaluation(folder, shards, [probe], val_split=None, dev_percent=50))


def run_folder(folder, **config):
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"name": "base", **config}))
    return folder


def evaluated(run, *words):
    argv = [f"init={run}", *words]
    # As the command does it: settings of the run first, so that words win.
    overrides = ["stage=evaluate", *settings_of_run(argv), *argv]
    return load_run({"evaluate": EvaluateRun}, None, overrides=overrides).run


# Settings of a run, and its images by the numbers in their keys: those of the bank, and those that
# are evaluated, which are of the split `test` unless the training set was cut.
SETTINGS = """
- [data, bank, images, split]
- [{}, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17, 0 1 2 3 4 5, test]
- [{first_percent: 50.0}, 0 1 2 3 4 5 6 7 8, 0 1 2 3 4 5, test]
- [{only_classes: [dog]}, 1 4 7 10 13 16, 1 4, test]
- [{only_keys: KEYS}, 3 7 8, 0 1 2 3 4 5, test]
- [{dev_percent: 50.0}, 0 1 2 3 4 5 6 7 8, 9 10 11 12 13 14 15 16 17, train]
- [{dev_percent: 50.0, first_percent: 50.0, val_split: null}, 0 1 2 3 4, 5 6 7 8, train]
- [{dev_percent: 50.0, only_classes: [dog]}, 1 4 7, 10 13 16, train]
- [{mixture: MORE}, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 0 1 2, 0 1 2 3 4 5, test]
"""


@rows(SETTINGS)
def test_a_run_is_evaluated_on_the_images_it_was_evaluated_on(
    shards,
    mixed_in,
    tmp_path,
    data,
    bank,
    images,
    split,
):
    keys = tmp_path / "keys.txt"
    keys.write_text("\n".join(keys_of("3 7 8", "train")))
    # The table cannot know the paths.
    if "only_keys" in data:
        data = {"only_keys": str(keys)}
    if "mixture" in data:
        data = {"mixture": [{"path": str(mixed_in), "share": 0.1}]}
    data = {
        "path": str(shards),
        "train_split": "train",
        "val_split": "test",
        **data,
    }
    evaluate = [{"name": "knn", "every_steps": 5}, {"name": "classification"}]
    run = run_folder(tmp_path / "base", data=data, evaluate=evaluate)

    train, val = splits(evaluated(run))
    bank_keys = [key for part in train for key in _keys(part)]
    assert bank_keys == keys_of(bank, "train")
    assert _keys(val) == keys_of(images, split)


def _keys(index):
    return sample_keys(index, range(index.num_samples))


def test_words_on_the_command_line_win_over_the_run(shards, mixed_in, tmp_path):
    config = yaml.safe_load(f"""
    data: {{path: {shards}, train_split: train, val_split: test, dev_percent: 50.0}}
    evaluate: [{{name: knn}}]
    engine: {{precision: bf16}}
    """)
    run = run_folder(tmp_path / "base", **config)
    unchanged = evaluated(run)
    assert unchanged.compute.precision == "bf16"
    assert unchanged.data.evaluated == "the last 50 % of 'train'"

    # Another split, without the dev part in the bank.
    train, val = splits(evaluated(run, "data.val_split=test"))
    assert len(_keys(train[0])) == 9
    assert _keys(val) == keys_of("0 1 2 3 4 5", "test")

    # Other shards, whole: the cut was of the run's own.
    train, val = splits(evaluated(run, f"data.path={mixed_in}"))
    assert len(_keys(train[0])) == 3
    assert len(_keys(val)) == 3


@rows("""
- [shots]
- [[-1]]
- [[0]]
- [[2, 0]]
- [[]]
""")
# `order[:0]` would give no image, and `order[:-1]` nearly all of them, without an error.
def test_shots_are_at_least_one_image(shots):
    with pytest.raises(ValidationError):
        FewShotSettings(shots=tuple(shots))


# ---- MLflow --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_job", [False, True])
def test_an_evaluated_checkpoint_is_a_model_of_mlflow(
    tmp_path,
    mlflow_database,
    monkeypatch,
    capsys,
    is_job,
):
    """With the metrics of the evaluation, and the training as its source; the run has each once."""
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    uri = f"sqlite:///{mlflow_database}"
    tracking = TrackingSettings(uri=uri, system_metrics=False)

    # The training, with a point at the step of its checkpoint.
    training = tmp_path / "training"
    training.mkdir()
    (training / "config.yaml").write_text("{name: a.b}")
    with Tracker(
        training,
        settings=tracking,
        name="a.b",
        stage="pretrain",
        tags={},
        resume_step=0,
        is_writer=True,
        say=lambda text: None,
    ) as tracker:
        tracker.log({"train/loss": 1.0}, step=20)

    # Its evaluation, which has a run in MLflow of its own.
    checkpoint = SimpleNamespace(step=20, folder=training / "checkpoints/step-00000020")
    source = SimpleNamespace(folder=training, checkpoint=checkpoint)
    model = SimpleNamespace(source="a", run=source)
    run = evaluation(tmp_path / "x", tmp_path, [{"name": "classification"}])
    run = run.model_copy(update={"tracking": tracking, "name": "a.b-evaluation"})
    Path(run.folder).mkdir()
    val = SimpleNamespace(title="s/test, 8 images, 0123")
    with open_tracker(run, model, val, WORLD) as tracker:
        tracker.log({"val/top1": 0.75, "val/loss": 0.5}, step=20)

    # Jobs of a cluster cannot share a database in a file, so they send nothing to it.
    if is_job:
        monkeypatch.setenv("SLURM_JOB_ID", "1")
    log_model(run, source)
    assert "warning" not in capsys.readouterr().out

    client = MlflowClient(uri)
    (experiment,) = client.search_experiments(filter_string="name = 'vitscale'")
    ids = [experiment.experiment_id]
    run_ids = {run.info.run_name: run.info.run_id for run in client.search_runs(ids)}
    history = client.get_metric_history(run_ids["a.b-evaluation"], "val/top1")
    assert [point.value for point in history] == [0.75]

    # By it comparisons know how many images an accuracy is of.
    (evaluated,) = [
        run for run in client.search_runs(ids) if run.info.run_name != "a.b"
    ]
    assert evaluated.data.tags["vitscale.val_data"] == val.title

    models = client.search_logged_models(ids)
    assert len(models) == (not is_job)
    for logged in models:
        # MLflow allows no dot in the name of a model.
        assert logged.name == "a-b-evaluation-20"
        assert logged.status == "READY"
        assert logged.source_run_id == run_ids["a.b"]
        assert logged.tags["vitscale.checkpoint"] == str(checkpoint.folder)
        values = {point.key: (point.value, point.step) for point in logged.metrics}
        assert values == {"val/top1": (0.75, 20), "val/loss": (0.5, 20)}

    # What is no database costs a warning and no results.
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    mlflow_database.write_bytes(b"no database")
    log_model(run, source)
    assert "warning: no model was recorded in MLflow (" in capsys.readouterr().out
