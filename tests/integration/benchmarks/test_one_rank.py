"""One rank fails in a real training: the others end, the record names it, and resuming is exact.

A dozen cases of `benchmarks/faults/one_rank.py`, which draws hundreds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults.one_rank import FAULTS, PLACES, Case, OneRank, draw, table
from tests.support.ranks.warm_ranks import WarmStarter

pytestmark = pytest.mark.distributed
slow = pytest.mark.slow


def case(place: str, code_place: str, nth: int, rank: int, fault: str, **changes: object) -> Case:
    common = {"num_ranks": 2, "zero_stage": 1, "objective": "supervised", "num_workers": 1}
    values: dict[str, object] = {**common, **changes}
    return Case(
        place=place, code_place=code_place, nth=nth, rank=rank, fault=fault,
        **values,  # type: ignore[arg-type]  # fields of Case
    )  # fmt: skip


FAST = [
    case("a worker reads", "worker image", 9, 1, "is killed"),
    case("backward", "gradient", 13, 1, "hangs"),
    case("evaluation of the average", "results", 4, 1, "raises"),
    case("commit of a save", "rename", 2, 0, "exits with 0"),
    case("the last step", "end", 1, 1, "raises"),
]
ZERO_3 = {"zero_stage": 3, "objective": "mae"}
FOUR = {"num_ranks": 4, "zero_stage": 0, "objective": "distillation", "num_workers": 2}
SLOW = [
    case("a worker starts", "worker start", 1, 2, "hangs", **FOUR),
    case("a batch is read", "batch", 7, 3, "exits with 3", **FOUR),
    case("evaluation", "results", 3, 0, "is killed", **FOUR),
    case("logging", "log", 2, 1, "hangs", **FOUR),
    case("forward", "block", 11, 1, "is stopped", **ZERO_3),
    case("update", "average", 5, 0, "raises", **ZERO_3),
    case("feature extraction", "features", 3, 1, "is killed", **ZERO_3),
    case("snapshot", "export", 2, 1, "raises", **ZERO_3),
    case("pictures", "pictures", 1, 1, "hangs", **ZERO_3),
    case("write of a save", "write", 2, 1, "raises", zero_stage=0, num_workers=0),
    case("the tracker", "tracker", 3, 0, "exits with 3", zero_stage=0, num_workers=0),
    case("change of the image size", "change", 1, 1, "raises", zero_stage=0, num_workers=0),
]


@pytest.fixture(scope="module")
def one_rank(
    warm_starter: WarmStarter, digits_shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> OneRank:
    work = tmp_path_factory.mktemp("one-rank")
    return OneRank(warm_starter, shards=digits_shards, work=work)


@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(each, marks=slow) for each in SLOW)], ids=lambda each: each.place
)
def test_a_rank_that_fails_ends_all_and_is_named(
    one_rank: OneRank, tmp_path: Path, case: Case
) -> None:
    found = one_rank.check(case, tmp_path / "case", timed=False)
    assert not found["problems"], "\n".join(found["problems"])


def test_all_places_and_faults_are_drawn_and_again_the_same(tmp_path: Path) -> None:
    cases = [draw(5, number) for number in range(len(PLACES) * len(FAULTS))]
    assert {(each.place, each.fault) for each in cases} == {(p, f) for p in PLACES for f in FAULTS}
    assert cases == [draw(5, number) for number in range(len(cases))]
    assert cases != [draw(6, number) for number in range(len(cases))]
    assert all(each.nth >= 1 and each.rank < each.num_ranks for each in cases)
    ledger = tmp_path / "ledger"
    row = '{"place": "update", "fault": "raises", "all_s": 1.5, "problems": []}\n'
    ledger.write_text(row + row.replace("1.5", "2.5"))
    assert "| update | 2: 2.0, 2.5 | - |" in table(ledger)
