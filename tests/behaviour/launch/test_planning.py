"""The plan that a dry run shows; what is found in broken shards and in runs that do not fit."""

import re
from pathlib import Path

import pytest
import yaml

from finetune.settings import EvaluateRun
from launch.jobs.preparation import RUN_TYPES
from launch.planning.dry_run import (
    Check,
    batch_script,
    check_data,
    check_here,
    data_facts,
    describe,
    plan_rows,
    refuse_or_warn,
    run_checks,
)
from pretrain.run import PretrainRun
from tests.contract.tree import ROOT
from tests.support.corpora.shard_folders import write_shard_folder
from tests.support.tables import refused, rows
from vitscale.config.errors import UserError, UserErrors
from vitscale.config.loader import load_run, run_to_yaml
from vitscale.data.index import SplitIndex, read_split, sample_keys
from vitscale.runs.training import TrainingRun

SECTIONS = yaml.safe_load("""
name: x
model: {preset: Ti/16}
optim: {lr: 0.001}
schedule: {steps: 100, warmup_steps: 10}
launch: {cpus_per_task: 3}
""")
DATA = {
    "path": "shards",
    "global_batch": 4,
    "val_split": None,
}
PLANNED = yaml.safe_load("""
data: {path: elsewhere, global_batch: 64, planned_num_samples: 1000}
model: {preset: Ti/16, num_classes: 10}
""")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_shard_folder(tmp_path / "shards", num_per_class=8, num_shards=4)


def run_of(stage="pretrain", *, data=None, **changes) -> TrainingRun:
    """A small run with these changes, on the shards here."""
    values = SECTIONS | changes | {"data": DATA | (data or {})}
    return RUN_TYPES[stage].model_validate(values)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def checked(**changes) -> dict[str, Check]:
    return by_name(run_checks(run_of(**changes)))


def plan(**changes):
    """The plan of a run whose shards this machine does not see."""
    values = PLANNED | changes
    return dict(plan_rows(PretrainRun.model_validate(SECTIONS | values)))


def test_evaluations_are_named_and_unknown_values_name_the_missing_setting():
    evaluate = [{"name": "knn", "every_steps": 2000}, {"name": "classification"}]
    rows = plan(evaluate=evaluate)
    assert rows["objective"] == "supervised"
    assert rows["evaluation"] == (
        "knn every 2,000 steps, classification; all after the last step, on 'test'"
    )

    # The parts of the memory have the sum that is shown first, each rounded to 0.01 GiB.
    whole, *parts = map(float, re.findall(r"([\d.]+) GiB", rows["memory per process"]))
    assert len(parts) > 2
    rounding = 0.005 * (len(parts) + 1)
    assert whole == pytest.approx(sum(parts), abs=rounding)

    # Epochs and a head need counts that nobody gave.
    rows = plan(
        data={"path": "elsewhere", "global_batch": 64, "val_split": None},
        model={"preset": "Ti/16"},
        schedule={"epochs": 10, "warmup_steps": 5},
    )
    assert rows["evaluation"] == "none, because data.val_split is null"
    assert "data.planned_num_samples" in rows["schedule"]
    assert "model.num_classes" in rows["model"]


def test_shards_without_labels_are_named_and_checked(tmp_path):
    shards = write_shard_folder(
        tmp_path / "s", num_per_class=8, num_shards=1, classes=()
    )
    values = SECTIONS | {"data": {"path": str(shards), "global_batch": 4}}

    # A self-supervised objective needs none, and its model has no head.
    masked = values | {"objective": {"name": "masked_patch_prediction"}}
    rows = dict(plan_rows(PretrainRun.model_validate(masked)))
    assert rows["data"].startswith("8 training images without labels, from ")
    assert rows["model"].endswith(", no classes")

    for changed, message in (
        (values, "supervised needs labels"),
        (masked | {"evaluate": [{"name": "knn"}]}, "knn needs labels"),
    ):
        run = PretrainRun.model_validate(changed)
        with refused(message):
            check_data(run, data_facts(run))

    # What is evaluated on no split needs no labels.
    blind = {
        "evaluate": [{"name": "knn"}],
        "data": masked["data"] | {"val_split": None},
    }
    run = PretrainRun.model_validate(masked | blind)
    check_data(run, data_facts(run))


