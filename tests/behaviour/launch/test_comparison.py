"""Comparing runs: budgets, seeds, tables, files, the page; sending them."""

import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from launch.comparison.differences import (
    NOTHING,
    Budget,
    Comparison,
    Points,
    compare,
    parse_budget,
    varied_settings,
)
from launch.comparison.page import MAX_CLASSES, MAX_POINTS, render
from launch.comparison.report import Table, tables, write_json
from launch.comparison.runs import ComparedRun, load_runs
from launch.comparison.sync import final_status, sync
from launch.jobs.attempts import ATTEMPT, Ending, Outcome, begin_attempt, end_attempt
from launch.jobs.run_states import read_state
from pretrain.run import PretrainRun
from tests.support.run_folders import logged_run
from tests.support.tables import every, refused, rows
from vitscale.config.errors import UserErrors
from vitscale.config.loader import load_run, run_to_yaml
from vitscale.distributed.events import append_event
from vitscale.evaluation.evaluation import Share
from vitscale.evaluation.metric_texts import difference
from vitscale.models.costs import train_flops_per_image
from vitscale.tracking.journal import Row
from vitscale.tracking.mlflow_sync import RunRecord

HOUR = 3600.0
EVIL = "</script><!--<script>alert(1)</script>&<img src=x onerror=alert(1)> $\\x$ \x07"


def logged(*metrics, label="a", every=1, folder=None, **params) -> ComparedRun:
    """A run with these metrics of its steps, of each or of some, one second each."""
    rows = []
    for number, of_step in enumerate(metrics, start=1):
        step = every * number
        rows.append(Row(step=step, time=float(step), metrics=of_step))
    return ComparedRun(
        label=label,
        source=label,
        folder=folder,
        params=params,
        rows=tuple(rows),
    )


def run(label, top1, *, batch=8, **more) -> ComparedRun:
    """A run that evaluates every ten steps. more: parameters, or its folder."""
    metrics = [{"val/top1": value, "val/zero": 0.0} for value in top1]
    batches = {"data.global_batch": str(batch)}
    return logged(*metrics, label=label, every=10, **batches, **more)


def runs_of(facts) -> list[ComparedRun]:
    """Runs by their labels. facts: per label its accuracies and parameters, or YAML of them."""
    if isinstance(facts, str):
        facts = yaml.safe_load(facts)
    return [run(label, **of_run) for label, of_run in facts.items()]


# ---- budgets and metrics ----------------------------------------------------------------------


def values(points: Points):
    return [point.value if point.steps else None for point in points]


def test_runs_of_different_length_are_compared_at_equal_steps():
    long = run("long", [0.2, 0.4, 0.9])
    short = run("short", [0.3, 0.5])
    compared = compare([long, short])
    assert compared.budget == Budget(axis="steps", total=20)
    line = compared.metrics[0]
    assert values(line.final) == [0.9, 0.5]
    assert values(line.equal) == [0.4, 0.5]

    # Of equal length the final values say it all.
    one = run("a", [0.2])
    two = run("b", [0.3])
    assert compare([one, two]).budget is None


def test_equal_samples_are_fewer_steps_of_larger_batches():
    """Between two evaluations the value is on the line between them."""
    small = run("small", [0.2, 0.4, 0.6, 0.8])
    large = run("large", [0.3, 0.5], batch=16)
    runs = [small, large]
    assert compare(runs, axis="samples").budget == Budget(axis="samples", total=320)

    # A total that went through division counts as the step, and a smaller one does not.
    for total in (320.0, 240.0, 200.0, 160 - 1e-8, 160 - 1e-5, 100.0, 80.0, 79.0):
        equal = compare(runs, axis="samples", total=total).metrics[0].equal
        for compared, point, start in zip(runs, equal, (80, 160), strict=True):
            if total < start - 1e-6:
                assert point == NOTHING
                continue
            samples = compared.totals["samples"]
            top1 = [value for _, value in compared.series("val/top1")]
            assert point.value == pytest.approx(np.interp(total, samples, top1))

    # The steps between which a value lies are shown with it.
    line = compare(runs, axis="samples", total=240).metrics[0]
    assert [point.steps for point in line.equal] == [(30,), (10, 20)]

    with refused("flops of run small are not known"):
        compare(runs, axis="flops")
    with refused("not all runs have reached 30 steps"):
        compare(runs, axis="steps", total=30)


