"""Comparing runs: budgets, seeds, tables, files, the page; sending them."""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from launch.comparison.differences import (
    NOTHING,
    Budget,
    Points,
    compare,
    parse_budget,
    varied_settings,
)
from launch.comparison.page import MAX_CLASSES, MAX_POINTS, render
from launch.comparison.report import tables, write_json
from launch.comparison.runs import ComparedRun, load_runs
from launch.comparison.sync import final_status, sync
from launch.jobs.attempts import ATTEMPT, Ending, Outcome, begin_attempt, end_attempt
from launch.jobs.run_states import read_state
from pretrain.run import PretrainRun
from tests.support.run_folders import logged_run
from tests.support.tables import refused, rows
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


def run(
    label: str,
    top1: list[float],
    *,
    batch: int = 8,
    folder: Path | None = None,
    **params: str,
) -> ComparedRun:
    """A run that evaluates every ten steps, one second each."""
    rows = tuple(
        Row(step=10 * i, time=10.0 * i, metrics={"val/top1": value, "val/zero": 0.0})
        for i, value in enumerate(top1, start=1)
    )
    known = {"data.global_batch": str(batch)} | {
        k.replace("__", "."): params[k] for k in params
    }
    return ComparedRun(
        label=label, source=label, folder=folder, params=known, rows=rows
    )


def logged(*metrics: dict[str, float], label: str = "a", **params: str) -> ComparedRun:
    rows = tuple(
        Row(step=i, time=float(i), metrics=each) for i, each in enumerate(metrics, 1)
    )
    return ComparedRun(label=label, source=label, params=params, rows=rows)


# ---- budgets and metrics ----------------------------------------------------------------------


def values(points: Points) -> list[float | None]:
    return [point.value if point.steps else None for point in points]


def test_runs_of_different_length_are_compared_at_equal_steps() -> None:
    compared = compare([run("long", [0.2, 0.4, 0.9]), run("short", [0.3, 0.5])])
    assert compared.budget == Budget(axis="steps", total=20)
    line = compared.metrics[0]
    assert (values(line.final), values(line.equal)) == ([0.9, 0.5], [0.4, 0.5])
    assert compare([run("a", [0.2]), run("b", [0.3])]).budget is None


def test_equal_samples_are_fewer_steps_of_larger_batches() -> None:
    """Between two evaluations the value is on the line between them."""
    runs = [run("small", [0.2, 0.4, 0.6, 0.8]), run("large", [0.3, 0.5], batch=16)]
    assert compare(runs, axis="samples").budget == Budget(axis="samples", total=320)
    # A total that went through division counts as the step, and a smaller one does not.
    for total in (320.0, 240.0, 200.0, 160 - 1e-8, 160 - 1e-5, 100.0, 80.0, 79.0):
        equal = compare(runs, axis="samples", total=total).metrics[0].equal
        for each, point, start in zip(runs, equal, (80, 160), strict=True):
            if total < start - 1e-6:
                assert point == NOTHING
            else:
                places, known = each.totals["samples"], each.series("val/top1")[1]
                assert point.value == pytest.approx(np.interp(total, places, known))
    line = compare(runs, axis="samples", total=240).metrics[0]
    assert [point.steps for point in line.equal] == [(30,), (10, 20)]
    with refused("flops of run small are not known"):
        compare(runs, axis="flops")
    with refused("not all runs have reached 30 steps"):
        compare(runs, axis="steps", total=30)


def test_a_value_of_another_step_is_never_shown_without_that_step() -> None:
    """Evaluated at 2 and 4, or at 2 alone, of 5 steps; next to NaN there is nothing between."""
    late = logged({}, {"val/top1": 0.5}, {}, {"val/top1": 0.7}, {}, label="late")
    lost = logged({}, {"val/top1": 0.4}, {}, {"val/top1": math.nan}, {}, label="lost")
    once = logged({"x": 1.0}, {"val/top1": 0.3}, {"x": 1.0}, label="once")
    compared = compare([late, lost, once])
    (table,) = (each for each in tables(compared) if each.title.startswith("At equal"))
    expected = ("60.0 % (step 2 to 4) *", "40.0 % (step 2)", "30.0 % (step 2)")
    assert table.rows == (("val/top1", *expected),)
    text = verdict(late, lost, once)
    assert text.startswith(
        "late is best: val/top1 70.0 % (step 4); next is once, 30.0 % (step 2)."
    )
    assert (
        "At equal cost, 3 steps: late 60.0 % (step 2 to 4), lost 40.0 % (step 2),"
        in text
    )


