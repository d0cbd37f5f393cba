"""Equal budgets, seeds, and the tables and files of a comparison."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from launch.comparison.differences import compare, dependences, parse_budget, seed_groups
from launch.comparison.runs import ComparedRun
from launch.comparison.text import Table, plain_text, tables, write_csv, write_json
from vitscale.config.errors import UserError
from vitscale.tracking.journal import Row


def run(
    label: str, top1: list[float], *, batch: int = 8, every: int = 10, **params: str
) -> ComparedRun:
    """A run that evaluates after every `every` steps, one second each."""
    rows = tuple(
        Row(
            step=every * (i + 1),
            time=float(every * i),
            metrics={"val/top1": value, "val/zero": 0.0},
        )
        for i, value in enumerate(top1)
    )
    known = {"data.global_batch": str(batch)} | params
    return ComparedRun(label=label, source=label, folder=None, status=None, params=known, rows=rows)


def test_runs_of_different_length_are_compared_at_equal_steps() -> None:
    compared = compare([run("long", [0.2, 0.4, 0.9]), run("short", [0.3, 0.5])])
    assert compared.budget is not None and compared.budget.steps == (20, 20)
    line = compared.metrics[0]
    assert line.final == (0.9, 0.5) and line.equal == (0.4, 0.5)
    assert line.deltas[1] == pytest.approx(0.1) and line.change(line.deltas[1]) == "better"


def test_equal_samples_are_fewer_steps_of_larger_batches() -> None:
    runs = [run("small", [0.2, 0.4, 0.6, 0.8]), run("large", [0.3, 0.5], batch=16)]
    at_end = compare(runs, axis="samples")
    assert at_end.budget is not None
    assert (at_end.budget.total, at_end.budget.steps) == (320, (40, 20))
    earlier = compare(runs, axis="samples", total=240)
    assert earlier.budget is not None and earlier.budget.steps == (30, 10)
    assert earlier.metrics[0].equal == (0.6, 0.3)
    before_the_first = compare(runs, axis="samples", total=100)
    assert before_the_first.metrics[0].equal == (0.2, None)


def test_equally_long_runs_are_compared_at_their_end() -> None:
    assert compare([run("a", [0.2]), run("b", [0.3])]).budget is None


@pytest.mark.parametrize(
    ("axis", "total", "message"),
    [
        ("flops", None, "flops of run a are not known"),
        ("steps", 30.0, "not all runs have come to 30 steps"),
    ],
)
def test_unknown_budgets_are_refused(axis: str, total: float | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare([run("a", [0.2]), run("b", [0.3])], axis=axis, total=total)


def test_budgets_are_read() -> None:
    assert parse_budget("steps") == ("steps", None)
    assert parse_budget("FLOPs=1.5e18") == ("flops", 1.5e18)


@pytest.mark.parametrize("text", ["", "epochs", "steps=", "steps=0", "steps=-1", "steps=1e999"])
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no budget"):
        parse_budget(text)


def test_runs_that_differ_in_the_seed_alone_are_one_group() -> None:
    runs = [
        run("a-0", [0.5], seed="0", name="a-0"),
        run("b-0", [0.9], seed="0", name="b-0", lr="1"),
        run("a-1", [0.7], seed="1", name="a-1"),
        run("a-1-again", [0.6], seed="1", name="a-2"),
    ]
    compared = compare(runs)
    assert [group.members for group in compared.seeds] == [(0, 2, 3)]
    (table,) = (table for table in tables(compared) if table.title.startswith("Over seeds"))
    assert table.rows == (("val/top1", "0.6 +- 0.1 (3)"),)


def test_other_initial_weights_are_another_group() -> None:
    starts = ("runs/pretrain_seed{}", "null")
    runs = [
        run(f"{start}-{seed}", [0.5], seed=str(seed), init=start.format(seed))
        for start in starts
        for seed in (0, 1)
    ]
    assert [group.members for group in compare(runs).seeds] == [(0, 1), (2, 3)]


def test_tables_leave_out_what_is_always_zero() -> None:
    text = "".join(map(plain_text, tables(compare([run("a", [0.2]), run("b", [0.3])]))))
    assert "val/top1" in text and "val/zero" not in text


def test_long_cells_take_several_lines() -> None:
    value = "[" + ", ".join(map(str, range(40))) + "]"
    table = Table(title="T", header=("key", "a", "b"), rows=(("x", value, "1"), ("y", "", "2\x07")))
    title, header, first, *middle, last = plain_text(table).splitlines()
    assert (title, header.split(), last.split()) == ("T", ["key", "a", "b"], ["y", "2?"])
    assert first.startswith("  x    [0, 1,") and first.endswith("  1")
    assert len(middle) == 2 and max(map(len, middle)) < 70
    assert " ".join(line.strip() for line in (first[7:-1], *middle)) == value


def test_the_result_over_a_varied_number_has_mean_and_deviation() -> None:
    runs = [
        run(f"{size}-{rate}-{seed}", [0.1, value + 0.02 * seed], seed=str(seed), size=size, lr=rate)
        for size, rate, value in (("s", "1e-3", 0.5), ("s", "0.01", 0.6), ("l", "0.01", 0.7))
        for seed in (0, 1)
    ]
    (found,) = dependences(compare(runs))
    assert (found.key, found.metric) == ("lr", "val/top1")
    deviation = pytest.approx(0.02 / 2**0.5)
    assert found.series["size=s"] == (
        (0.001, pytest.approx(0.51), deviation),
        (0.01, pytest.approx(0.61), deviation),
    )
    assert found.series["size=l"] == ((0.01, pytest.approx(0.71), deviation),)
    (table,) = (each for each in tables(compare(runs)) if each.title.startswith("Final"))
    assert table.rows[1] == ("size=l", "-", "0.71 +- 0.014")
    assert dependences(compare(runs[:2])) == []


def test_runs_of_a_chain_vary_in_its_keys() -> None:
    """Not in what follows from them, such as the weights that they start from."""
    share, seed = (f"tracking.tags.chain.pretrain.{k}" for k in ("data.first_percent", "seed"))
    runs = [
        run(str(p), [p / 100], init=f"runs/{p}", **{share: str(p), seed: str(p)}) for p in (1, 10)
    ]
    (found,) = dependences(compare(runs))
    assert found.key == "pretrain.data.first_percent"
    assert found.series == {"": ((1.0, 0.01, None), (10.0, 0.1, None))}


def test_equal_settings_with_equal_seeds_are_no_group() -> None:
    """The same run twice says nothing about seeds."""
    twice = [run("a", [0.5], seed="0", lr="1"), run("a", [0.5], seed="0", lr="1")]
    assert seed_groups(twice) == ()
    more = [run("b", [0.5], seed="1", lr="1"), run("c", [0.5], seed="1", lr="2")]
    (group,) = seed_groups([*twice, *more, run("d", [0.5], lr="1")])
    assert group.members == (0, 1, 2) and group.label == "a and 2 more"


def test_files_have_every_run_and_metric(tmp_path: Path) -> None:
    compared = compare([run("a", [0.2, math.nan]), run("b", [0.3])])
    write_csv(compared, tmp_path / "c.csv")
    write_json(compared, tmp_path / "c.json")
    rows = list(csv.DictReader((tmp_path / "c.csv").open()))
    found = {(row["run"], row["metric"]): (row["final"], row["equal"]) for row in rows}
    assert found["a", "val/top1"] == ("nan", "0.2") and found["b", "val/top1"] == ("0.3", "0.3")
    read = json.loads((tmp_path / "c.json").read_text())
    assert [each["label"] for each in read["runs"]] == ["a", "b"]
    assert read["budget"] == {"axis": "steps", "total": 10.0, "steps": [10, 10]}
    assert read["metrics"][0]["final"] == ["NaN", 0.3]


def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        write_csv(compare([run("a", [0.2])]), tmp_path / "missing" / "c.csv")