def test_subsets_and_mixtures_are_counted_as_in_training(tmp_path):
    """With what `first_percent` and a cut leave of the first; 1 % as in the ViT paper's code."""
    planned = PLANNED["data"] | {"planned_num_samples": 1_281_167}
    rows = plan(data=planned | {"dev_percent": 1.0, "val_split": None})
    assert rows["data"].startswith(
        "1,268,355 training images without 12,812 held out, from "
    )
    assert rows["evaluation"].endswith("on 1 % of 'train' held out (12,812 images)")
    rows = plan(data=planned | {"first_percent": 10.0})
    assert rows["data"].startswith("128,117 training images, from ")

    # A list of samples that is of another corpus would silently train on fewer images.
    shards = write_shard_folder(tmp_path / "s", num_per_class=8, num_shards=1)
    names = sample_keys(read_split(shards, split="train"), range(3))
    (tmp_path / "keys.txt").write_text("\n".join([*names, "unknown"]))
    data = {"path": str(shards), "global_batch": 2}
    rows = plan(data=data | {"only_keys": f"{tmp_path}/keys.txt"})
    assert rows["data"].startswith("3 training images, from ")
    assert (
        "1 lines of data.only_keys name no sample of 'train', such as 'unknown'"
        in rows["data"]
    )

    # Of 16 images 12 are taken and 3 of them held out; two times 20 from elsewhere are added.
    other = write_shard_folder(tmp_path / "o", num_per_class=10, num_shards=1, seed=1)
    mixture = [{"path": str(other), "share": 0.25} for _ in range(2)]
    data |= {"dev_percent": 25.0, "first_percent": 75.0, "mixture": mixture}
    text = f"from data.first_percent=75 of {shards}/manifest.json and data.mixture"
    assert plan(data=data)["data"] == f"49 training images without 3 held out, {text}"

    # Without one part the sum is unknown, and the part is named.
    mixture[0]["path"] = f"{tmp_path}/elsewhere"
    assert plan(data=data)["data"].startswith("unknown number of training images")
    run = PretrainRun.model_validate(SECTIONS | {"data": data})
    with refused(r"data.mixture\[0\].path: no shards in .*elsewhere"):
        check_data(run, data_facts(run))


# Every loader process needs a tar of its own, and there are four. The processes are ranks times
# workers, or ranks where there is no worker.
@rows("""
- [tasks, nodes, workers, refused]
- [1, 1, 4, null]
- [4, 1, 0, null]
- [2, 1, 3, "fewer tars (4) than loader processes (6 = "]
- [1, 1-8, 2, "fewer tars (4) than loader processes (16 = "]
""")
def test_tars_without_an_index_are_enough_for_the_loader_processes(
    tasks, nodes, workers, refused
):
    """On the largest number of nodes that a job may get."""
    data = yaml.safe_load("""
    {reader: webdataset, global_batch: 8, webdataset: {num_samples: 16, num_classes: 2}}
    """)
    data["num_workers"] = workers
    launch = {"tasks_per_node": tasks, "nodes": nodes, "cpus_per_task": 9}
    row = checked(data=data, launch=launch)["data"]
    assert row.result == ("ok" if refused is None else "error")
    assert refused is None or refused in row.detail


# A share of the batch with no divisor near the largest micro-batch runs in tiny ones; then batches
# are named that do better. The last two rows divide well.
@rows("""
- [batch, tasks, nodes, parts]
- [4020, 60, 1, [only 1 of the 64 images, 3960 (33 images) or 4080 (34 images)]]
- [4288, 32, 1, [only 2 of the 64 images, 4224 (44 images) or 4320 (45 images)]]
- [4288, 1, 1-32, [the 134 images of each of 32 ranks, 'small on 16, 8, 4 nodes']]
- [4096, 64, 1, []]
- [4020, 67, 1, []]
""")
def test_a_share_that_cannot_be_divided_well_is_a_warning(batch, tasks, nodes, parts):
    row = checked(
        data={"global_batch": batch},
        launch={"tasks_per_node": tasks, "nodes": nodes, "cpus_per_task": 3},
        engine={"max_micro_batch": 64},
    ).get("micro-batch")
    assert (row is None) == (parts == [])
    if row is not None:
        assert row.result == "warning"
        assert all(part in row.detail for part in parts)


