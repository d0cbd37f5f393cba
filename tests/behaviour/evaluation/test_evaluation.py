"""Evaluations equal slow versions and cases by hand; padding is not counted."""

import csv
import math
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from scipy.stats import binomtest

from tests.support.corpora.shard_folders import make_shard_folder, write_shard_folder
from tests.support.engine.subjects import (
    WORLD,
    array_subject,
    given_outputs,
    index_of,
    split_of,
)
from tests.support.tables import every, refused, rows
from vitscale.data.index import INDEX_NAME, read_split
from vitscale.data.label_spaces import SUBSETS, known_space, timm_file
from vitscale.evaluation import registry
from vitscale.evaluation.classification import Classification, ClassificationSettings
from vitscale.evaluation.confusion import Confusion, ConfusionSettings
from vitscale.evaluation.evaluation import (
    Evaluation,
    NonFiniteOutputs,
    Output,
    Outputs,
    SettingsBase,
    Share,
    check_labels,
)
from vitscale.evaluation.real_labels import RealLabels, RealLabelsSettings, _label_table
from vitscale.evaluation.registry import ScheduledEvaluations
from vitscale.evaluation.subset import Subset, SubsetSettings
from vitscale.training.session import TrainingSession

# Metrics are sums over the ranks of a group; here it has one.
pytestmark = pytest.mark.usefixtures("world")


# The ends, where a plain normal interval has no width or leaves 0 to 1, and the size of ImageNet.
@rows("""
- [count, images]
- [0, 1]
- [1, 1]
- [0, 360]
- [346, 360]
- [360, 360]
- [42500, 50000]
""")
def test_the_interval_equals_scipys(count, images):
    expected = binomtest(count, images).proportion_ci(method="wilson")
    share = Share(count, images)
    assert share == count / images
    assert share.images == images
    interval = (expected.low, expected.high)
    assert share.interval() == pytest.approx(interval, abs=1e-12)

    # A share of nothing is no number, and does not divide by zero.
    none = Share(0, 0)
    assert math.isnan(none)
    assert all(map(math.isnan, none.interval()))


def subject(*shards, outputs=3):
    val = SimpleNamespace(classes=shards, folder="shards")
    return SimpleNamespace(
        val=val,
        num_outputs=outputs,
        classes=("cat", "dog", "eel"),
    )


# The classes of the shards, the outputs of the model, and what the error and its advice say.
@rows("""
- [shards, outputs, message]
- [[], 3, "(?s)needs labels.*labelled shards"]
- [[cat], 0, "(?s)has no head.*knn"]
""")
def test_what_has_no_classes_is_refused(shards, outputs, message):
    # The same model with the same classes is accepted: it is not refused for another reason.
    check_labels(subject("cat", "dog", "eel"), name="classification")
    with refused(message):
        check_labels(subject(*shards, outputs=outputs), name="classification")


# ---- features -----------------------------------------------------------------------------------


def train_split():
    values = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    return split_of(values, [number % 3 for number in range(30)])


def test_features_are_computed_once_whoever_asks():
    split = train_split()
    subject = array_subject(split, split)
    few = subject.features("train", samples=np.array([3, 5, 17]))
    assert torch.equal(few.values_ND, split.values[[3, 5, 17]])
    assert few.labels_N.tolist() == [0, 2, 2]

    # The other samples are appended, so the order is none of the split's.
    features = subject.features("train")
    samples = torch.from_numpy(features.samples)
    assert sorted(samples.tolist()) == list(range(30))
    assert torch.equal(features.values_ND, split.values[samples])

    # The first three columns serve as logits, counted in batches that 30 is no multiple of.
    right = features.values_ND[:, :3].argmax(dim=1) == features.labels_N
    counted = features.num_correct(lambda v: v[:, None, :3], world=WORLD, size=7)
    assert counted.tolist() == [right.sum()]

    # A second evaluation gets what the first one computed.
    again = subject.features("train", samples=np.array([0, 29]))
    assert sorted(again.samples) == [0, 29]
    assert list(map(len, subject.extracted)) == [3, 27]

    # With nothing kept, as after a step of training, all are computed anew.
    subject.kept.clear()
    subject.features("train")
    assert len(subject.extracted[-1]) == 30


