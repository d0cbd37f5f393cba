"""Mutants of resuming: one part of the state is not restored, or one random key is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vitscale.engine.engine import Engine, ReadPart
from vitscale.training import session


def _replaced(kind: str, by: str | None) -> Callable[[], None]:
    """Restore tensors of a kind as zeros, or from those of another kind."""

    def patch() -> None:
        own = Engine.import_state

        def import_state(self: Engine, read: ReadPart, *, optimizer_steps: int) -> None:
            def changed(name: str, start: int, count: int) -> torch.Tensor:
                found, _, rest = name.partition(".")
                if found != kind:
                    return read(name, start, count)
                return torch.zeros(count) if by is None else read(f"{by}.{rest}", start, count)

            own(self, changed, optimizer_steps=optimizer_steps)

        Engine.import_state = import_state  # type: ignore[method-assign]  # the mutation

    return patch


def _no_step_count() -> None:
    own = Engine.import_state

    def import_state(self: Engine, read: ReadPart, *, optimizer_steps: int) -> None:
        own(self, read, optimizer_steps=0)

    Engine.import_state = import_state  # type: ignore[method-assign]  # the mutation


def _data_from_the_start() -> None:
    own = session.training_batches

    def training_batches(*args: Any, start: int, stop: int, **kwargs: Any) -> Any:
        return own(*args, start=0, stop=stop - start, **kwargs)

    session.training_batches = training_batches


def _seed_by_process() -> None:
    own = session.seed_step

    def seed_step(seed: int, *, step: int, **kwargs: Any) -> None:
        # The killed training resumes at step 15.
        own(seed, step=step - 15, **kwargs)

    session.seed_step = seed_step


MUTANTS: dict[str, Callable[[], None]] = {
    "weights": _replaced("model", "ema"),
    "second moments": _replaced("exp_avg_sq", None),
    "average of the weights": _replaced("ema", "model"),
    "step count of the optimiser": _no_step_count,
    "data position": _data_from_the_start,
    "dropout and drop path key": _seed_by_process,
}