def test_budgets_are_read() -> None:
    assert parse_budget("steps") == ("steps", None)
    assert parse_budget("FLOPs=1.5e18") == ("flops", 1.5e18)
    for text in ("", *"epochs steps= steps=0 steps=-1 steps=1e999 hours=1.2.3".split()):
        with refused("is not a budget"):
            parse_budget(text)


# The values of a metric, and the best one.
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


def test_the_best_value_follows_the_direction_and_is_finite() -> None:
    rows = [
        {name: values[step] for name, (values, _) in SERIES.items()}
        for step in range(5)
    ]
    found = {line.key: values(line.best) for line in compare([logged(*rows)]).metrics}
    assert found == {name: [best] for name, (_, best) in SERIES.items()}


def test_the_best_value_of_several_runs_is_marked_and_vitals_are_not_judged() -> None:
    first = logged({"train/loss": 2.0, "val/top1": 0.5, "vitals/data_wait": 0.1})
    loss = logged({"train/loss": 1.5, "vitals/data_wait": 0.2})
    top1 = logged({"train/loss": math.nan, "val/top1": 0.25})
    found = {
        row[0]: row[1:]
        for each in tables(compare([first, loss, top1]))
        for row in each.rows
    }
    assert found["val/top1"] == ("50.0 % *", "-", "25.0 %")
    assert found["train/loss"] == ("2", "1.5 *", "nan")
    assert found["vitals/data_wait"] == ("10.0 %", "20.0 %", "-")


def test_only_differing_parameters_are_listed() -> None:
    params = {"seed": "7", "optim.lr": "0.1"}
    first = logged({}, **params)
    second = logged({}, **params | {"optim.lr": "0.2", "x": "3"})
    compared = compare([first, second])
    assert compared.params == (("optim.lr", ("0.1", "0.2")), ("x", (None, "3")))
    assert compared.num_equal_params == 1 and len(compare([first]).params) == 2
    # What people change first comes first.
    names = "schedule.steps data.path model.image_size seed optim.lr evaluate init_patch init"
    one, two = (logged({}, **dict.fromkeys(names.split(), text)) for text in "ab")
    assert [key for key, _ in compare([one, two]).params] == (
        "init model.image_size data.path optim.lr schedule.steps seed evaluate init_patch".split()
    )
    other = logged({}, **params | {"output": "c", "tracking.tags.chain": "s"})
    assert compare([first, other]).params == ()


# ---- what was spent ---------------------------------------------------------------------------


def test_waits_between_attempts_are_no_hours(tmp_path: Path) -> None:
    common = {"cluster": "slurm", "job_id": "1", "restart": 0}
    common |= {"num_tasks": 1, "first_step": 0}
    for i, (start, end) in enumerate([(0.5, 2.0), (5.0, 6.0), (6.0, None)], start=1):
        ended = {"ended": end * HOUR} if end else {}
        append_event(
            tmp_path, ATTEMPT, {"number": i, "started": start * HOUR, **common, **ended}
        )
    times = {1: 1.0, 2: 2.0, 3: 5.5, 4: 7.0}
    rows = tuple(Row(step=s, time=t * HOUR, metrics={}) for s, t in times.items())
    found = ComparedRun(label="", source="", params={}, rows=rows, folder=tmp_path)
    assert found.totals["hours"] == pytest.approx([0.0, 1.0, 1.5, 3.0])
    assert found.totals.keys() == {"steps", "hours"}