def test_parts_of_a_training_set_are_numbered_through():
    split = train_split()
    other = split_of(torch.ones(4, 5), [2, 1, 0, 2])
    subject = array_subject((split, other), other)

    # Sample 29 is the last one of the first part, 30 the first one of the second.
    features = subject.features("train", samples=np.array([29, 30, 32]))
    assert features.samples.tolist() == [29, 30, 32]
    assert features.labels_N.tolist() == [2, 2, 0]
    assert torch.equal(features.values_ND[1:], torch.ones(2, 5))


# ---- schedule ------------------------------------------------------------------------------------


class Weights(Evaluation):
    """Reports which weights the engine holds."""

    needs = "features"

    def metrics(self, subject):
        engine = subject.model
        # Dropout and drop path would make the metrics random.
        assert not engine.training
        engine.folders.append(subject.folder)
        return {f"{self.settings.name}_value": engine.value}


def scheduled(chosen, subject, **options):
    engine = subject.model
    return ScheduledEvaluations(chosen, subject, engine=engine, **options)


# The engine's mode, and its value in place of weights: 1 for themselves, 2 for their average.
class FakeEngine:
    training = True
    value = 1.0

    def __init__(self):
        self.folders = []

    def train(self):
        self.training = True

    def eval(self):
        self.training = False

    @contextmanager
    def averaged(self):
        self.value = 2.0
        yield
        self.value = 1.0


def test_each_evaluation_runs_at_its_own_interval_and_last(monkeypatch):
    """First the weights, then their average."""
    monkeypatch.setattr(registry, "EVALUATIONS", {"a": Weights, "b": Weights})
    engine = FakeEngine()
    outputs = given_outputs(torch.zeros(1, 2), [0], folder=Path("a"))
    subject = replace(outputs, model=engine)
    chosen = [SettingsBase(name="a", every_steps=4), SettingsBase(name="b")]
    evaluations = scheduled(chosen, subject, has_average=True)

    # One has an interval of four steps, the other runs at the end alone.
    steps = range(1, 10)
    due = [step for step in steps if evaluations.due(step, is_last=step == 9)]
    assert due == [4, 8, 9]

    # The weights have the value 1, their average has 2.
    first, last = yaml.safe_load("""
    - [{val/a_value: 1.0}, {val/ema_a_value: 2.0}]
    - [{val/a_value: 1.0}, {val/b_value: 1.0}, {val/ema_a_value: 2.0}, {val/ema_b_value: 2.0}]
    """)
    assert list(evaluations.run(4, is_last=False)) == first
    assert list(evaluations.run(9, is_last=True)) == last

    # Files of the average are beside those of the weights, not over them.
    folders = [folder.as_posix() for folder in engine.folders]
    assert folders == "a a/ema a a a/ema a/ema".split()
    assert engine.training


def test_a_training_goes_on_without_a_metric_of_outputs_that_are_no_numbers():
    """And says so; in `vitscale evaluate` it is an error."""
    logits = torch.zeros(4, 2)
    logits[3, 1] = math.nan  # the padding of its batch, too
    engine = FakeEngine()
    engine.world = WORLD
    engine.known_outputs = ("logits",)
    subject = replace(given_outputs(logits, [0, 1, 0, 1]), model=engine)
    chosen = [ClassificationSettings(every_steps=4)]
    evaluations = scheduled(chosen, subject, has_average=False)

    # All that the session needs to evaluate at a step.
    lines = []
    fake = SimpleNamespace(
        watchdog=SimpleNamespace(mark=lambda _: None),
        val_index=subject.val,
        run=SimpleNamespace(data=SimpleNamespace(evaluated="'val'")),
        evaluations=evaluations,
        log=SimpleNamespace(say=lines.append),
    )
    TrainingSession._evaluate(fake, 4, is_last=False)

    # The sample counts once, though it also fills up its batch.
    (line,) = lines
    assert line.startswith("step 4: not evaluated: outputs of the model are not finite")
    assert line.endswith(": 1 of 4 images")
    assert engine.training