def test_a_plan_that_fails_hides_no_other_error():
    schedule = {"steps": 5, "warmup_steps": 10}
    model = {"preset": "Ti/16", "num_classes": 9}
    text = describe(run_of(model=model, schedule=schedule))
    assert "\nerror       schedule.warmup_steps: 10 warm-up steps" in text

    staged = {"steps": 50, "freeze_backbone_steps": 1000, "backbone_ramp_steps": 9}
    text = describe(run_of(schedule=staged))
    assert "frozen for 1,000 steps, then its rate rises" in text

    # The checks go on where the plan has ended.
    detail = checked(model=model, schedule=schedule)["data"].detail
    assert detail.startswith("model.num_classes: 9 classes")


def test_an_evaluation_can_be_submitted():
    config = ROOT / "configs/eval/demo.yaml"
    overrides = ["launch.tasks_per_node=2", "model.num_heads=4"]
    run = load_run(EvaluateRun, config, overrides=overrides).run
    assert "evaluate: [{name: classification}, {name: knn}]" in describe(run)
    assert "\nmodel:\n  num_heads: 4\npreprocessing:" in run_to_yaml(run)

    script = batch_script(run)
    assert "#SBATCH --ntasks-per-node=2" in script
    assert "#SBATCH --job-name=demo-evaluation" in script

    # There are no shards here.
    results = {check.name: check.result for check in run_checks(run)}
    assert results == {"configuration": "ok", "data": "error"}


# ---- checks --------------------------------------------------------------------------------------


def test_a_run_that_fits_has_no_finding():
    checks = checked()
    assert {check.result for check in checks.values()} == {"ok"}, checks
    assert list(checks) == "configuration data loader cores disk".split()
    assert checks["data"].detail == "train: 16 samples in 4 shards; as in the manifest"
    assert checks["loader"].detail.startswith(
        "2.0 shards and 8 samples for each of 1 rank(s) x 2"
    )

    # 5.5 million parameters, each with two moments of AdamW.
    assert checks["disk"].detail.startswith("a checkpoint has 66.3 MB; ")


def test_damaged_shards_are_named(folder):
    sorted(folder.glob("*.tar"))[1].unlink()
    rows = run_checks(run_of())
    errors = [
        row.detail for row in rows if row.result == "error" and row.name == "data"
    ]
    assert any("tar: missing (No such file" in detail for detail in errors), rows


# Settings, the check that they fail, its result, and what it says.
@rows("""
- [changes, row, result, expected]
- [{launch: {nodes: 4}}, loader, warning, 4 shards for 4 rank(s) x 2]
- [{data: {global_batch: 32}}, loader, warning, 16 samples are less than one batch]
- [{launch: {}}, cores, warning, 1 core(s) per task for 1 training and 2 loader]
- [{data: {val_split: test}}, data, error, no split 'test']
- [{model: {preset: Ti/16, num_classes: 5}}, data, error, "5 classes, but the"]
- - objective: {name: distillation, teacher: {model: resnet10t, weights: t.pth}}
  - weights
  - warning
  - t.pth does not exist here
- - objective: {name: features, teachers: [{weights: a.pth}]}
  - weights
  - warning
  - a.pth does not exist here
- [{output: file/run}, disk, error, cannot write to]
- [{model: {preset: H/14, depth: 147456}}, disk, error, TB needed]
""")
def test_what_does_not_fit_is_named(
    folder,
    changes,
    row,
    result,
    expected,
):
    # A file where the run's folder would be.
    (folder.parent / "file").touch()
    check = checked(**changes)[row]
    assert check.result == result
    assert expected in check.detail
    assert check.next_step


def test_missing_data_may_be_planned_and_weights_written_later():
    # A job may be planned while its shards are still being made.
    checks = checked(data={"path": "elsewhere", "planned_num_samples": 1000})
    assert checks["data"].result == "warning"
    assert "1,000 samples" in checks["data"].detail
    assert checks["loader"].detail.startswith("500 samples for each")

    # A job that waits for another one starts from weights that do not exist yet.
    check = checked(stage="finetune", init="runs/later")["weights"]
    assert check.result == "warning"
    assert "runs/later does not exist here" in check.detail
    assert "weights" not in checked(stage="finetune", init=None)


EVALUATION = yaml.safe_load("""
{name: x, evaluate: [{name: classification}], data: {path: shards, val_split: train}}
""")