def test_flops_are_those_of_the_model(tmp_path: Path) -> None:
    overrides = """
        stage=pretrain name=x data.path=shards data.global_batch=8 schedule.steps=30 optim.lr=0.1
        model.image_size=32 model.patch_size=4 model.width=64 model.depth=2 model.num_heads=2
        model.mlp_width=128
    """.split()
    loaded = load_run({"pretrain": PretrainRun}, None, overrides=overrides).run
    assert isinstance(loaded, PretrainRun)
    (tmp_path / "config.yaml").write_text(run_to_yaml(loaded))
    (tmp_path / "classes.json").write_text(json.dumps(["a", "b"]))
    each = train_flops_per_image(loaded.model.resolved(num_classes=2))
    found = run("a", [0.1, 0.2], folder=tmp_path).totals
    assert found["samples"] == [80, 160] and found["flops"] == [80 * each, 160 * each]
    (tmp_path / "config.yaml").write_text("stage: pretrain\nunknown: 1\n")
    assert "flops" not in run("a", [0.1], folder=tmp_path).totals


# ---- seeds ------------------------------------------------------------------------------------


def test_runs_that_differ_in_the_seed_alone_are_one_group() -> None:
    runs = [
        run("a-0", [0.5], seed="0", name="a-0"),
        run("b-0", [0.9], seed="0", name="b-0", lr="1"),
        run("a-1", [0.7], seed="1", name="a-1"),
        run("a-1-again", [0.6], seed="1", name="a-2"),
        run("no seed", [0.6]),
        # Other initial weights, which differ in the seed alone.
        run("t-0", [0.5], seed="0", name="t-0", init="runs/pretrain_seed0"),
        run("t-1", [0.5], seed="1", name="t-1", init="runs/pretrain_seed1"),
    ]
    compared = compare(runs)
    assert list(compared.seeds.values()) == [(0, 2, 3), (5, 6)]
    (table,) = (
        table for table in tables(compared) if table.title.startswith("Over seeds")
    )
    assert table.rows == (("val/top1", "60.0 % ± 10.0 %", "50.0 % ± 0.0 %"),)
    assert compare([runs[2], runs[3]]).seeds == {}


def test_runs_of_a_chain_are_told_by_their_stage(tmp_path: Path) -> None:
    names = ["evaluate/lr-1", "finetune/lr-1", "pretrain/seed-0", "scratch"]
    for name in names:
        logged_run(tmp_path / name)
    assert sorted(run.label for run in load_runs([str(tmp_path)], uri=None)) == names
    one, two = load_runs(
        [f"{tmp_path}/evaluate/lr-1", f"{tmp_path}/finetune/lr-1"], uri=None
    )
    assert (one.label, two.label) == ("evaluate/lr-1", "finetune/lr-1")
    # Of two chains, by the chain too.
    chains = [f"{tmp_path}/small", f"{tmp_path}/large"]
    for chain in chains:
        logged_run(Path(chain) / "pretrain/seed-0")
    labels = [run.label for run in load_runs(chains, uri=None)]
    assert labels == ["small/pretrain/seed-0", "large/pretrain/seed-0"]


def test_runs_of_a_chain_vary_in_its_keys() -> None:
    """Each stage alone, and not in what follows from the keys, such as the initial weights."""
    tags = "tracking.tags.chain"
    runs = [
        run(
            f"{stage}-{p}", [p / 100], init=f"runs/{p}", seed=str(p),
            **{f"{tags}.stage": stage, f"{tags}.a.first_percent": str(p), f"{tags}.a.seed": str(p)},
        )
        for stage in ("a", "b") for p in (1, 10)
    ]  # fmt: skip
    assert varied_settings(runs) == [
        {"a.first_percent": str(p), "stage": stage}
        for stage in ("a", "b")
        for p in (1, 10)
    ]


# ---- tables and files -------------------------------------------------------------------------


