"""Trainings with the engine are those of the reference trainer: losses, norms, weights, averages.

Every pair of a task, a ZeRO stage, a precision, a number of accumulated micro-batches and of ranks
is in a fast case; the slow ones are all machines, and all tasks at all stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise as neighbours
from pathlib import Path

import pytest
import torch

from finetune.run import OBJECTIVES as FINETUNE_OBJECTIVES
from pretrain.run import OBJECTIVES
from tests.support.engine.reference_cases import (
    ALL,
    TASKS,
    check,
    make_run,
    name_of,
    pairwise,
    train_reference,
)
from tests.support.ranks.warm_ranks import ROOT, WarmRank, WarmStarter
from tests.support.reference_training import Machine, Result
from vitscale.optim.settings import OPTIMIZERS

pytestmark = pytest.mark.distributed

PATIENCE_S = 600
CONTROL = next(name for name in pairwise() if name.startswith("sgd") and "fp32, " in name)


def slow_cases() -> list[str]:
    """All machines with one task, and all tasks at all stages in both precisions."""
    chosen = [name for name, (task, _) in ALL.items() if task == "adamw"]
    chosen += [
        name_of(task, Machine(stage=stage, precision=precision, accumulation=3, ranks=2))
        for task in TASKS
        for stage in TASKS[task].stages
        for precision in ("fp32", "bf16")
    ]
    return [name for name in dict.fromkeys(chosen) if name not in pairwise()]


def metamorphic_cases() -> list[list[str]]:
    """One global batch in 1 to 8 micro-batches, on 1 to 4 ranks, at every stage."""
    machines = [(1, 1), (8, 1), (3, 2), (1, 4)]
    return [
        [
            name_of(
                "clip", Machine(stage=stage, precision=precision, accumulation=parts, ranks=ranks)
            )
            for stage in (0, 1, 2, 3)
            for parts, ranks in machines
        ]
        for precision in ("fp32", "bf16")
    ]


Trained = Callable[[str], Result]


def start(starter: WarmStarter, cases: list[str], folder: Path) -> Iterator[Trained]:
    """Train the cases with the engine, in one job for each number of ranks."""
    jobs: dict[int, list[WarmRank]] = {}
    for num_ranks in sorted({ALL[name][1].ranks for name in cases}):
        own = folder / str(num_ranks)
        own.mkdir()
        names = [name for name in cases if ALL[name][1].ranks == num_ranks]
        (own / "cases.txt").write_text("\n".join(names))
        script = [ROOT / "tests/support/engine/reference_cases.py", own]
        jobs[num_ranks] = starter.start(script, num_ranks=num_ranks, folder=own)

    def trained(name: str) -> Result:
        num_ranks = ALL[name][1].ranks
        file = folder / str(num_ranks) / f"{name}.pt"
        for _ in range(PATIENCE_S):
            ended = [rank for rank in jobs[num_ranks] if rank.poll(wait_s=0) is not None]
            if file.exists():
                return Result(**torch.load(file))
            assert not ended, ended[0].output()[-3000:]
            jobs[num_ranks][0].poll(wait_s=1)
        raise TimeoutError(name)

    yield trained
    for ranks in jobs.values():
        assert [rank.wait(timeout_s=PATIENCE_S) for rank in ranks] == [0] * len(ranks)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from several, which wait for each other beside the ranks."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def asked_for(request: pytest.FixtureRequest, fixture: str) -> list[str]:
    """The cases of the tests that run, which may be few of the file's."""
    cases: dict[str, None] = {}
    for item in request.session.items:
        assert isinstance(item, pytest.Function)
        if item.path == request.path and fixture in item.fixturenames:
            params = item.callspec.params if hasattr(item, "callspec") else {"name": CONTROL}
            cases |= dict.fromkeys(params.get("cases", [params.get("name")]))
    return [*cases]


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest,
    warm_starter: WarmStarter,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Trained]:
    cases = asked_for(request, "trained")
    yield from start(warm_starter, cases, tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="module")
def trained_slowly(
    request: pytest.FixtureRequest,
    warm_starter: WarmStarter,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Trained]:
    cases = asked_for(request, "trained_slowly")
    yield from start(warm_starter, cases, tmp_path_factory.mktemp("slow"))


def is_exact(name: str) -> bool:
    return ALL[name][1].precision == "fp32"


@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("name", pairwise())
def test_a_training_is_that_of_the_reference(trained: Trained, name: str) -> None:
    check(ALL[name][0], trained(name), train_reference(*ALL[name]), exact=is_exact(name))


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("name", slow_cases())
def test_every_machine_and_every_task_is_that_of_the_reference(
    trained_slowly: Trained, name: str
) -> None:
    check(ALL[name][0], trained_slowly(name), train_reference(*ALL[name]), exact=is_exact(name))


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize("cases", metamorphic_cases(), ids=["fp32", "bf16"])
def test_one_global_batch_is_one_training_on_any_machine(
    trained_slowly: Trained, cases: list[str]
) -> None:
    results = [trained_slowly(name) for name in cases]
    for name, (first, second) in zip(cases[1:], neighbours(results), strict=True):
        check("clip", second, first, exact=is_exact(name))


def test_all_optimisers_objectives_and_losses_are_tasks() -> None:
    """A new entry of a registry needs a task, and a reference of its own."""
    runs = [make_run(task, Machine()) for task in TASKS]
    assert {run.optim.name for run in runs} == OPTIMIZERS.keys()
    assert {run.objective.name for run in runs} == OBJECTIVES.keys() | FINETUNE_OBJECTIVES.keys()
    kinds = {getattr(run.objective, "loss", None) for run in runs} - {None}
    assert kinds == {"softmax", "sigmoid", "bce"}


def test_the_reference_can_tell(trained: Trained) -> None:
    """A run at another rate, by a thousandth, is not the reference's."""
    ours, right = trained(CONTROL), train_reference(*ALL[CONTROL])
    moved = {key: value * (1 + 1e-3) for key, value in ours.weights.items()}
    with pytest.raises(AssertionError):
        check("sgd", Result(**{**vars(ours), "weights": moved}), right, exact=True)
    assert all(map(math.isfinite, right.losses))
