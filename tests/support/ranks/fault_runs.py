"""Tiny trainings with faults, started warm, and the undisturbed one they are compared with.

Owns: the settings, starting with planted faults, going on, and comparing.
Leaves out: the faults (`patched_rank`) and the cases (test_faults, test_resume_mutations).
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.ranks.run_states import RunState, differences, read_state
from tests.support.ranks.warm_ranks import ROOT, WarmRank, WarmStarter, end_session
from tests.support.waiting import PATIENCE_S, wait_until

STEPS, INTERVAL, LOGGED, ACCUMULATION = 24, 5, 4, 2
# Workers, augmentation, mixup, dropout, drop path, an average of the weights and accumulation on;
# saves, log lines and evaluations fall on different steps.
SETTINGS = (
    *(f"schedule.steps={STEPS}", "schedule.epochs=null", "schedule.warmup_steps=4"),
    *("data.global_batch=16", "data.num_workers=1", "data.augment.randaugment.magnitude=10"),
    *("data.mixing.mixup_alpha=0.8", "engine.max_micro_batch=4", "engine.num_threads=1"),
    *("engine.device=cpu", "engine.timeout_min=1", "model.width=24", "model.depth=2"),
    *("model.mlp_width=48", "model.dropout=0.1", "model.drop_path=0.1", "optim.ema.decay=0.9"),
    *(f"checkpoint.every_steps={INTERVAL}", f"tracking.log_every_steps={LOGGED}"),
    *("evaluate=[{name: classification, every_steps: 12}]", "tracking.uri=null"),
)
Faults = Sequence[Mapping[str, Any]]


def fault(place: str, nth: int | str, do: str) -> dict[str, Any]:
    """The `nth` call of `place` does `do`; see patched_rank."""
    return {"place": place, "nth": nth, "do": do}


def micro_step(step: int, *, start: int = 0, number: int = 0) -> int:
    """Which call of forward, backward or batch belongs to a step (the first is 1) of a life."""
    return (step - 1 - start) * ACCUMULATION + number + 1


class FaultRuns:
    """Trainings in folders of one test module."""

    def __init__(self, starter: WarmStarter, *, shards: Path, folder: Path) -> None:
        self.starter, self.shards, self.folder = starter, shards, folder
        self._undisturbed: dict[tuple[str, ...], RunState] = {}

    def start(
        self,
        place: Path,
        *settings: str,
        faults: Mapping[int, Faults] | None = None,
        mutant: str = "",
        num_ranks: int = 2,
        shards: Path | None = None,
    ) -> list[WarmRank]:
        """The same command every time, but for what is planted; faults: by rank."""
        place.mkdir(parents=True, exist_ok=True)
        script = ROOT / "pretrain/main.py"
        command: list[str | Path] = [script, "--config", ROOT / "configs/demo/pretrain.yaml"]
        command += [*SETTINGS, f"data.path={shards or self.shards}", f"output={place / 'run'}"]
        environment = {"VITSCALE_HOLD": str(place)}
        if faults or mutant:
            command.insert(0, ROOT / "tests/support/ranks/patched_rank.py")
            environment["VITSCALE_MUTANT"] = mutant
        own = [
            {"VITSCALE_FAULTS": json.dumps(list((faults or {}).get(rank, ())))}
            for rank in range(num_ranks)
        ]
        return self.starter.start(
            [*command, *settings],
            num_ranks=num_ranks,
            folder=place,
            environment=environment,
            own_environment=own,
        )

    def run(self, place: Path, *settings: str, **how: Any) -> list[int]:
        """Exit codes of a start that ends by itself."""
        return wait_all(self.start(place, *settings, **how))

    def finish(self, place: Path, *settings: str, **how: Any) -> RunState:
        """Go on, without a fault, to the end of the training."""
        ranks = self.start(place, *settings, **how)
        codes = wait_all(ranks)
        assert set(codes) == {0}, (codes, ranks[0].output())
        return read_state(place / "run")

    def undisturbed(self, *settings: str, **how: Any) -> RunState:
        """What the training comes to when nothing happens."""
        key = (*settings, *map(str, how.values()))
        if key not in self._undisturbed:
            place = self.folder / f"undisturbed {len(self._undisturbed)}"
            self._undisturbed[key] = self.finish(place, *settings, **how)
        return self._undisturbed[key]

    def assert_goes_on(self, place: Path, *settings: str, **how: Any) -> str:
        """The same command again ends where the undisturbed training does. Returns its output."""
        ours = self.finish(place, *settings, **how)
        assert differences(ours, self.undisturbed(*settings)) == []
        return output(place)


def wait_all(ranks: Sequence[WarmRank]) -> list[int]:
    try:
        return [rank.wait(timeout_s=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                end_session(rank.pid)


def wait_with_launcher(ranks: Sequence[WarmRank], *, grace_s: float = 0.3) -> list[int]:
    """Exit codes when somebody ends the ranks that are left some time after the first one's end."""
    wait_until(lambda: any(rank.poll() is not None for rank in ranks), else_say=ranks[0].output)
    deadline = time.monotonic() + grace_s
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    return wait_all(ranks)


def await_hold(place: Path, ranks: Sequence[WarmRank]) -> None:
    """Wait until a rank stands still; `let_go` continues it."""

    def is_held() -> bool:
        assert all(rank.poll() is None for rank in ranks), ranks[0].output()
        return (place / "held").exists()

    wait_until(is_held, else_say=ranks[0].output)


def let_go(place: Path) -> None:
    (place / "go").touch()


def output(place: Path) -> str:
    """What all ranks of all lives printed."""
    return "\n".join(path.read_text() for path in sorted(place.glob("rank-*.log")))


def newest_step(place: Path) -> int:
    """Of the committed checkpoints, by name."""
    names = [path.name for path in (place / "run/checkpoints").glob("step-*")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def copy_of(killed: Path, place: Path) -> Path:
    """A copy of a killed training, as its own."""
    shutil.copytree(killed, place, dirs_exist_ok=True)
    for log in place.glob("rank-*.log"):
        log.unlink()
    return place