def test_the_file_has_every_run_and_metric(tmp_path: Path) -> None:
    compared = compare([run("a", [0.2, 0.4, math.nan]), run("b", [0.3])])
    assert tables(compared)[0].rows[1][4:6] == ("10", "0.0 min")
    write_json(compared, tmp_path / "c.json")
    read = json.loads((tmp_path / "c.json").read_text())
    assert {each["label"]: each["steps"] for each in read["runs"]} == {"a": 30, "b": 10}
    assert read["budget"] == {"axis": "steps", "total": 10.0}
    line = read["metrics"][0]
    assert [point["value"] for point in line["equal"]] == [0.2, 0.3]
    assert [point["value"] for point in line["best"]] == [0.4, 0.3]
    final = line["final"]
    assert final == [{"value": "NaN", "steps": [30]}, {"value": 0.3, "steps": [10]}]
    with refused("cannot be written"):
        write_json(compared, tmp_path / "c.json" / "c.json")


def test_a_result_of_zero_is_a_result() -> None:
    metrics = tables(compare([run("a", [0.0])]))[1]
    assert metrics.rows == (("val/top1", "0.0 %"),)


# ---- the page ---------------------------------------------------------------------------------


def verdict(*runs: ComparedRun) -> str:
    found = re.search(r'<p class="verdict">(.*?)<h2>', render(compare(runs)), re.DOTALL)
    assert found
    return re.sub(r"<[^>]*>", "", found[1])


def figures(page: str) -> list[dict[str, Any]]:
    found = re.findall(r'data-figure="([^"]*)"', page)
    return [json.loads(html.unescape(figure)) for figure in found]


def test_the_verdict_names_the_best_run_and_why() -> None:
    text = verdict(
        logged({"val/loss": 0.1, "val/top1": 0.5}, label="a", lr="1", name="a"),
        logged({"val/loss": 0.3, "val/top1": 0.75}, label="b", lr="2", name="b"),
    )
    assert text.splitlines()[0] == "b is best: val/top1 75.0 %; next is a, 50.0 %."
    assert "They differ in lr (2 against 1)." in text
    # A run that has no such key, or none of its own, says so in words.
    text = verdict(
        run("a", [0.7], **{"init": "runs/x", "optim.ema": "0.9"}),
        run("b", [0.6], **{"init": "null", "init_patch": "same"}),
    )
    assert (
        "differ in init (runs/x against random weights), optim.ema (0.9 against none), "
        "init_patch (none against same)." in text
    )
    assert verdict(run("a", [0.5]), run("b", [0.5])).startswith(
        "a and b are equal: val/top1 50.0 %."
    )
    text = verdict(run("a", [0.5]), run("b", [0.6], batch=16))
    assert "not seen equally many samples: compare them with --at samples" in text
    text = verdict(
        *(run(f"low-{i}", [v], seed=str(i), lr="1") for i, v in enumerate((0.2, 0.9))),
        *(run(f"high-{i}", [v], seed=str(i), lr="2") for i, v in enumerate((0.6, 0.7))),
    )
    assert (
        "high-0 and 1 more is best: val/top1 65.0 % ± 7.1 %; next is low-0 and 1 more"
        in text
    )
    assert "differ in lr (2 against 1)." in text
    assert "within the spread of the seeds (49.5 %)" in text


def test_the_ends_of_the_runs_decide_and_not_equal_steps() -> None:
    """And not their best values, which are said; with --at the budget decides."""
    long = run("long", [0.5, 0.55, 0.76, 0.74])
    short = run("short", [0.6, 0.69])
    assert verdict(short, long).splitlines()[:2] == [
        "long is best: val/top1 74.0 % (step 40); next is short, 69.0 % (step 20).",
        "At equal cost, 20 steps: short 69.0 % (step 20), long 55.0 % (step 20).",
    ]
    assert (
        "By the best values: long 76.0 % (step 30), short 69.0 % (step 20)."
        in verdict(short, long)
    )
    page = render(compare([short, long], axis="steps", total=15))
    assert (
        "short is best at 15 steps: val/top1 64.5 % (step 10 to 20); next is long, 52.5 %"
        in page
    )
    assert "At equal cost, " not in page.partition("<h2>")[0]


