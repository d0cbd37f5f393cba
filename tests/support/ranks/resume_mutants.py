"""Mutants of resuming: one part of the state is not restored, or one random key is wrong.

Owns: a patch of the running process for each row of the state table, named after what is lost.
Leaves out: the test that each mutant changes the run (test_resume_mutations).

Most rows of the table are pure functions of the position in training and have no state to lose.
Their mutants change the random key instead, in the resumed process only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vitscale.data import samples
from vitscale.engine.engine import Engine, ReadPart
from vitscale.tracking import journal
from vitscale.training import detectors, loop, segment, session
from vitscale.training.meters import IntervalMeter


def _forget(owner: Any, name: str) -> Callable[[], None]:
    """Replace a function that restores state by one that does nothing."""

    def patch() -> None:
        setattr(owner, name, lambda *args, **kwargs: None)

    return patch


def _import_changed(change: Callable[[ReadPart, int], tuple[ReadPart, int]]) -> Callable[[], None]:
    def patch() -> None:
        own = Engine.import_state

        def import_state(self: Engine, read: ReadPart, *, optimizer_steps: int) -> None:
            read, optimizer_steps = change(read, optimizer_steps)
            own(self, read, optimizer_steps=optimizer_steps)

        Engine.import_state = import_state  # type: ignore[method-assign]  # the mutation

    return patch


def _replaced(kind: str, by: str | None) -> Callable[[], None]:
    """Restore tensors of a kind as zeros, or from those of another kind."""

    def change(read: ReadPart, steps: int) -> tuple[ReadPart, int]:
        def changed(name: str, start: int, count: int) -> torch.Tensor:
            own, _, rest = name.partition(".")
            if own != kind:
                return read(name, start, count)
            return torch.zeros(count) if by is None else read(f"{by}.{rest}", start, count)

        return changed, steps

    return _import_changed(change)


def _one_bit_changed() -> None:
    """Flip the last bit of one weight."""

    def change(read: ReadPart, steps: int) -> tuple[ReadPart, int]:
        flipped: set[str] = set()

        def changed(name: str, start: int, count: int) -> torch.Tensor:
            values = read(name, start, count)
            if name.startswith("model.") and flipped <= {name} and start == 0:
                flipped.add(name)
                values.view(torch.int32)[0] ^= 1
            return values

        return changed, steps

    _import_changed(change)()


def _counters_without(name: str, value: Any) -> Callable[[], None]:
    def patch() -> None:
        own = Engine.import_counters

        def import_counters(self: Engine, counters: Mapping[str, Any]) -> None:
            own(self, _changed(counters, name, value))

        Engine.import_counters = import_counters  # type: ignore[method-assign]  # the mutation

    return patch


def _changed(counters: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A copy with one entry changed, at any depth."""
    assert name in str(counters), counters
    return {
        key: _changed(entry, name, value)
        if isinstance(entry, Mapping) and name in str(entry)
        else (value if key == name else entry)
        for key, entry in counters.items()
    }


def _data_from(shift_batches: int | None) -> Callable[[], None]:
    """Read training data from the start (None), or shifted by whole batches."""

    def patch() -> None:
        own = segment.training_batches

        def training_batches(*args: Any, start: int, stop: int, **kwargs: Any) -> Any:
            batch = kwargs["settings"].global_batch
            first = 0 if shift_batches is None else start + shift_batches * batch
            return own(*args, start=first, stop=first + stop - start, **kwargs)

        segment.training_batches = training_batches

    return patch


def _mix_by_process() -> None:
    own = loop.mix_batch

    def mix_batch(*args: Any, step: int, **kwargs: Any) -> Any:
        # The killed training resumes at step 15.
        return own(*args, step=step - 15, **kwargs)

    loop.mix_batch = mix_batch


def _augment_without_epoch() -> None:
    own = samples.augmentation_key

    def augmentation_key(seed: int, draw: Any, **kwargs: Any) -> int:
        return own(seed + 1, draw, **kwargs)

    samples.augmentation_key = augmentation_key


def _seed_by_process() -> None:
    own = loop.seed_step

    def seed_step(seed: int, *, step: int, **kwargs: Any) -> None:
        own(seed, step=step - 15, **kwargs)

    loop.seed_step = seed_step


def _rate_by_process() -> None:
    own = Engine.set_learning_rate
    calls = 0

    def set_learning_rate(self: Engine, lr: float) -> None:
        nonlocal calls
        calls += 1
        own(self, lr * min(1.0, calls / 4))

    Engine.set_learning_rate = set_learning_rate  # type: ignore[method-assign]  # the mutation


def _journal_from_the_start() -> None:
    own = journal._truncate
    journal._truncate = lambda path, resume_step: own(path, 0)


def _one_step_back() -> None:
    """Start the loop one step too early."""
    own = session.TrainingSession

    def opened(**fields: Any) -> Any:
        fields["start_step"] -= 1
        return own(**fields)

    session.TrainingSession = opened  # type: ignore[misc,assignment]  # the mutation


MUTANTS: dict[str, Callable[[], None]] = {
    "weights": _replaced("model", "ema"),
    "one bit of one weight": _one_bit_changed,
    "first moments": _replaced("exp_avg", None),
    "second moments": _replaced("exp_avg_sq", None),
    "average of the weights": _replaced("ema", "model"),
    "step count of the optimiser": _import_changed(lambda tensors, steps: (tensors, 0)),
    "counters of skipped updates": _forget(Engine, "import_counters"),
    "update count of the average": _counters_without("num_averaged", 0),
    "loss sums of the log interval": _forget(IntervalMeter, "load_state"),
    "recent losses of the spike detector": _forget(detectors.LossSpikeDetector, "load_state"),
    "everything": _forget(session, "restore"),
    "data position": _data_from(None),
    "one batch": _data_from(1),
    "step of the loop": _one_step_back,
    "mixup key": _mix_by_process,
    "augmentation key": _augment_without_epoch,
    "dropout and drop path key": _seed_by_process,
    "schedule": _rate_by_process,
    "last logged step": _journal_from_the_start,
}