class FiniteWeights(Weights):
    """Refuses the average of the weights."""

    def metrics(self, subject):
        values = super().metrics(subject)
        if 2.0 in values.values():
            raise NonFiniteOutputs("outputs of the model are not finite", where="init")
        return values


def test_a_training_goes_on_with_its_weights_when_outputs_of_their_average_are_no_numbers(
    monkeypatch,
):
    """It went on with the average as its weights, and without a word of it."""
    monkeypatch.setattr(registry, "EVALUATIONS", {"a": FiniteWeights})
    engine = FakeEngine()
    subject = replace(given_outputs(torch.zeros(1, 2), [0]), model=engine)
    chosen = [SettingsBase(name="a", every_steps=4)]
    evaluations = scheduled(chosen, subject, has_average=True)

    # The metrics of the weights are good, and come before the error.
    results = []
    with pytest.raises(NonFiniteOutputs):
        for metrics in evaluations.run(4, is_last=False):
            results.append(metrics)
    assert results == [{"val/a_value": 1.0}]

    # The engine holds its own weights again and trains.
    assert engine.training
    assert engine.value == 1.0


def test_every_entry_is_named_by_its_settings():
    for name, evaluation in registry.EVALUATIONS.items():
        assert evaluation.Settings.model_fields["name"].default == name
        assert evaluation.needs in get_args(Output)


# ---- accuracy, calibration, confusion ------------------------------------------------------------

NUM = 10


def numbers(text):
    return torch.tensor(yaml.safe_load(text))


def classified(subject):
    return Classification(ClassificationSettings()).metrics(subject)


TABLE = """\
label,class,images,correct,top1
0,"cat, black",3,3,1.000000
1,dog,1,0,0.000000
2,eel,0,0,
"""


# top5 has a meaning for more than five classes only.
@every(num_classes="5, 8")
def test_metrics_equal_brute_force(num_classes):
    logits = torch.randn(NUM, num_classes, generator=torch.Generator().manual_seed(1))
    labels = [(3 * number) % num_classes for number in range(NUM)]
    metrics = classified(given_outputs(logits, labels))

    # A label is among the best k if fewer than k outputs are larger than its own.
    at1 = at5 = loss = 0.0
    for row, label in zip(logits.tolist(), labels, strict=True):
        num_better = sum(value > row[label] for value in row)
        at1 += num_better < 1
        at5 += num_better < 5
        loss += math.log(sum(map(math.exp, row))) - row[label]

    expected = {"top1": at1 / NUM, "loss": loss / NUM}
    if num_classes > 5:
        expected["top5"] = at5 / NUM
    chosen = {name: metrics[name] for name in expected}
    assert chosen == pytest.approx(expected, rel=1e-6)
    assert ("top5" in metrics) == (num_classes > 5)
    assert metrics["top1"].images == NUM


def test_each_head_of_a_distilled_model_is_counted():
    """The class head is right about image 0, the other about 0 and 1, their softmaxes about all."""
    heads_2BC = numbers("""
    - [[2.0, 0, 0], [5.1, 0, 5], [0, 3.0, 2.9], [1, 0, 0]]
    - [[2.0, 0, 0], [0, 4, 0], [1.0, 0.0, 0.9], [1, 0, 0]]
    """)
    model = SimpleNamespace(world=WORLD, known_outputs=("logits", "heads"))
    evaluation = Classification(ClassificationSettings())
    labels = [0, 1, 2, 0]
    names = {"classes": "abc", "model_classes": "cab"}
    subject = given_outputs(torch.zeros(4, 3), labels, **names)
    evaluation.start(replace(subject, model=model))

    # The model has its classes in another order.
    heads_2BC = heads_2BC[:, :, [2, 0, 1]]
    labels_B = torch.tensor(labels)
    weights_B = torch.tensor([1.0, 1, 1, 0])  # one is padding
    evaluation.add(
        Outputs(heads_2BC.mean(dim=0), labels_B, weights_B, np.arange(4), heads_2BC)
    )
    metrics = evaluation.finish()
    shares = {
        "cls_top1": 1 / 3,
        "dist_top1": 2 / 3,
        "softmax_top1": 1.0,
    }
    assert {name: metrics[name] for name in shares} == pytest.approx(shares)