# The share of the better and of the other run, images, and what is said. Newcombe 1998, table II,
# has 0.0524 to 0.3339 for 56 of 70 and 48 of 80, which only differ by more than chance.
CHANCE = """
- [better, other, images, said]
- [0.70647, 0.69154, 201, "3 of 201 images: within chance"]
- [0.99, 0.5, 100, "49 of 100 images: more than chance"]
- [0.8, 0.8, 50, "0 of 50 images: within chance"]
- [1.0, 0.9, 20, "2 of 20 images: within chance"]
- [0.502, 0.498, "1,000,000", "4,000 of 1,000,000 images: more than chance"]
"""


def test_a_difference_is_within_chance_where_its_interval_holds_zero() -> None:
    found = difference(Share(48, 80), Share(56, 70))
    assert found.endswith("more than chance")
    assert difference(Share(48, 80), Share(51, 70)).endswith("within chance")


@rows(CHANCE)
def test_the_verdict_says_what_chance_explains(
    better: float, other: float, images: str, said: str
) -> None:
    tags = {"vitscale.val_data": f"digits/test, {images} images, 12ab"}
    one, two = run("a", [better]), run("b", [other])
    text = verdict(replace(one, tags=tags), replace(two, tags=tags))
    assert f"The difference is {said}." in text
    # Nothing is known of other images, and of no images.
    tags = tags | {"vitscale.val_data": "other, 9 images, 34cd"}
    text = verdict(replace(one, tags=tags), two)
    assert "The difference" not in text
    assert "different images" not in text


def test_runs_on_different_images_are_not_compared_by_chance() -> None:
    one, two = (
        replace(
            run(name, [top1]), tags={"vitscale.val_data": f"{name}, 100 images, {name}"}
        )
        for name, top1 in (("a", 0.9), ("b", 0.2))
    )
    text = verdict(one, two)
    assert "evaluated on different images: a, 100 images, a; b, 100 images, b." in text
    assert "The difference" not in text


def started(
    name: str, top1: float, *, init: str = "null", images: int = 201
) -> ComparedRun:
    tags = {
        "vitscale.run_folder": f"/home/me/work/runs/{name}",
        "vitscale.val_data": f"x, {images} images, 1",
    }
    return replace(run(name, [top1], init=init), tags=tags)


@rows("""
- [init]
- [runs/first]
- [./runs/first/]
- [/home/me/work/runs/first]
- [runs/first/checkpoints/step-00000400]
- [../runs/first]
""")
def test_a_fine_tuning_is_no_rival_of_what_it_started_from(init: str) -> None:
    first = started("first", 0.741)
    worse = verdict(first, started("tuned", 0.692, init=init))
    assert worse.splitlines() == [
        "tuned started from first and is worse: val/top1 from 74.1 % to 69.2 %, "
        "10 of 201 images: within chance."
    ]
    runs = [first, started("tuned", 0.9, init=init), started("scratch", 0.5)]
    lines = verdict(*runs).splitlines()
    assert lines[0] == "tuned is best: val/top1 90.0 %; next is scratch, 50.0 %."
    assert any(
        "tuned started from first and is better: val/top1 from 74.1 %" in x
        for x in lines
    )
    header, *rows = (tables(compare(runs))[0].header, *tables(compare(runs))[0].rows)
    assert header[-1] == "started from" and [row[-1] for row in rows] == [
        "-",
        "first",
        "-",
    ]


@rows("""
- [init]
- ["null"]
- [first]
- [other/first]
- [runs/firs]
- [runs/first/model.safetensors]
- [irst]
""")
def test_what_starts_elsewhere_is_a_rival(init: str) -> None:
    text = verdict(started("first", 0.741), started("tuned", 0.692, init=init))
    assert text.startswith(
        "first is best: val/top1 74.1 %; next is tuned, 69.2 %."
    ) == (init != "first")