def test_a_value_of_another_step_is_never_shown_without_that_step():
    """Evaluated at 2 and 4, or at 2 alone, of 5 steps; next to NaN there is nothing between."""
    late = logged({}, {"val/top1": 0.5}, {}, {"val/top1": 0.7}, {}, label="late")
    lost = logged({}, {"val/top1": 0.4}, {}, {"val/top1": math.nan}, {}, label="lost")
    once = logged({"x": 1.0}, {"val/top1": 0.3}, {"x": 1.0}, label="once")
    runs = [late, lost, once]

    # The shortest has three steps, and none was evaluated there.
    (table,) = titled(compare(runs), "At equal")
    expected = ("60.0 % (step 2 to 4) *", "40.0 % (step 2)", "30.0 % (step 2)")
    assert table.rows == (("val/top1", *expected),)

    text = verdict(*runs)
    assert text.startswith(
        "late is best: val/top1 70.0 % (step 4); next is once, 30.0 % (step 2)."
    )
    equal = "At equal cost, 3 steps: late 60.0 % (step 2 to 4), lost 40.0 % (step 2),"
    assert equal in text


def titled(compared: Comparison, start) -> list[Table]:
    """The tables whose title begins so."""
    return [table for table in tables(compared) if table.title.startswith(start)]


def test_budgets_are_read():
    assert parse_budget("steps") == ("steps", None)
    assert parse_budget("FLOPs=1.5e18") == ("flops", 1.5e18)

    # No axis, no number, none that a run could reach.
    for text in ("", *"epochs steps= steps=0 steps=-1 steps=1e999 hours=1.2.3".split()):
        with refused("is not a budget"):
            parse_budget(text)


# The values of a metric, and the best one: the lowest of losses and waiting, the highest of
# accuracies and speeds, none where no direction is known (lr).
SERIES = yaml.safe_load("""
train/loss: [[.nan, 3.0, 2.0, -.inf, 4.0], 2.0]
val/top1: [[.nan, 0.5, 0.75, .inf, 0.25], 0.75]
val/ema_top1: [[.nan, .nan, .nan, .nan, .nan], null]
train/lr: [[0.1, 0.2, 0.1, 0.2, 0.1], null]
x/data_wait: [[3.0, 1.0, 4.0, 1.0, 5.0], 1.0]
x/error: [[3.0, 1.0, 4.0, 1.0, 5.0], 1.0]
x/mfu: [[3.0, 1.0, 4.0, 1.0, 5.0], 5.0]
x/images_per_s: [[3.0, 1.0, 4.0, 1.0, 5.0], 5.0]
x/top5: [[3.0, 1.0, 4.0, 1.0, 5.0], 5.0]
x/real_accuracy: [[3.0, 1.0, 4.0, 1.0, 5.0], 5.0]
""")


def test_the_best_value_follows_the_direction_and_is_finite():
    rows = [
        {name: series[step] for name, (series, _) in SERIES.items()}
        for step in range(5)
    ]
    lines = compare([logged(*rows)]).metrics
    best = {line.key: values(line.best) for line in lines}
    assert best == {name: [value] for name, (_, value) in SERIES.items()}


def test_the_best_value_of_several_runs_is_marked_and_vitals_are_not_judged():
    first = logged({"train/loss": 2.0, "val/top1": 0.5, "vitals/data_wait": 0.1})
    second = logged({"train/loss": 1.5, "vitals/data_wait": 0.2})
    third = logged({"train/loss": math.nan, "val/top1": 0.25})
    cells = {}
    for table in tables(compare([first, second, third])):
        for name, *texts in table.rows:
            cells[name] = texts
    assert cells["val/top1"] == ["50.0 % *", "-", "25.0 %"]
    assert cells["train/loss"] == ["2", "1.5 *", "nan"]

    # The speed of a machine says nothing of a model.
    assert cells["vitals/data_wait"] == ["10.0 %", "20.0 %", "-"]


def test_only_differing_parameters_are_listed():
    params = {"seed": "7", "optim.lr": "0.1"}
    first = logged({}, **params)
    second = logged({}, **params | {"optim.lr": "0.2", "x": "3"})
    compared = compare([first, second])
    assert compared.params == (
        ("optim.lr", ("0.1", "0.2")),
        ("x", (None, "3")),
    )
    assert compared.num_equal_params == 1

    # Nothing can differ within one run: all it has is listed.
    assert len(compare([first]).params) == 2

    # What people change first comes first.
    names = "schedule.steps data.path model.image_size seed optim.lr evaluate init_patch init"
    one = logged({}, **dict.fromkeys(names.split(), "a"))
    two = logged({}, **dict.fromkeys(names.split(), "b"))
    order = "init model.image_size data.path optim.lr schedule.steps seed evaluate init_patch"
    listed = [key for key, _ in compare([one, two]).params]
    assert listed == order.split()

    # Where a run writes and what a chain calls it change no result.
    other = logged({}, **params | {"output": "c", "tracking.tags.chain": "s"})
    assert compare([first, other]).params == ()


# ---- what was spent ---------------------------------------------------------------------------