# Of each stage: its device, its precision, its shards, its folder, its weights. What a plan for a
# cluster only warns of is an error where the run starts at once.
@rows("""
- [stage, changes, message]
- [pretrain, {engine: {device: cuda}}, "engine.device: cuda needs a GPU, and this machine"]
- [pretrain, {engine: {precision: fp16}}, "engine.precision: fp16 needs a GPU"]
- [pretrain, {data: {val_split: lost}}, no split 'lost']
- [pretrain, {data: {path: lost, planned_num_samples: 9}}, "lost: no such folder"]
- [pretrain, {output: file/run}, cannot write to]
- [finetune, {init: runs/lost}, "init=runs/lost: no such run"]
- [finetune, {init: "hf://no-owner"}, is not OWNER/NAME]
- [evaluate, {init: runs/lost}, "init=runs/lost: no such run"]
- [evaluate, {init: shards, compute: {device: cuda}}, "compute.device: cuda needs a GPU"]
- [evaluate, {init: shards, data: {val_split: lost}}, no split 'lost']
- [evaluate, {init: shards, evaluate: [{name: knn}], data: {train_split: lost}}, no split 'lost']
""")
def test_what_this_machine_lacks_is_found_before_a_start(
    folder, monkeypatch, stage, changes, message
):
    """And nothing is written."""
    monkeypatch.setattr("launch.planning.dry_run.has_gpu", lambda: False)
    (folder.parent / "file").touch()
    if stage == "evaluate":
        values = EVALUATION | changes
        values["data"] = EVALUATION["data"] | changes.get("data", {})
        run = EvaluateRun.model_validate(values)
    else:
        run = run_of(stage, **changes)

    before = sorted(folder.parent.rglob("*"))
    with refused(message):
        check_here(run, num_procs=2)
    assert sorted(folder.parent.rglob("*")) == before


def test_a_resume_needs_no_initial_weights(folder):
    # The weights may be gone long since: the checkpoint has what became of them.
    Path("runs/x/checkpoints/step-00000001").mkdir(parents=True)
    check_here(run_of("finetune", init="runs/lost"), num_procs=2)


def test_errors_refuse_a_run_and_warnings_are_printed(capsys):
    missing = UserError("missing", where="a.tar")
    error = Check("data", "error", "missing", error=missing)
    warning = Check("cores", "warning", "too few", "ask for more")
    with pytest.raises(UserErrors) as raised:
        refuse_or_warn([error, warning])
    assert list(raised.value.errors) == [missing]

    # Alone, a warning stops nothing.
    refuse_or_warn([warning])
    assert capsys.readouterr().err == "warning: cores: too few\n  next: ask for more\n"


def test_shards_sorted_by_class_are_refused(tmp_path, monkeypatch):
    shards = write_shard_folder(
        tmp_path / "s",
        num_per_class=20,
        num_shards=20,
        classes=[str(number) for number in range(20)],
    )

    # Shards are shuffled within blocks; in small ones a batch would see few shards.
    monkeypatch.setattr("vitscale.data.order.BLOCK_SHARDS", 1)
    data = {"path": str(shards)}
    assert checked(data=data)["data"].result == "ok"

    # The same labels in the order of classes, as of tars that hold one class each.
    index = read_split(shards, split="train")
    by_class = index.records(0, 20).copy()
    by_class["label"].sort()

    def records(index, start, stop):
        first = index.ends[start - 1] if start else 0
        return by_class[first : index.ends[stop - 1]]

    monkeypatch.setattr(SplitIndex, "records", records)
    assert "sorted by class" in checked(data=data)["data"].detail


def test_a_sweep_opens_its_index_once(monkeypatch):
    """Whatever varies, but for the settings that choose samples."""
    opened = []

    def counted(path, **options):
        opened.append(options["split"])
        return read_split(path, **options)

    monkeypatch.setattr("vitscale.data.training_set.read_split", counted)
    known = {}

    def check(data, **changes):
        run = run_of(data=data, **changes)
        return by_name(run_checks(run, known=known))["data"]

    # An index may have a billion samples: to read it for each run would delay the submission.
    for i in range(50):
        varied = {
            "mean": [i / 100] * 3,
            "num_workers": i,
            "crop_area": [0.1, 0.5 + i / 100],
            "global_batch": 1 + i % 4,
            "repeats": 1 + i % 2,
        }
        assert check(varied, seed=i, optim={"lr": 1e-3 + i}).result == "ok"
    assert opened == ["train"]

    # Other samples are counted anew.
    assert "4 samples" in check({"first_percent": 25}).detail
    assert len(opened) == 2

    # Another run's checks know nothing of the shards as they were.
    known.clear()
    Path("shards/manifest.json").unlink()
    assert check({}).result == "error"