def test_a_run_without_a_second_seed_is_ranked_beside_groups() -> None:
    groups = [
        run(f"{name}{seed}", [top1 + seed / 100], seed=str(seed), lr=name)
        for name, top1 in (("A", 0.70), ("B", 0.60)) for seed in (0, 1)
    ]  # fmt: skip
    for top1, first in (
        (0.9, "C0 is best: val/top1 90.0 %; next is A0 and 1 more, 70.5 % ± 0.7 %."),
        (0.65, "A0 and 1 more is best: val/top1 70.5 % ± 0.7 %; next is C0, 65.0 %."),
        (
            0.1,
            "A0 and 1 more is best: val/top1 70.5 % ± 0.7 %; next is B0 and 1 more, 60.5 %",
        ),
    ):
        text = verdict(*groups, run("C0", [top1], seed="5", lr="C"))
        assert first in text and "differ in lr (" in text
        assert ("Of C0 there is one seed" in text) == (top1 > 0.6)
    # The largest spread of all groups counts, here the one of the third.
    third = [run(f"C{i}", [v], seed=str(i), lr="C") for i, v in enumerate((0.1, 0.5))]
    assert "within the spread of the seeds (28.3 %)" in verdict(*groups, *third)
    assert "within the spread" not in verdict(*groups)
    # One group and a single run; two seeds of one setting have no order.
    assert verdict(*groups[:2], run("C0", [0.9], seed="0", lr="C")).startswith(
        "C0 is best"
    )
    assert verdict(*groups[:2]) == "A0 and 1 more has val/top1 70.5 % ± 0.7 %.\n"


def test_runs_without_the_metric_are_named() -> None:
    short, long = logged(*[{"val/top1": 0.5}] * 4, label="short"), [{"x": 1.0}] * 7
    late = logged(*long, {"val/top1": 0.9}, label="late")
    never = logged(*long, label="never")
    lost = logged(*[{"val/top1": math.nan}] * 8, label="lost")
    other = logged(*[{"val/top1": 0.25}] * 5, label="other")
    runs = (short, late, never, lost, other)
    page = html.unescape(render(compare(runs, axis="steps")))
    for sentence in (
        "short is best at 4 steps: val/top1 50.0 % (step 4); next is other, 25.0 % (step 4).",
        "Not ranked at 4 steps, since they have no finite val/top1: late, never, lost.",
    ):
        assert f">{sentence}</p>" in page
    assert "late is best: val/top1 90.0 % (step 8)" in verdict(*runs)
    # One of two seeds has diverged: the mean is of the other one, which is said.
    seeds = (
        logged({"val/top1": v}, label=f"s{i}", seed=str(i))
        for i, v in enumerate((0.5, math.nan))
    )
    assert "Not ranked, since they have no finite val/top1: s1." in verdict(*seeds)
    many = [logged({"x": 1.0}, label=f"never{i}") for i in range(11)]
    assert "never3, never4 and 6 more." in verdict(short, *many)


def test_evaluations_have_no_length() -> None:
    """That of external weights is at step 0, where no training has anything."""
    trained = [run("a", [0.5, 0.6]), run("b", [0.5, 0.7])]
    outside = logged({"val/top1": 0.9}, label="hub", stage="evaluate")
    outside = replace(outside, rows=(Row(step=0, time=1.0, metrics={"val/top1": 0.9}),))
    compared = compare([*trained, outside])
    assert compared.budget is None and values(compared.metrics[0].equal) == [
        0.6,
        0.7,
        0.9,
    ]
    assert verdict(*trained, outside).startswith(
        "b is best: val/top1 70.0 %; next is a, 60.0 %."
    )
    shorter = compare([*trained, run("c", [0.4]), outside])
    assert shorter.budget is not None and shorter.budget.total == 10
    assert values(shorter.metrics[0].equal) == [0.5, 0.5, 0.4, 0.9]
    ended = replace(
        outside, label="own", rows=(Row(step=9, time=1.0, metrics={"val/top1": 0.8}),)
    )
    assert verdict(outside, ended).startswith(
        "hub is best: val/top1 90.0 %; next is own, 80.0 %."
    )


def chain_run(chain: str, width: str, seed: int, top1: float) -> ComparedRun:
    tags = {"": chain, ".stage": "pretrain", ".pretrain.seed": str(seed)}
    named = {f"tracking.tags.chain{key}": text for key, text in tags.items()}
    return run(
        f"{width}/seed-{seed}", [top1], seed=str(seed), model__width=width, **named
    )