def test_waits_between_attempts_are_no_hours(tmp_path):
    # From hour 0.5 to 2, from 5 to 6, and from 6 on, without a recorded end.
    attempts = [(0.5, 2.0), (5.0, 6.0), (6.0, None)]
    for number, (start, end) in enumerate(attempts, start=1):
        facts = yaml.safe_load(
            "{cluster: slurm, job_id: '1', restart: 0, num_tasks: 1, first_step: 0}"
        )
        facts |= {"number": number, "started": start * HOUR}
        if end:
            facts["ended"] = end * HOUR
        append_event(tmp_path, ATTEMPT, facts)

    # Hours of steps 1 to 4; they are counted from the first line of the journal on.
    times = {1: 1.0, 2: 2.0, 3: 5.5, 4: 7.0}
    rows = tuple(Row(step=s, time=t * HOUR, metrics={}) for s, t in times.items())
    compared = ComparedRun(
        label="",
        source="",
        params={},
        rows=rows,
        folder=tmp_path,
    )
    assert compared.totals["hours"] == pytest.approx([0.0, 1.0, 1.5, 3.0])
    assert compared.totals.keys() == {"steps", "hours"}


def test_flops_are_those_of_the_model(tmp_path):
    overrides = """
        stage=pretrain name=x data.path=shards data.global_batch=8 schedule.steps=30 optim.lr=0.1
        model.image_size=32 model.patch_size=4 model.width=64 model.depth=2 model.num_heads=2
        model.mlp_width=128
    """.split()
    loaded = load_run({"pretrain": PretrainRun}, None, overrides=overrides).run
    config = tmp_path / "config.yaml"
    config.write_text(run_to_yaml(loaded))
    # The size of the head follows from the classes of the run.
    (tmp_path / "classes.json").write_text(json.dumps(["a", "b"]))
    flops = train_flops_per_image(loaded.model.resolved(num_classes=2))
    totals = run("a", [0.1, 0.2], folder=tmp_path).totals
    assert totals["samples"] == [80, 160]
    assert totals["flops"] == [80 * flops, 160 * flops]

    # A configuration of another version is read as far as it goes.
    config.write_text("stage: pretrain\nunknown: 1\n")
    assert "flops" not in run("a", [0.1], folder=tmp_path).totals


# ---- seeds ------------------------------------------------------------------------------------


def test_runs_that_differ_in_the_seed_alone_are_one_group():
    # The last two have other initial weights, which differ in the seed alone.
    runs = runs_of("""
    a-0: {top1: [0.5], seed: "0", name: a-0}
    b-0: {top1: [0.9], seed: "0", name: b-0, lr: "1"}
    a-1: {top1: [0.7], seed: "1", name: a-1}
    a-1-again: {top1: [0.6], seed: "1", name: a-2}
    no seed: {top1: [0.6]}
    t-0: {top1: [0.5], seed: "0", name: t-0, init: runs/pretrain_seed0}
    t-1: {top1: [0.5], seed: "1", name: t-1, init: runs/pretrain_seed1}
    """)
    compared = compare(runs)
    assert list(compared.seeds.values()) == [(0, 2, 3), (5, 6)]

    # 50, 70 and 60 %: the mean, and the deviation of a sample.
    (table,) = titled(compared, "Over seeds")
    assert table.rows == (("val/top1", "60.0 % ± 10.0 %", "50.0 % ± 0.0 %"),)

    # The same seed again is no second seed.
    assert compare([runs[2], runs[3]]).seeds == {}


def test_runs_of_a_chain_are_told_by_their_stage(tmp_path):
    names = ["evaluate/lr-1", "finetune/lr-1", "pretrain/seed-0", "scratch"]
    for name in names:
        logged_run(tmp_path / name)
    labels = [run.label for run in load_runs([str(tmp_path)], uri=None)]
    assert sorted(labels) == names

    # Of single folders the last part would be the same.
    folders = [f"{tmp_path}/{name}" for name in names[:2]]
    labels = [run.label for run in load_runs(folders, uri=None)]
    assert labels == names[:2]

    # Of two chains, by the chain too.
    chains = [f"{tmp_path}/small", f"{tmp_path}/large"]
    for chain in chains:
        logged_run(Path(chain) / "pretrain/seed-0")
    labels = [run.label for run in load_runs(chains, uri=None)]
    assert labels == ["small/pretrain/seed-0", "large/pretrain/seed-0"]


