"""`vitscale prepare targets`, and trainings from what it stores beside those with the teacher."""

import json
from pathlib import Path

import pytest
import yaml

from pretrain.run import PretrainRun, TargetsRun
from pretrain.targets import check_disk
from tests.support.ranks.fault_runs import fault, wait_all
from tests.support.ranks.run_states import differences, read_state
from tests.support.runs import OTHER_SHARDS, TINY, journal, run
from tests.support.tables import every, refused, rows
from tests.support.waiting import ROOT

pytestmark = pytest.mark.distributed

TRAIN = "pretrain/main.py"
PREPARE = "pretrain/prepare_targets.py"
# 48 images in two tars: as many views as 50 steps of 8 images have epochs.
STEPS = 50
VIEWS = 9


def differing(folder: Path, expected: Path) -> list[str]:
    """Names of files whose bytes differ, or that only one of two folders of targets has."""
    contents = [
        {
            str(path.relative_to(each)): path.read_bytes()
            for path in [each / "targets.json", *each.glob("view-*/*")]
        }
        for each in (folder, expected)
    ]
    names = contents[0].keys() | contents[1].keys()
    return [name for name in names if contents[0].get(name) != contents[1].get(name)]


class Trial:
    """A student of 4 x 4 patches that learns from a teacher on 2 x 2 of them."""

    def __init__(self, starter, folder: Path):
        self.starter = starter
        self.folder = folder
        # A short training of another width, which has patches.
        run(starter, TRAIN, folder / "teacher", "schedule.steps=6", "model.width=24")
        teacher = {"weights": str(folder / "teacher" / "run")}
        objective = {"name": "features", "teachers": [teacher], "patch_grid": [2, 2]}
        values = TINY | {"objective": objective, "evaluate": []}
        (folder / "features.yaml").write_text(yaml.safe_dump(values))

    def run(self, script: str, folder: Path, *words: str, **how) -> str:
        words = ("--config", str(self.folder / "features.yaml"), *words)
        output = folder if script == PREPARE else folder / "run"
        return run(self.starter, script, folder, *words, f"output={output}", **how)

    def prepare(self, folder: Path, *words: str, **how) -> str:
        words = ("stage=targets", f"views={VIEWS}", *words)
        return self.run(PREPARE, folder, *words, **how)

    def train(self, folder: Path, *words: str, targets: Path | None = None, **how):
        if targets is not None:
            words = (f"objective.targets={targets}", *words)
        return self.run(TRAIN, folder, f"schedule.steps={STEPS}", *words, **how)


@pytest.fixture(scope="module")
def trial(warm_starter, tmp_path_factory) -> Trial:
    return Trial(warm_starter, tmp_path_factory.mktemp("trial"))


@pytest.fixture(scope="module")
def exact(trial) -> Path:
    """Targets in fp32, by two ranks."""
    folder = trial.folder / "exact"
    trial.prepare(folder, "precision=fp32", num_ranks=2)
    return folder


def test_preparation_says_what_it_does(trial, tmp_path):
    output = trial.prepare(tmp_path / "a", "--dry-run")
    # 5 vectors of 24 numbers of 2 bytes, and a hash, of 9 views of 48 images.
    num_bytes = (5 * 24 * 2 + 8) * 9 * 48
    assert "9 views of 48 images, bf16, 248 bytes each\n" in output
    assert f"missing: 432 crops, {num_bytes:,} bytes; forward passes of 1" in output
    # Of the teacher's 17 tokens: multiply-adds of patches, two blocks and their attention.
    block = 17 * (4 * 24**2 + 2 * 24 * 32) + 2 * 17**2 * 24
    flops = 2 * (16 * 12 * 24 + 2 * block)
    assert f" teacher(s): {432 * flops:.3g} FLOPs" in output
    assert not [*(tmp_path / "a").glob("view*")]

    output = trial.prepare(tmp_path / "a")
    assert "complete\nnext: vitscale pretrain CONFIG objective.targets=" in output
    sizes = [path.stat().st_size for path in (tmp_path / "a").glob("view-*/*.bin")]
    assert sum(sizes) == num_bytes
    assert "missing: 0 crops, 0 bytes" in trial.prepare(tmp_path / "a")


def test_killed_and_resumed_preparation_has_the_same_bytes(trial, exact, tmp_path):
    """With workers, and in other batches; a file that became shorter is made again, too."""
    folder = tmp_path / "a"
    words = ("precision=fp32", "engine.max_micro_batch=5")
    trial.prepare(folder, *words, faults={0: [fault("targets", 40, "kill")]})
    num_done = len([*folder.glob("view-*/0*.bin")])
    assert 0 < num_done < 18
    assert [*folder.glob("view-*/.*.tmp")]
    assert json.loads((folder / "targets.json").read_text())["files"] == {}

    (folder / "view-0/0-000000.bin").write_bytes(b"short")
    trial.prepare(folder, *words, "data.num_workers=1")
    assert differing(folder, exact) == []
    assert not [*folder.glob("view-*/.*.tmp")]