def test_the_mean_over_classes_counts_classes(tmp_path):
    # Three cats, all right; one dog, taken for an eel; no eel, which must not count as 0.
    logits = torch.eye(3)[[0, 0, 0, 2]]
    classes = ("cat, black", "dog", "eel")
    subject = given_outputs(
        logits,
        [0, 0, 0, 1],
        folder=tmp_path,
        classes=classes,
        model_classes=classes,
    )
    metrics = classified(subject)
    assert metrics["top1"] == 0.75
    assert metrics["class_mean_top1"] == 0.5

    # A name with a comma is quoted, and line ends are the same on all systems.
    assert (tmp_path / "per_class.csv").read_bytes() == TABLE.encode()


def test_calibration_equals_a_case_by_hand(tmp_path):
    """Two classes, the first predicted with these probabilities."""
    logits = torch.tensor(
        [[math.log(p), math.log1p(-p)] for p in (0.95, 0.95, 0.65, 0.65)]
    )
    folder = tmp_path / "files"
    metrics = classified(given_outputs(logits, [0, 0, 0, 1], folder=folder))

    # Half of the images are 0.05 too unsure, the other half 0.15 too sure.
    sum_of_logs = 2 * math.log(0.95) + math.log(0.65) + math.log(0.35)
    loss = -sum_of_logs / 4
    assert metrics["ece"] == pytest.approx(0.1, rel=1e-6)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-6)

    def bins():
        with open(folder / "calibration.csv") as file:
            return [row for row in csv.DictReader(file) if row["images"] != "0"]

    # Of 15 bins: their edges, images, mean confidence and share that is right.
    assert [" ".join(row.values()) for row in bins()] == [
        "0.600000 0.666667 2 0.650000 0.500000",
        "0.933333 1.000000 2 0.950000 1.000000",
    ]

    # A confidence on an edge, 1 / 3 or 1 / 5, is of the bin below it.
    for num, low in ((3, 4 / 15), (5, 2 / 15)):
        even = given_outputs(torch.zeros(1, num), [0], folder=folder)
        classified(even)
        (row,) = bins()
        assert float(row["low"]) == pytest.approx(low, abs=1e-6)

    # A confidence of 1 is in the last bin, and a probability of e**-200 has a finite loss.
    logits = torch.tensor([[200.0, 0.0], [200.0, 0.0]])
    certain = given_outputs(logits, [0, 1])
    metrics = classified(certain)
    assert metrics["ece"] == pytest.approx(0.5)
    assert metrics["loss"] == pytest.approx(100.0)


def test_a_file_that_cannot_be_written_is_one_error(tmp_path):
    # A file where the folder should be: as a full disk, it is no bug and needs no traceback.
    (tmp_path / "files").write_text("no folder")
    subject = given_outputs(torch.eye(2), [0, 1], folder=tmp_path / "files")
    with refused("per_class.csv: cannot be written"):
        classified(subject)