def test_runs_of_a_chain_vary_in_its_keys():
    """Each stage alone, and not in what follows from the keys, such as the initial weights."""
    tags = "tracking.tags.chain"
    runs = []
    expected = []
    for stage in ("a", "b"):
        for percent in (1, 10):
            text = str(percent)
            chain = {
                f"{tags}.stage": stage,
                f"{tags}.a.first_percent": text,
                f"{tags}.a.seed": text,
            }
            # Weights and seed follow from the share.
            params = {
                "init": f"runs/{text}",
                "seed": text,
                **chain,
            }
            runs.append(run(f"{stage}-{text}", [percent / 100], **params))
            expected.append({"a.first_percent": text, "stage": stage})
    assert varied_settings(runs) == expected


# ---- tables and files -------------------------------------------------------------------------


def test_the_file_has_every_run_and_metric(tmp_path):
    longer = run("a", [0.2, 0.4, math.nan])
    shorter = run("b", [0.3])
    compared = compare([longer, shorter])
    assert tables(compared)[0].rows[1][4:6] == ("10", "0.0 min")

    path = tmp_path / "c.json"
    write_json(compared, path)
    stored = json.loads(path.read_text())
    steps = {compared["label"]: compared["steps"] for compared in stored["runs"]}
    assert steps == {"a": 30, "b": 10}
    assert stored["budget"] == {"axis": "steps", "total": 10.0}
    line = stored["metrics"][0]
    assert [point["value"] for point in line["equal"]] == [0.2, 0.3]
    assert [point["value"] for point in line["best"]] == [0.4, 0.3]

    # JSON has no NaN, and null would mean that there is no value.
    assert line["final"] == [
        {"value": "NaN", "steps": [30]},
        {"value": 0.3, "steps": [10]},
    ]
    with refused("cannot be written"):
        write_json(compared, path / "c.json")


def test_a_result_of_zero_is_a_result():
    # 0 is false in Python, and easily taken for a missing value.
    metrics = tables(compare([run("a", [0.0])]))[1]
    assert metrics.rows == (("val/top1", "0.0 %"),)


# ---- the page ---------------------------------------------------------------------------------


def verdict(*runs: ComparedRun):
    """Its sentences without marks of HTML."""
    page = render(compare(runs))
    match = re.search(r'<p class="verdict">(.*?)<h2>', page, re.DOTALL)
    return re.sub(r"<[^>]*>", "", match[1])


def figures(page):
    """The data of the page's charts."""
    texts = re.findall(r'data-figure="([^"]*)"', page)
    return [json.loads(html.unescape(text)) for text in texts]


def test_the_accuracy_decides_and_not_the_loss():
    text = verdict(
        logged({"val/loss": 0.1, "val/top1": 0.5}, label="a", lr="1", name="a"),
        logged({"val/loss": 0.3, "val/top1": 0.75}, label="b", lr="2", name="b"),
    )
    assert text.splitlines()[0] == "b is best: val/top1 75.0 %; next is a, 50.0 %."
    assert "They differ in lr (2 against 1)." in text


# Runs, what the verdict says, and what it does not say.
VERDICTS = yaml.safe_load(r"""
a run without a key, or with none of its own:
- a: {top1: [0.7], init: runs/x, optim.ema: "0.9"}
  b: {top1: [0.6], init: "null", init_patch: same}
- - "differ in init (runs/x against random weights), optim.ema (0.9 against none), init_patch \
    (none against same)."
- [equal cost]
equal:
- {a: {top1: [0.5]}, b: {top1: [0.5]}}
- ["a and b are equal: val/top1 50.0 %."]
- [is best]
other batches:
- {a: {top1: [0.5]}, b: {top1: [0.6], batch: 16}}
- ["not seen equally many samples: compare them with --at samples"]
- []
# And not equal steps, nor the best values, which are said.
the ends decide:
- {short: {top1: [0.6, 0.69]}, long: {top1: [0.5, 0.55, 0.76, 0.74]}}
- - "long is best: val/top1 74.0 % (step 40); next is short, 69.0 % (step 20).\n\
    At equal cost, 20 steps: short 69.0 % (step 20), long 55.0 % (step 20).\n"
  - "By the best values: long 76.0 % (step 30), short 69.0 % (step 20)."
- [samples]
# The best single run is of the worse setting.
two seeds each:
- low-0: {top1: [0.2], seed: "0", lr: "1"}
  low-1: {top1: [0.9], seed: "1", lr: "1"}
  high-0: {top1: [0.6], seed: "0", lr: "2"}
  high-1: {top1: [0.7], seed: "1", lr: "2"}
- - "high-0 and 1 more is best: val/top1 65.0 % ± 7.1 %; next is low-0 and 1 more"
  - differ in lr (2 against 1).
  - within the spread of the seeds (49.5 %)
- [there is one seed]
two groups:
- &groups
  <<: &high
    A0: {top1: [0.7], seed: "0", lr: A}
    A1: {top1: [0.71], seed: "1", lr: A}
  B0: {top1: [0.6], seed: "0", lr: B}
  B1: {top1: [0.61], seed: "1", lr: B}
- ["A0 and 1 more is best: val/top1 70.5 % ± 0.7 %; next is B0 and 1 more, 60.5 %"]
- [within the spread]
one seed is best:
- {<<: *groups, C0: {top1: [0.9], seed: "5", lr: C}}
- - "C0 is best: val/top1 90.0 %; next is A0 and 1 more, 70.5 % ± 0.7 %."
  - "differ in lr ("
  - Of C0 there is one seed
- []
one seed is between the groups:
- {<<: *groups, C0: {top1: [0.65], seed: "5", lr: C}}
- - "A0 and 1 more is best: val/top1 70.5 % ± 0.7 %; next is C0, 65.0 %."
  - "differ in lr ("
  - Of C0 there is one seed
- []
one seed is last:
- {<<: *groups, C0: {top1: [0.1], seed: "5", lr: C}}
- - "A0 and 1 more is best: val/top1 70.5 % ± 0.7 %; next is B0 and 1 more, 60.5 %"
  - "differ in lr ("
- [Of C0 there is one seed]
the largest spread counts:
- <<: *groups
  C0: {top1: [0.1], seed: "0", lr: C}
  C1: {top1: [0.5], seed: "1", lr: C}
- [within the spread of the seeds (28.3 %)]
- []
one group and one seed:
- {<<: *high, C0: {top1: [0.9], seed: "0", lr: C}}
- [C0 is best]
- []
one group alone:
- *high
- ["A0 and 1 more has val/top1 70.5 % ± 0.7 %.\n"]
- [is best]
""")