@pytest.mark.parametrize("names", [("small", "large"), ("same", "same")])
def test_two_chains_are_two_groups(names: tuple[str, str]) -> None:
    """Also of one name in two folders, made with other settings."""
    runs = [
        chain_run(name, width, seed, top1 + seed / 100)
        for name, width, top1 in zip(names, ("64", "256"), (0.5, 0.8), strict=True)
        for seed in (0, 1)
    ]
    compared = compare(runs)
    assert list(compared.seeds.values()) == [(0, 1), (2, 3)]
    # Seeds alone: one group. An evaluation has no seed of its own.
    assert list(compare(runs[:2]).seeds.values()) == [(0, 1)]
    evaluations = [
        replace(
            each,
            params={k: v for k, v in each.params.items() if k != "seed"}
            | {"init": "x"},
        )
        for each in runs
    ]
    assert list(compare(evaluations).seeds.values()) == [(0, 1), (2, 3)]


def test_evaluations_are_not_ranked_beside_trainings() -> None:
    a, b = (run(name, [v], lr=name) for name, v in (("a", 0.5), ("b", 0.6)))
    every = [replace(run("e", [0.7]), params={"stage": "evaluate", "k": "20"}), a, b]
    sentences = [
        "b is best: val/top1 60.0 %; next is a, 50.0 %.",
        "They differ in lr (b against a).",
    ]
    assert verdict(*every).split("\n")[:-1] == sentences
    assert compare(every).params == (("lr", (None, "a", "b")),)
    assert compare(every, axis="samples").runs == (a, b)


def test_charts_hold_every_run_and_its_extremes() -> None:
    long = [{"train/loss": float(i % 7), "odd/zero": 0.0} for i in range(9000)]
    long[4321] = {"train/loss": 99.0}
    page = render(
        compare([logged(*long), logged({"train/loss": float("nan")}, label="b")])
    )
    figure = figures(page)[0]
    first, second = figure["series"]
    assert first["name"] == "a" and len(first["x"]) == MAX_POINTS and second["x"] == []
    assert max(first["y"]) == 99 and min(first["y"]) == 0
    assert (figure["x_title"], figure["better"]) == ("steps", "lower")
    assert "Always 0, and left out: odd/zero." in page


def test_hostile_names_are_text() -> None:
    evil = [
        logged({EVIL: 0.5, "val/top1": float(i)}, label=EVIL, lr=str(i), x=EVIL)
        for i in (1, 2)
    ]
    page = render(compare(evil))
    before = page.partition("<script>")[0]
    assert (
        "<img src=x" not in before
        and "<!--" not in before
        and page.count("<script>") == 2
    )
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy and policy.count("'sha256-") == 2
    assert "unsafe" not in policy.replace("style-src 'unsafe-inline'", "")
    for figure in figures(page):
        assert not re.search("<[a-z!/]", json.dumps(figure))


def with_classes(
    folder: Path, label: str, shares: dict[str, float | None]
) -> ComparedRun:
    lines = [
        f"{i},{name},{0 if share is None else 4},0,{'' if share is None else f'{share:.6f}'}\n"
        for i, (name, share) in enumerate(shares.items())
    ]
    (folder / label / "evaluation").mkdir(parents=True)
    text = "label,class,images,correct,top1\n" + "".join(lines)
    (folder / label / "evaluation/per_class.csv").write_text(text)
    return run(label, [0.5], folder=folder / label)


def class_table(*runs: ComparedRun) -> list[list[str]]:
    title, _, rest = (
        render(compare(runs))
        .partition("<h2>Accuracy of each class")[2]
        .partition("</h2>")
    )
    rows = re.findall("<tr>(.*?)</tr>", rest.partition("</table>")[0])
    cells = re.compile("<t[hd][^>]*>(?:<i .*?</i>)?(.*?)</t[hd]>")
    return [[title], *(cells.findall(row) for row in rows)]