def test_the_surest_mistakes_are_drawn_first(tmp_path, monkeypatch):
    """Then the images that are right with the least confidence; padding never."""
    folder = tmp_path / "shards"
    make_shard_folder(folder, lengths={"test": (5,)}, classes=("käfer", "dog"))
    val = read_split(str(folder), split="test")

    # Each sample's confidence, and whether it is right.
    sure = torch.tensor([0.9, 0.6, 0.8, 0.7, 0.99], dtype=torch.float64)
    right = [True, False, False, True, False]
    logits = torch.zeros(5, 2)
    for sample, label in enumerate(val.label.tolist()):
        guess = label if right[sample] else 1 - label
        logits[sample, guess] = torch.logit(sure[sample])

    # The cells are caught before matplotlib draws them: a picture could not be compared.
    drawn = []
    monkeypatch.setattr(
        "vitscale.evaluation.sheet.sheet",
        lambda title, rows, width: drawn.append((title, rows)),
    )
    monkeypatch.setattr(
        "vitscale.evaluation.sheet.save_figure", lambda figure, path: None
    )
    subject = given_outputs(
        logits,
        val.label,
        val=val,
        model_classes=val.classes,
        folder=tmp_path / "files",
    )
    classified(subject)
    assert not drawn, "not at each evaluation of a training"

    classified(replace(subject, draws=True))
    ((title, (cells,)),) = drawn
    assert title.startswith("2 of 5 images are right")
    shown = [f"{text.split('%')[0]} {is_red}" for text, is_red, _ in cells]
    assert shown == "99 True|80 True|60 True|70 False|90 False".split("|")
    # A mistake shows the class that is right, too: its label may be what is wrong.
    names = {text.partition("is: ")[2] for text, is_red, _ in cells if is_red}
    labels = val.label[[1, 2, 4]]
    assert names == {val.classes[label] for label in labels}
    # The crop of the model's 8 pixels, with the details that people need.
    shapes = {tuple(image.shape) for _, _, image in cells}
    assert shapes == {(3, 184, 184)}


# ---- confusion -----------------------------------------------------------------------------------


def test_equal_confusions_have_the_order_of_labels(tmp_path):
    logits = torch.eye(4)[[3, 2, 1, 0, 0]]
    subject = given_outputs(logits, [2, 1, 0, 0, 3], folder=tmp_path)

    # Of four classes one is right half of the time.
    metrics = Confusion(ConfusionSettings(num_classes=4)).metrics(subject)
    assert metrics == {"worst_classes_top1": 0.125}

    # Mistakes by label, then what is right, though each cell has one image.
    lines = (tmp_path / "confusion.csv").read_text().splitlines()[1:]
    assert lines == "0,1,1 1,2,1 2,3,1 3,0,1 0,0,1".split()


def test_files_and_metric_equal_a_case_by_hand(tmp_path):
    # Names that matplotlib would take for mathematics.
    names = ("$a_", "b")
    folder = write_shard_folder(
        tmp_path / "shards",
        classes=names,
        num_per_class=2,
        num_shards=1,
        split="val",
    )
    val = read_split(str(folder), split="val")
    logits = torch.eye(2)[[1, 1, 0, 1]]  # of labels 0, 1, 0, 1
    subject = given_outputs(
        logits,
        [],
        val=val,
        model_classes=names,
        folder=tmp_path / "files",
    )

    # The worst class alone: half of $a_ are taken for b, and b is always right.
    metrics = Confusion(ConfusionSettings(num_classes=1)).metrics(subject)
    assert metrics == {"worst_classes_top1": 0.5}
    lines = (tmp_path / "files/confusion.csv").read_text().splitlines()
    assert lines == "class,predicted,images $a_,b,1 b,b,2 $a_,$a_,1".split()


# ---- subsets -------------------------------------------------------------------------------------

IMAGENET = known_space("imagenet_1k")


def subset(**settings):
    return Subset(SubsetSettings(**settings))


def test_labels_are_mapped_by_name():
    # The model's best output, fox, is no class of the shards.
    logits = numbers("[[1.0, 2, 3, 9], [3, 2, 1, 9], [1, 3, 2, 9], [1, 2, 3, 9]]")
    names = {"classes": ("eel", "cat"), "model_classes": ("cat", "dog", "eel", "fox")}
    subject = given_outputs(logits, [0, 1, 1, 1], **names)
    subset().check(subject)
    assert subset().metrics(subject) == {"subset_top1": 0.5}


@every(name=SUBSETS)
def test_named_sets_are_timms_index_lists(name):
    # Read here without the code under test: a number a line.
    numbers = timm_file(f"{name}_indices.txt", where="").read_text().split()
    classes = known_space(name)[::-1]  # shards may have any order
    subject = given_outputs(torch.zeros(1, 1000), [0], classes=classes)
    outputs, positions = subset(classes=name)._columns(subject)
    assert list(outputs.columns) == list(map(int, numbers))
    assert list(positions.columns) == list(range(200))[::-1]


