"""Trainings with the engine are those of the reference trainer: losses, norms, weights, averages.

Every pair of a task, a ZeRO stage, a precision, one or several micro-batches and ranks is in a fast
case; the slow ones add all machines, and all tasks at all stages in all precisions.
"""

import math
from collections.abc import Callable

import pytest
import torch

from finetune.run import OBJECTIVES as FINETUNE_OBJECTIVES
from pretrain.run import OBJECTIVES
from tests.support.engine.reference_cases import (
    ALL,
    TASKS,
    check,
    fast_cases,
    make_run,
    slow_cases,
    train_reference,
)
from tests.support.levels import by_level
from tests.support.ranks.warm_ranks import ROOT
from tests.support.reference_training import Machine, Result
from tests.support.tables import every
from vitscale.optim.settings import OPTIMIZERS

pytestmark = pytest.mark.distributed

PATIENCE_S = 600
# The simplest case, by which the test of the check itself is made.
EXACT_SGD = [name for name in fast_cases() if name.startswith("sgd")]
CONTROL = next(name for name in EXACT_SGD if "fp32, " in name)


Trained = Callable[[str], Result]


@pytest.fixture(scope="module", autouse=True)
def one_thread(world):
    """Small tensors gain nothing from several, which wait for each other beside the ranks.

    Of models whose layers talk to other ranks, the reference has one rank.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def trained(
    request,
    warm_starter,
    tmp_path_factory,
):
    """Train the cases of the tests that run with the engine, in a job for each number of ranks."""
    names = dict.fromkeys([CONTROL])
    for item in request.session.items:
        assert isinstance(item, pytest.Function)
        if item.path == request.path and hasattr(item, "callspec"):
            names[item.callspec.params["name"]] = None

    # One start of ranks for many cases: starting takes longer than training.
    cases = {}
    for name in names:
        _, machine = ALL[name]
        cases.setdefault(machine.ranks, []).append(name)
    folders = {}
    jobs = {}
    for num_ranks, of_job in sorted(cases.items()):
        folder = tmp_path_factory.mktemp(f"ranks-{num_ranks}-")
        (folder / "cases.txt").write_text("\n".join(of_job))
        script = [ROOT / "tests/support/engine/reference_cases.py", folder]
        folders[num_ranks] = folder
        jobs[num_ranks] = warm_starter.start(script, num_ranks=num_ranks, folder=folder)

    def trained(name):
        _, machine = ALL[name]
        ranks = jobs[machine.ranks]
        file = folders[machine.ranks] / f"{name}.pt"
        for _ in range(PATIENCE_S):
            # First the ranks: one may end between two looks, with its file written.
            ended = [rank for rank in ranks if rank.poll(wait_s=0) is not None]
            if file.exists():
                return Result(**torch.load(file))
            assert not ended, ended[0].output()[-3000:]
            ranks[0].poll(wait_s=1)
        raise TimeoutError(name)

    yield trained
    for ranks in jobs.values():
        codes = [rank.wait(timeout_s=PATIENCE_S) for rank in ranks]
        assert codes == [0] * len(ranks)


@pytest.mark.timeout(PATIENCE_S)
@every(
    name=by_level([*fast_cases(), *slow_cases()], fast=fast_cases(), slow=slow_cases())
)
def test_a_training_is_that_of_the_reference(trained, name):
    task, machine = ALL[name]
    expected = train_reference(task, machine)
    is_exact = machine.precision == "fp32"
    check(task, trained(name), expected, exact=is_exact)


def test_all_optimisers_objectives_and_losses_are_tasks():
    """A new entry of a registry needs a task, and a reference of its own."""
    runs = [make_run(task, Machine()) for task in TASKS]
    optimizers = {run.optim.name for run in runs}
    assert optimizers == OPTIMIZERS.keys()
    objectives = {run.objective.name for run in runs}
    assert objectives == OBJECTIVES.keys() | FINETUNE_OBJECTIVES.keys()

    # Not every objective has a choice of losses.
    losses = {getattr(run.objective, "loss", None) for run in runs}
    assert losses - {None} == {"softmax", "sigmoid", "bce"}


def test_the_reference_can_tell(trained):
    """A run at another rate, by a thousandth, is not the reference's."""
    ours = trained(CONTROL)
    right = train_reference(*ALL[CONTROL])
    assert all(map(math.isfinite, right.losses))

    # All else stays, so that the weights alone are wrong.
    moved = {key: value * (1 + 1e-3) for key, value in ours.weights.items()}
    wrong = Result(**vars(ours) | {"weights": moved})
    with pytest.raises(AssertionError):
        check("sgd", wrong, right, exact=True)