def test_the_page_has_the_accuracy_of_each_class(tmp_path: Path) -> None:
    a = with_classes(tmp_path, "a", {"cat": 0.75, "dog": 0.5, "none": None, EVIL: 0.25})
    assert class_table(a) == [
        [""], ["class", "a"], [html.escape(EVIL, quote=True).replace("&#x27;", "&#39;"), "25.0 %"],
        ["dog", "50.0 %"], ["cat", "75.0 %"],
    ]  # fmt: skip
    # In another order, with one class that the first run lacks. What differs most is first.
    b = with_classes(tmp_path, "b", {"dog": 0.25, "cat": 1.0, "owl": 0.125})
    c = with_classes(tmp_path, "c", {"dog": 1.0, "cat": 0.75})
    rows = class_table(a, b, run("no table", [0.5]), c)
    assert rows[1:4] == [
        ["class", "a", "b", "c"], ["dog", "50.0 %", "25.0 %", "100.0 %"],
        ["cat", "75.0 %", "100.0 %", "75.0 %"],
    ]  # fmt: skip
    assert ["owl", "-", "12.5 %", "-"] in rows and class_table(run("x", [0.5])) == [
        [""]
    ]
    many = with_classes(tmp_path, "m", {f"class {i}": i / 1000 for i in range(1000)})
    rows = class_table(many)
    assert rows[0] == [f": the {MAX_CLASSES} of 1,000 that are worst"]
    assert rows[2] == ["class 0", "0.0 %"] and len(rows) == MAX_CLASSES + 2


@rows(r"""
- [text]
- [""]
- ["label,class\n0,a\n"]
- ["class,top1\na,much\n"]
- ["class,top1\na,nan\n"]
- ["\xff\xfe"]
""")
def test_an_odd_table_of_classes_is_left_out(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "evaluation"
    folder.mkdir()
    (folder / "per_class.csv").write_bytes(text.encode("latin-1"))
    page = render(compare([run("a", [0.5], folder=tmp_path)]))
    assert "Accuracy of each class" not in page


# ---- copied into MLflow -----------------------------------------------------------------------


def test_a_run_ended_as_it_says_or_as_its_last_attempt_shows(tmp_path: Path) -> None:
    def status(said: str | None) -> str:
        times = {} if said == "RUNNING" else {"ended": 10.0}
        record = RunRecord(tracking_id="x", name="a", status=said, **times)  # type: ignore[arg-type]
        return final_status(read_state(tmp_path, []), record if said else None)

    said = {"PAUSED": "PAUSED", "FAILED": "FAILED", "RUNNING": "KILLED", None: "KILLED"}
    assert {each: status(each) for each in said} == said
    for ending, then in ((Ending.STOPPED, "PAUSED"), (Ending.FAILED, "FAILED")):
        attempt = begin_attempt(tmp_path, cluster="local", job_id="1")
        end_attempt(attempt, tmp_path, Outcome(ending=ending, reason="", exit_code=1))
        assert status("PAUSED") == then


def test_what_is_no_run_is_refused_before_any_write(tmp_path: Path) -> None:
    good = logged_run(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/config.yaml").write_text("stage: pretrain\n")
    (logged_run(tmp_path / "odd") / "config.yaml").write_text("- 1\n")
    store = tmp_path / "store.db"
    names = [str(good), str(tmp_path / "bad"), str(tmp_path / "odd")]
    with pytest.raises(UserErrors) as caught:
        sync([*names, "--uri", f"sqlite:///{store}"])
    text = caught.value.text()
    assert "bad/journal.jsonl" in text and "odd/config.yaml" in text
    assert not store.exists()


@pytest.mark.slow
def test_a_failing_server_gives_one_message(tmp_path: Path) -> None:
    folder = logged_run(tmp_path / "run")
    before = {path.name for path in folder.iterdir()}
    with refused("(?s)cannot copy .*same command again"):
        sync([str(folder), "--uri", "http://127.0.0.1:1"])
    assert {path.name for path in folder.iterdir()} == before