def test_classes_that_the_shards_lack_compete_too():
    # Shards with one of ImageNet-A's 200 classes; another one of them has a larger output.
    first, second = known_space("imagenet_a")[:2]
    logits = torch.zeros(1, 1000)
    logits[0, IMAGENET.index(first)] = 1.0
    logits[0, IMAGENET.index(second)] = 2.0
    logits[0, 0] = 3.0  # not in ImageNet-A
    subject = given_outputs(logits, [0], classes=(first,))

    # Against its own classes an image cannot be wrong; against ImageNet-A's it is.
    assert subset(classes="shards").metrics(subject) == {"subset_top1": 1.0}
    metrics = subset(classes="imagenet_a").metrics(subject)
    assert metrics == {"subset_top1": 0.0, "subset_top5": 1.0}


def test_images_of_missing_classes_count_as_wrong():
    names = known_space("imagenet_21k_goog")
    classes = (*IMAGENET[:2], "n04399382")  # ImageNet-21k has no teddy bear
    logits = torch.zeros(2, len(names))
    logits[0, names.index(IMAGENET[1])] = 1.0
    subject = given_outputs(logits, [1, 2], classes=classes)
    with refused("1 of 3 classes.*n04399382"):
        subset().check(subject)

    # Whoever accepts that gets a number that the lacking class lowers.
    assert subset(allow_missing=True).metrics(subject) == {"subset_top1": 0.5}

    # Even where they are among the best five: the model has one of six classes.
    names = {"classes": "abcdef", "model_classes": ("z", "f")}
    logits = torch.eye(2)[[1] * 6]
    subject = given_outputs(logits, range(6), **names)
    metrics = subset(allow_missing=True).metrics(subject)
    assert metrics == {"subset_top1": 1 / 6, "subset_top5": 1 / 6}


# ---- ImageNet-ReaL ------------------------------------------------------------------------------

REAL = RealLabels(RealLabelsSettings())
# Labels of the first images: none; 970, 795; 230, 231; 809.
NUMBERS = (3, 1, 2, 4)


# Keys are read from the index's file, not from the split: the two have the same order.
def split_with_keys(folder, keys):
    path = folder / INDEX_NAME
    table = pa.table({"key": keys, "split": ["val"] * len(keys)})
    pq.write_table(table, path)
    return index_of([0] * len(keys), known_space("imagenet_1k"), folder=folder)


def test_accuracy_equals_a_case_by_hand(tmp_path):
    keys = [f"val-n01440764-ILSVRC2012_val_{number:08d}" for number in NUMBERS]
    logits = torch.zeros(4, 1000)

    # Image 3 is right, by its second label. Image 1 has none, so its guess does not count.
    logits[0, 231] = 9.0
    logits[1, 5] = 9.0

    # Image 2 is right with its fifth output, image 4 with its sixth: too late for either metric.
    logits[2, 1] = 9.0
    logits[2, [2, 3, 4, 795]] = 8.0
    logits[3, 1] = 9.0
    logits[3, [2, 3, 4, 5]] = 8.0
    logits[3, 809] = 7.0

    subject = given_outputs(logits, [], val=split_with_keys(tmp_path, keys))
    REAL.check(subject)
    metrics = REAL.metrics(subject)
    assert metrics == pytest.approx({"real_top1": 1 / 3, "real_top5": 2 / 3})
    assert metrics["real_top1"].images == 3


def test_the_published_number_of_images_is_left_out():
    # Of Beyer et al. 2020, "Are we done with ImageNet?".
    is_empty = (_label_table() < 0).all(axis=1)
    assert len(is_empty) == 50_000
    assert is_empty.sum() == 3_163


# No original name at all, and numbers on either side of 1 to 50,000.
@every(key="val-cat-1, ILSVRC2012_val_00050001, ILSVRC2012_val_00000000")
def test_other_keys_are_refused(tmp_path, key):
    keys = ["ILSVRC2012_val_00000001", key]
    val = split_with_keys(tmp_path, keys)
    subject = given_outputs(torch.zeros(2, 1000), [], val=val)
    with refused(f"(?s){key}.*original names"):
        REAL.check(subject)