@pytest.mark.slow
@every(num_ranks=[1, 2])
def test_losses_are_those_of_the_live_teacher(trial, exact, tmp_path, num_ranks):
    """To the bit, as the weights are; also where the training is killed and resumed."""
    trial.train(tmp_path / "live", num_ranks=num_ranks)
    every_10 = "checkpoint.every_steps=10"
    killed = {0: [fault("step", 27, "kill")]}
    stored = tmp_path / "stored"
    how = {"num_ranks": num_ranks, "targets": exact}
    trial.train(stored, every_10, faults=killed, **how)
    trial.train(stored, every_10, **how)

    ours = read_state(stored / "run")
    assert ours.step == STEPS
    # Only one of the two names its targets, and saves more often.
    lines = differences(ours, read_state(tmp_path / "live/run"))
    assert [line for line in lines if not line.startswith("description targets")] == []


# What rounding changes: values of a vector, by its largest one; the losses of 50 steps.
ROUNDING = """
- [precision, losses]
- [bf16, 1.0e-3]
- [int8, 1.0e-3]
"""


@pytest.mark.slow
@rows(ROUNDING)
def test_rounded_targets_change_losses_a_little(
    trial, exact, tmp_path, precision, losses
):
    trial.prepare(tmp_path / "a", f"precision={precision}")
    trial.train(tmp_path / "exact", targets=exact)
    trial.train(tmp_path / "rounded", targets=tmp_path / "a")
    curves = [
        journal(tmp_path / name / "run", "train/loss")["train/loss"]
        for name in ("exact", "rounded")
    ]
    changes = [abs(one / other - 1) for one, other in zip(*curves, strict=True)]
    assert 0 < max(changes) < losses, max(changes)


# ---- what is refused: one error, before the first step -----------------------------------------

REFUSED = """
- [words, message]
- [["seed=1"], "seed: targets 0, this run 1"]
- [["data.crop_area=[0.1, 1.0]"], "crop_area"]
- [["data.path={other}"], "shards"]
- [["data.repeats=2"], "data.repeats"]
- [["data.mixing.mixup_alpha=0.8"], "data.mixing"]
- [["objective.patch_grid=[4, 4]"], "patch_grid"]
- [["objective.targets={missing}"], "there are no targets"]
"""


def code_and_output(trial, script: str, folder: Path, *words: str) -> tuple[int, str]:
    """Of a start that is to be refused."""
    command = [ROOT / script, "--config", trial.folder / "features.yaml", *words]
    output = folder if script == PREPARE else folder / "run"
    folder.mkdir(parents=True, exist_ok=True)
    (rank,) = trial.starter.start(
        [*map(str, command), f"output={output}"], num_ranks=1, folder=folder
    )
    return wait_all([rank])[0], rank.output()


@rows(REFUSED)
def test_targets_that_do_not_fit_are_refused(trial, exact, tmp_path, words, message):
    places = {"other": OTHER_SHARDS, "missing": tmp_path / "nothing"}
    words = [word.format(**places) for word in words]
    words = [f"objective.targets={exact}", *words]
    code, output = code_and_output(trial, TRAIN, tmp_path, *words)
    assert code == 2
    assert message in output
    assert "Traceback" not in output


def test_another_teacher_is_refused(trial, exact, tmp_path, warm_starter):
    run(warm_starter, TRAIN, tmp_path / "other", "schedule.steps=7", "model.width=24")
    teachers = f"objective.teachers=[{{weights: {tmp_path / 'other/run'}}}]"
    words = (f"objective.targets={exact}", teachers)
    code, output = code_and_output(trial, TRAIN, tmp_path / "a", *words)
    assert code == 2
    assert "are of teachers" in output

    # Nor are its targets mixed with those of the first one.
    command = (
        PREPARE,
        exact,
        "stage=targets",
        "precision=fp32",
        f"views={VIEWS}",
        teachers,
    )
    code, output = code_and_output(trial, *command)
    assert (code, "teachers" in output) == (2, True)


def test_a_run_goes_on_with_the_targets_that_it_began_with(trial, exact, tmp_path):
    trial.train(tmp_path, "schedule.steps=6", targets=exact)
    trial.prepare(tmp_path / "bf16")
    words = ("schedule.steps=8", f"objective.targets={tmp_path / 'bf16'}")
    code, output = code_and_output(trial, TRAIN, tmp_path, *words)
    assert code == 2
    assert "targets: checkpoint" in output


@rows("""
- [changes, key]
- [{objective: {name: mae}}, objective]
- [{objective: {name: features, targets: x, patch_weight: 0.0}}, objective]
- [{objective: {name: features, teachers: [{weights: x}]}}, objective.patch_grid]
- [{data: {reader: webdataset}}, data.reader]
- [{data: {repeats: 2}}, data.repeats]
- [{data: {mixing: {mixup_alpha: 0.8}}}, data.mixing]
""")
def test_what_cannot_be_prepared(changes, key):
    teacher = {"weights": "x"}
    objective = {"name": "features", "teachers": [teacher], "patch_weight": 0.0}
    values = TINY | {"output": "t", "objective": objective} | changes
    values["data"] = TINY["data"] | changes.get("data", {})
    assert key in dict(TargetsRun.model_validate(values).problems())
    # Nor can a training read their targets.
    if "data" in changes:
        values["objective"] = objective | {"targets": "x"}
        del values["output"]
        assert key in dict(PretrainRun.model_validate(values).problems())


def test_a_disk_that_is_too_small_is_refused_before_the_start(tmp_path):
    check_disk(tmp_path / "new/targets", 1000)
    with refused(r"need 1,000,000,000,000,000 bytes, and [\d,]+ are free"):
        check_disk(tmp_path / "new/targets", 10**15)