@every(case=VERDICTS)
def test_the_verdict_names_the_best_setting_and_why(case):
    runs, said, unsaid = VERDICTS[case]
    text = verdict(*runs_of(runs))
    for part in said:
        assert part in text
    for part in unsaid:
        assert part not in text


def test_with_a_budget_its_step_decides():
    """Half way between two evaluations; nothing else is said of equal cost."""
    runs, _, _ = VERDICTS["the ends decide"]
    page = render(compare(runs_of(runs), axis="steps", total=15))
    best = "short is best at 15 steps: val/top1 64.5 % (step 10 to 20); next is long, 52.5 %"
    assert best in page
    assert "At equal cost, " not in page.partition("<h2>")[0]


def test_a_difference_is_within_chance_where_its_interval_holds_zero():
    # Newcombe's pair, and one with five fewer right.
    assert difference(Share(48, 80), Share(56, 70)).endswith("more than chance")
    assert difference(Share(48, 80), Share(51, 70)).endswith("within chance")


def on_data(compared: ComparedRun, data) -> ComparedRun:
    """The run with a record of the images that it was evaluated on."""
    return replace(compared, tags={"vitscale.val_data": data})


# The share of the better and of the other run, images, and what is said. Newcombe 1998, table II,
# has 0.0524 to 0.3339 for 56 of 70 and 48 of 80, which only differ by more than chance.
@rows("""
- [better, other, images, text]
- [0.70647, 0.69154, 201, "3 of 201 images: within chance"]
- [0.99, 0.5, 100, "49 of 100 images: more than chance"]
- [0.8, 0.8, 50, "0 of 50 images: within chance"]
- [1.0, 0.9, 20, "2 of 20 images: within chance"]
- [0.502, 0.498, "1,000,000", "4,000 of 1,000,000 images: more than chance"]
""")
def test_the_verdict_says_what_chance_explains(better, other, images, text):
    one = run("a", [better])
    two = run("b", [other])
    data = f"digits/test, {images} images, 12ab"
    line = f"The difference is {text}."
    assert line in verdict(on_data(one, data), on_data(two, data))

    # Nothing is known of other images, and of no images.
    unknown = verdict(on_data(one, "other, 9 images, 34cd"), two)
    assert "The difference" not in unknown
    assert "different images" not in unknown


def test_runs_on_different_images_are_not_compared_by_chance():
    # As after a correction of labels between two runs: no statistics make up for it.
    one = on_data(run("a", [0.9]), "a, 100 images, a")
    two = on_data(run("b", [0.2]), "b, 100 images, b")
    images = "evaluated on different images: a, 100 images, a; b, 100 images, b."
    assert f"The difference is not comparable, {images}" in verdict(one, two)

    # Nor is what a training has brought, where the one before it saw others.
    tuned = replace(started("tuned", 0.9, init="runs/b"), tags=one.tags)
    before = replace(started("b", 0.2), tags=started("b", 0.2).tags | two.tags)
    assert "to 90.0 %, not comparable, evaluated" in verdict(before, tuned)


