"""Stop all ranks at the same step after a signal to any of them.

Owns: the handlers of stop signals, and the agreement on a step.
Leaves out: what a stop does (the loops).

When step S ends, every rank adds itself and its flag to a counter of the store, in the background.
Rank 0 waits for all, and publishes one key: stop when step S + 1 ends, or the next step at which to
ask. All read that key while step S + 1 runs, so all do the same at the same step. That costs the
store O(N) requests; in large worlds with short steps not every step is one to ask at.
"""

from __future__ import annotations

import itertools
import math
import queue
import signal
import threading
import time
from collections import deque

from vitscale.distributed.key_value_store import pauses, wait_for
from vitscale.distributed.world import World

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
# Between two decisions, for every rank: the store then spends a few percent of a core on them.
PERIOD_S_PER_RANK = 5e-4
MOST_STEPS = 100
# Decisions that rank 0 keeps for ranks whose host is behind its own.
NUM_KEPT = 1000
PATIENCE_S = 24 * 3600.0
# What a rank with a signal adds to the counter, beside 1.
RECEIVED = 1 << 32
_numbers = itertools.count()


class PreemptionFlag:
    """Records a stop signal on any rank, so that all ranks stop at the same step.

    Inside the block SIGUSR2 (SLURM's warning) and SIGTERM only set a flag.

    Once the ranks stop, further signals stay ignored after the block: they would kill a rank whose
    checkpoint is committed while it closes its files.
    """

    def __init__(self, world: World) -> None:
        """Collective."""
        self._received = self._stops = False
        self._decisions = _Decisions(world) if world.store is not None else None

    def __enter__(self) -> PreemptionFlag:
        self._previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        if self._decisions is not None:
            self._decisions.close()
        for number, handler in self._previous.items():
            if self._received or self._stops:
                handler = signal.SIG_IGN
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _remember(self, *_: object) -> None:
        self._received = True

    def set_on_any_rank(self) -> bool:
        """Whether all ranks stop now. To be called once a step on every rank.

        The same on all ranks at the same call; one or two calls after a signal if every step is one
        to ask at. A single rank stops at once.
        """
        self._stops = self._stops or self._ask()
        return self._stops

    def _ask(self) -> bool:
        return self._received if self._decisions is None else self._decisions.ask(self._received)


class _Decisions:
    """Rank 0's decisions, each fetched in the background one step before it is needed."""

    def __init__(self, world: World) -> None:
        assert world.store is not None
        self._store, self._world = world.store, world
        self._prefix = f"vitscale/stop/{next(_numbers)}"
        self._step, self._due = 0, 1
        self._asked_at, self._asked_step = time.monotonic(), 0
        self._published: deque[int] = deque()
        self._closed = threading.Event()
        self._tasks: queue.SimpleQueue[tuple[int, int, bool] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[int | RuntimeError] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="preemption", daemon=True)
        self._thread.start()

    def ask(self, received: bool) -> bool:
        step, self._step = self._step, self._step + 1
        stops = False
        if step == self._due:
            answer = self._answers.get()
            if isinstance(answer, RuntimeError):
                raise answer
            stops = answer == 0
            self._due += answer
        if step + 1 == self._due:
            self._tasks.put((self._due, self._steps_to_next(step), received))
        return stops

    def _steps_to_next(self, step: int) -> int:
        """How many steps after the next decision the one after that is due; of rank 0 it counts."""
        now, before, first = time.monotonic(), self._asked_at, self._asked_step
        self._asked_at, self._asked_step = now, step
        step_s = max(1e-6, now - before) / max(1, step - first)
        steps = math.ceil(self._world.world_size * PERIOD_S_PER_RANK / step_s)
        return min(steps, MOST_STEPS)

    def close(self) -> None:
        self._closed.set()
        self._tasks.put(None)
        # Not for ever: the store does not answer while rank 0 is stopped.
        self._thread.join(timeout=1.0)

    # --- the thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        for due, steps, received in iter(self._tasks.get, None):
            try:
                here = self._store.add(self._key(due, "ranks"), RECEIVED + 1 if received else 1)
                if self._world.is_first:
                    self._answers.put(self._decide(due, steps, here))
                else:
                    self._answers.put(int(self._wait_for(self._key(due, "decision"))))
            except RuntimeError as error:
                self._answers.put(error)

    def _decide(self, due: int, steps: int, here: int) -> int:
        """Publish and return 0 to stop at `due`, else the steps to the next decision."""
        for _ in pauses(self._world.world_size, timeout_s=PATIENCE_S, is_over=self._closed.is_set):
            if here % RECEIVED == self._world.world_size:
                break
            here = self._store.add(self._key(due, "ranks"), 0)
        answer = 0 if here >= RECEIVED else steps
        self._store.set(self._key(due, "decision"), str(answer))
        self._published.append(due)
        if len(self._published) > NUM_KEPT:
            oldest = self._published.popleft()
            self._store.delete_key(self._key(oldest, "ranks"))
            self._store.delete_key(self._key(oldest, "decision"))
        return answer

    def _wait_for(self, key: str) -> bytes:
        size, is_over = self._world.world_size, self._closed.is_set
        return wait_for(self._store, key, world_size=size, timeout_s=PATIENCE_S, is_over=is_over)

    def _key(self, due: int, what: str) -> str:
        return f"{self._prefix}/{due}/{what}"
