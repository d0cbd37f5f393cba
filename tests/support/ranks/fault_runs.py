"""Run tiny trainings with injected faults and compare them with an uninterrupted one.

Owns: settings, starts with faults, resumes and comparisons. All ranks start warm.
Leaves out: the faults (`patched_rank`) and the cases (test_resume).
"""

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

# Steps of a training, between saves and between log lines; micro-batches of a step.
STEPS = 24
INTERVAL = 5
LOGGED = 4
ACCUMULATION = 2
# With loader workers, augmentation, mixup, dropout, drop path, an average of the weights and
# gradient accumulation. Saves, log lines and evaluations fall on different steps.
SETTINGS = (
    *f"""
    schedule.steps={STEPS} schedule.epochs=null schedule.warmup_steps=4 data.global_batch=16
    data.num_workers=1 data.augment.randaugment.magnitude=10 data.mixing.mixup_alpha=0.8
    engine.max_micro_batch=4 engine.num_threads=1 engine.device=cpu engine.timeout_min=1
    optim.ema.decay=0.9 checkpoint.every_steps={INTERVAL} tracking.log_every_steps={LOGGED}
    tracking.uri=null
    """.split(),
    "evaluate=[{name: classification, every_steps: 12}]",
)
VIT = (
    *"model.width=24 model.depth=2 model.mlp_width=48 model.dropout=0.1".split(),
    "model.drop_path=0.1",
)
Faults = Sequence[Mapping[str, Any]]


def fault(place: str, nth: int | str, do: str) -> dict[str, Any]:
    """The `nth` call of `place` does `do`: see PLACES and ACTIONS in patched_rank."""
    return {"place": place, "nth": nth, "do": do}


def micro_step(step: int, *, number: int = 0) -> int:
    """Number of the call of forward, backward or batch in a step; both count from 1."""
    return (step - 1) * ACCUMULATION + number + 1


class FaultRuns:
    """Start trainings; keep the uninterrupted ones for comparison."""

    def __init__(self, starter: WarmStarter, *, shards: Path, folder: Path):
        self.starter = starter
        self.shards = shards
        self.folder = folder
        self._undisturbed = {}

    def start(
        self,
        folder: Path,
        *settings: str,
        faults: Mapping[int, Faults] | None = None,
        mutant: str = "",
        num_ranks: int = 2,
        stage: str = "pretrain",
        model: Sequence[str] = VIT,
        shards: Path | None = None,
        is_node_of_its_own: bool = False,
    ) -> list[WarmRank]:
        """Start the same command every time, with other faults (by rank).

        is_node_of_its_own: each rank, n0, n1, ...
        """
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            ROOT / f"{stage}/main.py",
            "--config",
            ROOT / f"configs/digits/{stage}.yaml",
            *SETTINGS,
            *model,
            f"data.path={shards or self.shards}",
            f"output={folder / 'run'}",
            *settings,
        ]
        environment = {"VITSCALE_HOLD": str(folder)}
        # Undisturbed trainings are those of the script itself: no patch can be what they share.
        if faults or mutant:
            command.insert(0, ROOT / "tests/support/ranks/patched_rank.py")
            environment["VITSCALE_MUTANT"] = mutant

        own_environment = []
        for rank in range(num_ranks):
            faults_of_rank = list((faults or {}).get(rank, ()))
            variables = {"VITSCALE_FAULTS": json.dumps(faults_of_rank)}
            # Each is then alone on its node, as far as it can see.
            if is_node_of_its_own:
                variables["SLURMD_NODENAME"] = f"n{rank}"
                variables["LOCAL_RANK"] = "0"
                variables["LOCAL_WORLD_SIZE"] = "1"
            own_environment.append(variables)
        return self.starter.start(
            command,
            num_ranks=num_ranks,
            folder=folder,
            environment=environment,
            own_environment=own_environment,
        )

    def run(self, folder: Path, *settings: str, **how) -> list[int]:
        return wait_all(self.start(folder, *settings, **how))

    def finish(self, folder: Path, *settings: str, **how) -> RunState:
        ranks = self.start(folder, *settings, **how)
        codes = wait_all(ranks)
        assert set(codes) == {0}, (codes, ranks[0].output())
        return read_state(folder / "run")

    def undisturbed(self, *settings: str, **how) -> Path:
        """The run folder of a training without a fault, which tests must not change."""
        # Each is trained once for all tests of a session: most have the same settings.
        key = (*settings, *map(str, how.values()))
        if key not in self._undisturbed:
            folder = self.folder / f"undisturbed {len(self._undisturbed)}"
            self.finish(folder, *settings, **how)
            self._undisturbed[key] = folder / "run"
        return self._undisturbed[key]

    def uninterrupted(self, *settings: str, **how) -> RunState:
        return read_state(self.undisturbed(*settings, **how))

    def assert_resumes_exactly(self, folder: Path, *settings: str, **how) -> str:
        """Resume; assert that the end equals an uninterrupted training's. Returns the output."""
        ours = self.finish(folder, *settings, **how)
        assert differences(ours, self.uninterrupted(*settings, **how)) == []
        return output(folder)


def wait_all(ranks: Sequence[WarmRank]) -> list[int]:
    try:
        return [rank.wait(timeout_s=PATIENCE_S) for rank in ranks]
    finally:
        # Of a test that fails: ranks that hang would slow all tests after it.
        for rank in ranks:
            if rank.poll() is None:
                end_session(rank.pid)


def wait_and_end_others(
    ranks: Sequence[WarmRank], *, grace_s: float = 0.3
) -> list[int]:
    """Exit codes, as under a launcher: the other ranks are killed after the first one's end."""

    def num_running():
        return sum(rank.poll() is None for rank in ranks)

    wait_until(lambda: num_running() < len(ranks), else_say=ranks[0].output)
    deadline = time.monotonic() + grace_s
    while num_running() and time.monotonic() < deadline:
        time.sleep(0.01)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    return wait_all(ranks)


def wait_for_hold(folder: Path, ranks: Sequence[WarmRank]):
    """Wait until a rank is held; `release_hold` continues it."""

    def is_held():
        # A rank that has ended will never be held: its output says why it ended.
        assert all(rank.poll() is None for rank in ranks), ranks[0].output()
        return (folder / "held").exists()

    wait_until(is_held, else_say=ranks[0].output)


def release_hold(folder: Path):
    (folder / "go").touch()


def output(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("rank-*.log")))


def newest_step(folder: Path) -> int:
    """Step of the newest committed checkpoint, by name; 0: none."""
    folders = (folder / "run/checkpoints").glob("step-*")
    steps = [int(path.name.removeprefix("step-")) for path in folders]
    return max(steps, default=0)


def copy_run(killed: Path, folder: Path) -> Path:
    shutil.copytree(killed, folder, dirs_exist_ok=True)
    # Logs are appended to: what a resume prints must not be mixed with what the killed run did.
    for log in folder.glob("rank-*.log"):
        log.unlink()
    return folder