def started(name, top1, *, init="null", images=201) -> ComparedRun:
    tags = {
        "vitscale.run_folder": f"/cluster/runs/{name}",
        "vitscale.val_data": f"x, {images} images, 1",
    }
    return replace(run(name, [top1], init=init), tags=tags)


# Ways to name the folder of a run, or a checkpoint in it, from several working folders.
@rows("""
- [init]
- [runs/first]
- [./runs/first/]
- [/cluster/runs/first]
- [runs/first/checkpoints/step-00000400]
- [../runs/first]
- [runs/first@400]
""")
def test_a_fine_tuning_is_no_rival_of_what_it_started_from(init):
    first = started("first", 0.741)
    worse = verdict(first, started("tuned", 0.692, init=init))
    assert worse.splitlines() == [
        "tuned started from first and is worse: val/top1 from 74.1 % to 69.2 %, "
        "10 of 201 images: within chance."
    ]

    # Beside others it competes, and its start does not.
    runs = [first, started("tuned", 0.9, init=init), started("scratch", 0.5)]
    text = verdict(*runs)
    lines = text.splitlines()
    assert lines[0] == "tuned is best: val/top1 90.0 %; next is scratch, 50.0 %."
    assert "\ntuned started from first and is better: val/top1 from 74.1 %" in text
    table = tables(compare(runs))[0]
    assert table.header[-1] == "started from"
    origin = "first"
    if "@" in init:
        origin = "branch of runs/first at step 400"
    assert [row[-1] for row in table.rows] == ["-", origin, "-"]


# No start, the run's label without its folder, other folders, a file that was exported elsewhere,
# and part of a name.
@rows("""
- [init]
- ["null"]
- [first]
- [other/first]
- [runs/firs]
- [runs/first/model.safetensors]
- [irst]
""")
def test_what_starts_elsewhere_is_a_rival(init):
    text = verdict(started("first", 0.741), started("tuned", 0.692, init=init))
    is_rival = text.startswith("first is best: val/top1 74.1 %; next is tuned, 69.2 %.")
    assert is_rival == (init != "first")


def test_runs_without_the_metric_are_named():
    def steps(number, top1, label, **params):
        return logged(*[{"val/top1": top1}] * number, label=label, **params)

    short = steps(4, 0.5, "short")
    other = steps(5, 0.25, "other")
    lost = steps(8, math.nan, "lost")

    # One is evaluated after the others have ended, one not at all.
    long = [{"x": 1.0}] * 7
    late = logged(*long, {"val/top1": 0.9}, label="late")
    never = logged(*long, label="never")
    runs = (short, late, never, lost, other)
    page = html.unescape(render(compare(runs, axis="steps")))
    for sentence in (
        "short is best at 4 steps: val/top1 50.0 % (step 4); next is other, 25.0 % (step 4).",
        "Not ranked at 4 steps, since they have no finite val/top1: late, never, lost.",
    ):
        assert f">{sentence}</p>" in page
    assert "late is best: val/top1 90.0 % (step 8)" in verdict(*runs)

    # One of two seeds has diverged: the mean is of the other one, which is said.
    good = steps(1, 0.5, "s0", seed="0")
    diverged = steps(1, math.nan, "s1", seed="1")
    text = verdict(good, diverged)
    assert "Not ranked, since they have no finite val/top1: s1." in text

    # Of many the first five are named.
    many = [logged({"x": 1.0}, label=f"never{i}") for i in range(11)]
    assert "never3, never4 and 6 more." in verdict(short, *many)


def test_evaluations_have_no_length():
    """That of external weights is at step 0, where no training has anything."""

    def evaluated(label, step, top1):
        row = Row(
            step=step,
            time=1.0,
            metrics={"val/top1": top1},
        )
        params = {"stage": "evaluate"}
        return ComparedRun(
            label=label,
            source=label,
            params=params,
            rows=(row,),
        )

    a = run("a", [0.5, 0.6])
    b = run("b", [0.5, 0.7])
    trained = [a, b]
    outside = evaluated("hub", 0, 0.9)

    # With a length of 0 steps, every training would be compared before its first one.
    compared = compare([*trained, outside])
    assert compared.budget is None
    assert values(compared.metrics[0].equal) == [0.6, 0.7, 0.9]
    text = verdict(*trained, outside)
    assert text.startswith("b is best: val/top1 70.0 %; next is a, 60.0 %.")

    # At a budget of the trainings it keeps its one value.
    shorter = compare([*trained, run("c", [0.4]), outside])
    assert shorter.budget.total == 10
    assert values(shorter.metrics[0].equal) == [0.5, 0.5, 0.4, 0.9]

    # Evaluations of different steps are compared as they are.
    text = verdict(outside, evaluated("own", 9, 0.8))
    assert text.startswith("hub is best: val/top1 90.0 %; next is own, 80.0 %.")


