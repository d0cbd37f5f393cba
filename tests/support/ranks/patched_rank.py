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
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.support.loader_runs import worker_pids
from vitscale.config.errors import UserError
from vitscale.engine.engine import Engine
from vitscale.training import session

# Calls of a training, in the module that looks the name up.
PLACES = yaml.safe_load("""
index: vitscale.training.session _read_index
prepare: vitscale.objectives.objective Objective.prepare
decoder: vitscale.training.session resolve_decoder
private folder: vitscale.models.interface private_folder
tracker: vitscale.training.session Tracker
init: vitscale.training.session load_initial_weights
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
targets: pretrain.targets rows_of
leave: torch.distributed destroy_process_group
""")
Call = Callable[[], Any]
Arguments = tuple[Any, ...]
# Does a fault in place of a call, or beside it; the arguments are those of the call.
Action = Callable[[Call, Arguments], Any]


def _signal(*numbers: signal.Signals) -> Action:
    def act(call, _):
        for number in numbers:
            os.kill(os.getpid(), number)
        return call()

    return act


def _signal_worker(number: signal.Signals) -> Action:
    def act(call, _):
        os.kill(worker_pids()[0], number)
        return call()

    return act


def _hold(call: Call, _: Arguments):
    """Wait until the test calls `release_hold`."""
    folder = Path(os.environ["VITSCALE_HOLD"])
    (folder / "held").touch()
    # Not for ever: a test that fails in between leaves a rank that ends by itself.
    deadline = time.monotonic() + 60
    while not (folder / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return call()


def _poison(call: Call, _: Arguments):
    return call() * float("nan")


def _lag_and_kill(call: Call, _: Arguments):
    # Long enough for a save in the background to be committed before.
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(call: Call, _: Arguments):
    # Longer than any limit that should end it.
    time.sleep(600)
    return call()


def _exit(code: int) -> Action:
    def act(call, _):
        # Without Python's end, as a library does that calls exit in C.
        os._exit(code)

    return act


def _raise(call: Call, _: Arguments):
    raise RuntimeError("injected fault")


def _raise_oserror(call: Call, arguments: Arguments):
    # As the system's own: the first argument of the places that write is the path.
    path = str(arguments[0]) if arguments else None
    raise OSError(5, "Input/output error", path)


def _lack(call: Call, _: Arguments):
    raise UserError("is not here", where="what the run needs", next_step="look for it")


# Signals to this rank, or to its first loader worker; then everything else.
ACTIONS: dict[str, Action] = {
    "kill": _signal(signal.SIGKILL),
    "crash": _signal(signal.SIGSEGV),
    "stop": _signal(signal.SIGSTOP),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGUSR2": _signal(signal.SIGUSR2),
    # Each may come again before the first one has been acted on, and mixed with the other.
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


def plant(fault: dict[str, Any]):
    """`nth`: a number, or "every" for all calls."""
    module_name, path = PLACES[fault["place"]].split()
    owner = importlib.import_module(module_name)
    *class_names, name = path.split(".")
    for class_name in class_names:
        owner = getattr(owner, class_name)
    original = getattr(owner, name)
    calls = 0

    def faulty(*args, **kwargs):
        nonlocal calls
        calls += 1
        call = partial(original, *args, **kwargs)
        if fault["nth"] not in (calls, "every"):
            return call()
        # A test can see that its fault was reached, even if the run survives it.
        folder = Path(os.environ.get("VITSCALE_HOLD", "."))
        (folder / "fault").touch()
        return ACTIONS[fault["do"]](call, args)

    setattr(owner, name, faulty)


# ---- what a resume drops -------------------------------------------------------------------------


def _replaced(kind: str, by: str | None) -> Callable[[], None]:
    """Restore tensors of a kind as zeros, or from those of another kind."""

    def patch():
        original = Engine.import_state

        def import_state(self, read, *, optimizer_steps):
            def changed(name, start, count):
                kind_of_name, _, parameter = name.partition(".")
                if kind_of_name != kind:
                    return read(name, start, count)
                if by is None:
                    return torch.zeros(count)
                return read(f"{by}.{parameter}", start, count)

            original(self, changed, optimizer_steps=optimizer_steps)

        Engine.import_state = import_state

    return patch


def _no_step_count():
    original = Engine.import_state

    def import_state(self, read, *, optimizer_steps):
        original(self, read, optimizer_steps=0)

    Engine.import_state = import_state


def _data_from_the_start():
    original = session.training_batches

    def training_batches(*args, start, stop, **kwargs):
        # As many samples, so that the run ends at the same step.
        return original(*args, start=0, stop=stop - start, **kwargs)

    session.training_batches = training_batches


def _seed_by_process():
    original = session.seed_step

    def seed_step(seed, *, step, **kwargs):
        # The killed training resumes at step 15.
        original(seed, step=step - 15, **kwargs)

    session.seed_step = seed_step


# Each part of the state without which a resume is not exact: a test that misses one is too weak.
MUTANTS = {
    "weights": _replaced("model", "ema"),
    "second moments": _replaced("exp_avg_sq", None),
    "average of the weights": _replaced("ema", "model"),
    "step count of the optimiser": _no_step_count,
    "data position": _data_from_the_start,
    "dropout and drop path key": _seed_by_process,
}


def main():
    for fault in json.loads(os.environ.get("VITSCALE_FAULTS", "[]")):
        plant(fault)
    mutant = os.environ.get("VITSCALE_MUTANT")
    if mutant:
        MUTANTS[mutant]()

    # From here on as `python pretrain/main.py ...`.
    del sys.argv[0]
    script = sys.argv[0]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
