"""Run one rank of a real training with injected faults, or without one part of the resumed state.

    python patched_rank.py pretrain/main.py --config ...

Owns: the places where a fault can be injected, and the faults. VITSCALE_FAULTS is a JSON list of
{"place", "nth", "do"}: the nth call of that place in this process does that fault.
VITSCALE_MUTANT names a row of MUTANTS.
Leaves out: the cases and their expectations (test_resume).
"""

import importlib
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.support.loader_runs import worker_pids
from vitscale.config.errors import UserError
from vitscale.engine.engine import Engine, ReadPart
from vitscale.training import session

# Calls of a training, in the module that looks the name up.
PLACES = yaml.safe_load("""
index: vitscale.training.session _read_index
prepare: vitscale.objectives.objective Objective.prepare
decoder: vitscale.training.session resolve_decoder
private folder: vitscale.models.interface private_folder
tracker: vitscale.training.session Tracker
init: finetune.start load_initial_weights
start: vitscale.training.session build_engine
restore: vitscale.training.session restore_engine
batch: vitscale.engine.device_batches DeviceBatches.__next__
forward: vitscale.engine.engine Engine.logits
backward: vitscale.engine.engine Engine.backward
step: vitscale.engine.engine Engine.step
log: vitscale.training.interval_log IntervalLog.write
evaluation: vitscale.training.session TrainingSession._evaluate
evaluated batch: vitscale.data.loader Batch.to
export: vitscale.engine.engine Engine.export_state
write: vitscale.checkpoint.folders write_new_file
rename: vitscale.checkpoint.folders commit_folder
prune: vitscale.checkpoint.folders _prune
flush: vitscale.tracking.journal Journal.flush
close: vitscale.tracking.tracker Tracker.close
leave: torch.distributed destroy_process_group
""")
Call = Callable[[], Any]


def _signal(*numbers: signal.Signals) -> Callable[[Call, tuple[Any, ...]], Any]:
    def act(call: Call, args: tuple[Any, ...]):
        for number in numbers:
            os.kill(os.getpid(), number)
        return call()

    return act


def _signal_worker(number: signal.Signals) -> Callable[[Call, tuple[Any, ...]], Any]:
    def act(call: Call, args: tuple[Any, ...]):
        os.kill(worker_pids()[0], number)
        return call()

    return act


def _hold(call: Call, args: tuple[Any, ...]):
    """Wait until the test calls `release_hold`."""
    folder = Path(os.environ["VITSCALE_HOLD"])
    (folder / "held").touch()
    deadline = time.monotonic() + 60
    while not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return call()


def _poison(call: Call, args: tuple[Any, ...]):
    return call() * float("nan")


def _lag_and_kill(call: Call, args: tuple[Any, ...]):
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(call: Call, args: tuple[Any, ...]):
    time.sleep(600)
    return call()


def _exit(code: int) -> Callable[[Call, tuple[Any, ...]], Any]:
    def act(call: Call, args: tuple[Any, ...]):
        os._exit(code)

    return act


def _raise(call: Call, args: tuple[Any, ...]):
    raise RuntimeError("injected fault")


def _raise_oserror(call: Call, args: tuple[Any, ...]):
    raise OSError(5, "Input/output error", str(args[0]) if args else None)


def _lack(call: Call, args: tuple[Any, ...]):
    raise UserError("is not here", where="what the run needs", next_step="look for it")


ACTIONS = {
    "kill": _signal(signal.SIGKILL),
    "crash": _signal(signal.SIGSEGV),
    "stop": _signal(signal.SIGSTOP),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGUSR2": _signal(signal.SIGUSR2),
    "burst": _signal(*[signal.SIGUSR2, signal.SIGTERM] * 10),
    "kill worker": _signal_worker(signal.SIGKILL),
    "SIGTERM worker": _signal_worker(signal.SIGTERM),
    "hold": _hold,
    "NaN": _poison,
    "lag and kill": _lag_and_kill,
    "hang": _hang,
    "leave": _exit(0),
    "exit 3": _exit(3),
    "raise": _raise,
    "EIO": _raise_oserror,
    "lack": _lack,
}


def plant(fault: dict[str, Any]) -> None:
    """`nth`: a number, or "every" for all calls."""
    module_name, path = PLACES[fault["place"]].split()
    owner = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    own = getattr(owner, name)
    calls = 0

    def faulty(*args, **kwargs):
        nonlocal calls

        def call():
            return own(*args, **kwargs)

        calls += 1
        if fault["nth"] not in (calls, "every"):
            return call()
        (Path(os.environ.get("VITSCALE_HOLD", ".")) / "fault").touch()
        return ACTIONS[fault["do"]](call, args)

    setattr(owner, name, faulty)


# ---- what a resume drops -------------------------------------------------------------------------


def _replaced(kind: str, by: str | None) -> Callable[[], None]:
    """Restore tensors of a kind as zeros, or from those of another kind."""

    def patch() -> None:
        own = Engine.import_state

        def import_state(self: Engine, read: ReadPart, *, optimizer_steps: int) -> None:
            def changed(name: str, start: int, count: int) -> torch.Tensor:
                found, _, rest = name.partition(".")
                if found != kind:
                    return read(name, start, count)
                return (
                    torch.zeros(count)
                    if by is None
                    else read(f"{by}.{rest}", start, count)
                )

            own(self, changed, optimizer_steps=optimizer_steps)

        Engine.import_state = import_state

    return patch


def _no_step_count() -> None:
    own = Engine.import_state

    def import_state(self: Engine, read: ReadPart, *, optimizer_steps: int) -> None:
        own(self, read, optimizer_steps=0)

    Engine.import_state = import_state


def _data_from_the_start() -> None:
    own = session.training_batches

    def training_batches(*args, start: int, stop: int, **kwargs):
        return own(*args, start=0, stop=stop - start, **kwargs)

    session.training_batches = training_batches


def _seed_by_process() -> None:
    own = session.seed_step

    def seed_step(seed: int, *, step: int, **kwargs) -> None:
        # The killed training resumes at step 15.
        own(seed, step=step - 15, **kwargs)

    session.seed_step = seed_step


MUTANTS = {
    "weights": _replaced("model", "ema"),
    "second moments": _replaced("exp_avg_sq", None),
    "average of the weights": _replaced("ema", "model"),
    "step count of the optimiser": _no_step_count,
    "data position": _data_from_the_start,
    "dropout and drop path key": _seed_by_process,
}


def main() -> None:
    for fault in json.loads(os.environ.get("VITSCALE_FAULTS", "[]")):
        plant(fault)
    mutant = os.environ.get("VITSCALE_MUTANT")
    if mutant:
        MUTANTS[mutant]()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