def chain_run(chain, width, seed, top1) -> ComparedRun:
    params = {
        "seed": str(seed),
        "model.width": width,
        "tracking.tags.chain": chain,
        "tracking.tags.chain.stage": "pretrain",
        "tracking.tags.chain.pretrain.seed": str(seed),
    }
    return run(f"{width}/seed-{seed}", [top1], **params)


@pytest.mark.parametrize("names", [("small", "large"), ("same", "same")])
def test_two_chains_are_two_groups(names):
    """Also of one name in two folders, made with other settings."""
    runs = [
        chain_run(name, width, seed, top1 + seed / 100)
        for name, width, top1 in zip(names, ("64", "256"), (0.5, 0.8), strict=True)
        for seed in (0, 1)
    ]
    two_groups = [(0, 1), (2, 3)]
    assert list(compare(runs).seeds.values()) == two_groups

    # Seeds alone: one group.
    assert list(compare(runs[:2]).seeds.values()) == two_groups[:1]

    # An evaluation has no seed of its own.
    evaluations = []
    for trained in runs:
        params = {**trained.params, "init": "x"}
        del params["seed"]
        evaluations.append(replace(trained, params=params))
    assert list(compare(evaluations).seeds.values()) == two_groups


def test_evaluations_are_not_ranked_beside_trainings():
    a = run("a", [0.5], lr="a")
    b = run("b", [0.6], lr="b")
    params = {"stage": "evaluate", "k": "20"}
    evaluation = replace(run("e", [0.7]), params=params)
    every = [evaluation, a, b]

    # It has the best value, maybe on other images, and settings of its own.
    assert verdict(*every).split("\n")[:-1] == [
        "b is best: val/top1 60.0 %; next is a, 50.0 %.",
        "They differ in lr (b against a).",
    ]
    assert compare(every).params == (("lr", (None, "a", "b")),)
    assert compare(every, axis="samples").runs == (a, b)


def test_charts_hold_every_run_and_its_extremes():
    # Charts are thinned, and a peak of one step is what people look for.
    long = [{"train/loss": float(i % 7), "odd/zero": 0.0} for i in range(9000)]
    long[4321] = {"train/loss": 99.0}
    empty = logged({"train/loss": float("nan")}, label="b")
    page = render(compare([logged(*long), empty]))
    figure = figures(page)[0]
    first, second = figure["series"]
    assert first["name"] == "a"
    assert len(first["x"]) == MAX_POINTS
    assert second["x"] == []
    assert max(first["y"]) == 99
    assert min(first["y"]) == 0
    assert figure["x_title"] == "steps"
    assert figure["better"] == "lower"
    assert "Always 0, and left out: odd/zero." in page


def test_hostile_names_are_text():
    evil = [
        logged({EVIL: 0.5, "val/top1": float(i)}, label=EVIL, lr=str(i), x=EVIL)
        for i in (1, 2)
    ]
    page = render(compare(evil))

    # Two scripts are ours: the library of the charts, and the lines that draw.
    before = page.partition("<script>")[0]
    assert "<img src=x" not in before
    assert "<!--" not in before
    assert page.count("<script>") == 2

    # Even a name that got through would not run: scripts are allowed by their hash.
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy
    assert policy.count("'sha256-") == 2
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")

    # plotly takes some marks of HTML in texts.
    for figure in figures(page):
        assert not re.search("<[a-z!/]", json.dumps(figure))


def with_classes(folder, label, shares) -> ComparedRun:
    """A run with a table of its classes; None: a class without images."""
    lines = ["label,class,images,correct,top1\n"]
    for number, (name, share) in enumerate(shares.items()):
        cells = "0,0," if share is None else f"4,0,{share:.6f}"
        lines.append(f"{number},{name},{cells}\n")
    path = folder / label / "evaluation/per_class.csv"
    path.parent.mkdir(parents=True)
    path.write_text("".join(lines))
    return run(label, [0.5], folder=folder / label)


def class_table(*runs: ComparedRun):
    """What follows its title, the header and the rows, as texts without marks."""
    section = render(compare(runs)).partition("<h2>Accuracy of each class")[2]
    title, _, rest = section.partition("</h2>")
    rows = re.findall("<tr>(.*?)</tr>", rest.partition("</table>")[0])
    cells = re.compile("<t[hd][^>]*>(?:<i .*?</i>)?(.*?)</t[hd]>")
    return [[title], *(cells.findall(row) for row in rows)]


