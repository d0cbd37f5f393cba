"""Stop all ranks at the same step after a signal to any of them.

Owns: the handlers of stop signals, and the agreement on a step.
Leaves out: what a stop does (the loops).

When step S ends, the ranks begin to reduce one byte, in the background; they read it when step
S + 1 ends. So all read the same at the same step, and none waits for another in between.
"""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist

from vitscale.distributed.world import control_group

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


class PreemptionFlag:
    """Records a stop signal on any rank, so that all ranks stop at the same step.

    Inside the block SIGUSR2 (SLURM's warning) and SIGTERM only set a flag.

    Once the ranks stop, further signals stay ignored after the block: they would kill a rank whose
    checkpoint is committed while it closes its files.
    """

    def __init__(self) -> None:
        """Collective."""
        self._received = self._stops = False
        self._group = control_group("stop")
        self._flag = torch.zeros(1, dtype=torch.uint8)
        self._work: dist.Work | None = None

    def __enter__(self) -> PreemptionFlag:
        self._previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number in STOP_SIGNALS:
            signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            if self._received or self._stops:
                handler = signal.SIG_IGN
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _remember(self, *_: object) -> None:
        self._received = True

    def set_on_any_rank(self) -> bool:
        """Whether all ranks stop now. To be called once a step on every rank.

        The same on all ranks at the same call; one or two calls after a signal. A single rank stops
        at once.
        """
        if self._group is None:
            self._stops = self._stops or self._received
            return self._stops
        if self._work is not None:
            self._work.wait()
            self._stops = self._stops or bool(self._flag)
        self._flag = torch.tensor([self._received], dtype=torch.uint8)
        self._work = dist.all_reduce(
            self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return self._stops