def test_the_page_has_the_accuracy_of_each_class(tmp_path):
    shares = {"cat": 0.75, "dog": 0.5, "none": None, EVIL: 0.25}
    a = with_classes(tmp_path, "a", shares)
    # The worst first; Jinja escapes an apostrophe in another way than Python.
    evil = html.escape(EVIL, quote=True).replace("&#x27;", "&#39;")
    head = [[""], ["class", "a"]]
    good = [["dog", "50.0 %"], ["cat", "75.0 %"]]
    assert class_table(a) == [*head, [evil, "25.0 %"], *good]

    # In another order, with one class that the first run lacks. What differs most is first.
    b = with_classes(tmp_path, "b", {"dog": 0.25, "cat": 1.0, "owl": 0.125})
    c = with_classes(tmp_path, "c", {"dog": 1.0, "cat": 0.75})
    rows = class_table(a, b, run("no table", [0.5]), c)
    assert rows[1:4] == yaml.safe_load("""
    - [class, a, b, c]
    - [dog, 50.0 %, 25.0 %, 100.0 %]
    - [cat, 75.0 %, 100.0 %, 75.0 %]
    """)
    assert ["owl", "-", "12.5 %", "-"] in rows

    # Without any table there is no section.
    assert class_table(run("x", [0.5])) == [[""]]

    # A thousand rows would bury the page.
    many = with_classes(tmp_path, "m", {f"class {i}": i / 1000 for i in range(1000)})
    rows = class_table(many)
    assert rows[0] == [f": the {MAX_CLASSES} of 1,000 that are worst"]
    assert rows[2] == ["class 0", "0.0 %"]
    assert len(rows) == MAX_CLASSES + 2


# Files that a person or another tool may have left there: empty, without a column, with no numbers.
@rows(r"""
- [text]
- [""]
- ["label,class\n0,a\n"]
- ["class,top1\na,much\n"]
- ["class,top1\na,nan\n"]
- ["\xff\xfe"]
""")
def test_an_odd_table_of_classes_is_left_out(text, tmp_path):
    folder = tmp_path / "evaluation"
    folder.mkdir()
    (folder / "per_class.csv").write_bytes(text.encode("latin-1"))
    page = render(compare([run("a", [0.5], folder=tmp_path)]))
    assert "Accuracy of each class" not in page


# ---- copied into MLflow -----------------------------------------------------------------------


def test_a_run_ended_as_it_says_or_as_its_last_attempt_shows(tmp_path):
    def status(text):
        times = {} if text == "RUNNING" else {"ended": 10.0}
        record = RunRecord(tracking_id="x", name="a", status=text, **times)  # type: ignore[arg-type]
        return final_status(read_state(tmp_path, []), record if text else None)

    # A run that nothing runs any more, and that has not said its end, was killed.
    assert status("PAUSED") == "PAUSED"
    assert status("FAILED") == "FAILED"
    assert status("RUNNING") == "KILLED"
    assert status(None) == "KILLED"

    # The record of the last attempt knows more than the run itself.
    for ending, expected in ((Ending.STOPPED, "PAUSED"), (Ending.FAILED, "FAILED")):
        attempt = begin_attempt(tmp_path, cluster="local", job_id="1")
        end_attempt(attempt, tmp_path, Outcome(ending=ending, reason="", exit_code=1))
        assert status("PAUSED") == expected


def test_what_is_no_run_is_refused_before_any_write(tmp_path):
    good = logged_run(tmp_path / "good")
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.yaml").write_text("stage: pretrain\n")
    odd = logged_run(tmp_path / "odd")
    (odd / "config.yaml").write_text("- 1\n")

    store = tmp_path / "store.db"
    names = map(str, (good, bad, odd))
    with pytest.raises(UserErrors) as caught:
        sync([*names, "--uri", f"sqlite:///{store}"])

    # Both are named, and the good one was not copied before they were found.
    text = caught.value.text()
    assert "bad/journal.jsonl" in text
    assert "odd/config.yaml" in text
    assert not store.exists()


@pytest.mark.slow
def test_a_failing_server_gives_one_message(tmp_path):
    folder = logged_run(tmp_path / "run")
    before = {path.name for path in folder.iterdir()}
    with refused("(?s)cannot copy .*same command again"):
        sync([str(folder), "--uri", "http://127.0.0.1:1"])
    assert {path.name for path in folder.iterdir()} == before


def test_a_lower_loss_is_better_than_what_it_started_from():
    """Of accuracies the higher one is, so both directions must be known."""

    def lost(name, loss, *, init="null"):
        row = Row(step=10, time=10.0, metrics={"val/loss": loss})
        return replace(started(name, 0.5, init=init), rows=(row,))

    first = lost("first", 0.5)
    for loss, change in ((0.4, "better"), (0.6, "worse"), (0.5, "no better")):
        text = verdict(first, lost("tuned", loss, init="runs/first"))
        assert text.startswith(f"tuned started from first and is {change}: val/loss")
