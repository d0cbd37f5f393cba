"""Run a chain here, one run after another, or submit it: one SLURM job for each run.

A training is done when its last checkpoint is whole, a data preparation when its manifest is there,
an evaluation while its results are newer than all that it reads.
A job waits for `afterok` of the jobs that its run needs, with kill-on-invalid-dep: when one of them
fails, SLURM cancels all that follows. The same command does what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from launch.chains.load import Chain, ChainStep
from launch.comparison.report import ABSENT, Table, plain_text
from launch.jobs.preparation import RUN_TYPES, job_folder, prepare_job, submit_run
from launch.jobs.processes import StopFlag, run_here
from launch.jobs.queue import NoAnswerError, jobs_of, submitted_ids, user_jobs
from launch.jobs.run_folders import CONFIGS, newest
from launch.jobs.run_states import RESULTS_NAME
from launch.jobs.submission import require_slurm
from launch.planning.dry_run import (
    Check,
    KnownFacts,
    as_table,
    batch_script,
    check_device,
    on_this_machine,
    refuse_or_warn,
    run_checks,
    slurm_check,
)
from vitscale.checkpoint.folders import MANIFEST, step_folders, step_of, whole_manifest
from vitscale.config.changes import changed_settings
from vitscale.config.errors import (
    EXIT_INTERRUPTED,
    EXIT_STOPPED_RESUMABLE,
    UserError,
    UserErrors,
)
from vitscale.config.loader import load_run_file
from vitscale.config.redaction import flatten
from vitscale.config.section import Run
from vitscale.data.index import MANIFEST_NAME, read_manifest
from vitscale.distributed.atomic_files import blake3_of_file
from vitscale.distributed.events import read_start
from vitscale.runs.data_prep import DataPrepRun

say = partial(print, flush=True)
HASH_OF_FILE = "_blake3"


# ---- what is done -----------------------------------------------------------------------------


class StepState(NamedTuple):
    text: str
    """done, missing, old, resumable (step N) or changed."""
    finished: float | None = None
    """When it was finished, unix seconds; None: it is not done."""
    error: UserError | None = None
    """Error that keeps the run from being used or made."""

    @property
    def is_done(self) -> bool:
        return self.finished is not None


States = Mapping[str, StepState]
"""Name of the step -> state."""


def chain_states(chain: Chain) -> dict[str, StepState]:
    states: dict[str, StepState] = {}
    for step in chain.steps:
        states[step.name] = step_state(step, states)
    return states


def check_unchanged(states: States) -> None:
    """Raise UserErrors for runs made with other settings; none is used or overwritten."""
    # All of them at once: otherwise each correction would only show the next one.
    errors = [state.error for state in states.values() if state.error is not None]
    if errors:
        raise UserErrors(errors)


def step_state(step: ChainStep, states: States) -> StepState:
    """Return the state of one step. states: must include the steps that it needs."""
    if isinstance(step.run, DataPrepRun):
        return _data_prep_state(step, step.run)
    needed = [states[name] for name in step.needs]
    if step.kind != "evaluate":
        return _training_state(step, complete=all(state.is_done for state in needed))

    results = step.folder / RESULTS_NAME
    if not results.exists():
        return StepState(text="missing")

    # Its results are those of other weights or shards if one of these was made later.
    finished = results.stat().st_mtime
    is_newest = all(
        state.is_done and finished >= (state.finished or 0) for state in needed
    )
    # The newest of its configurations is the one that it has used.
    config = newest(step.folder.glob(CONFIGS))
    if not is_newest or config is None or _changes_since(step.run, config):
        return StepState(text="old")
    return StepState(text="done", finished=finished)


def _data_prep_state(step: ChainStep, run: DataPrepRun) -> StepState:
    folder = step.folder
    path = folder / MANIFEST_NAME
    if not path.exists():
        return StepState(text="missing")

    # Only settings that both versions know can be compared.
    manifest = read_manifest(folder)
    before = flatten(manifest.config)
    settings = run.model_dump(mode="json")
    now = flatten({key: settings[key] for key in manifest.config.keys() & settings})

    # A manifest also has the hash of each file that a setting names, as KEY_blake3.
    for key, known_hash in before.items():
        if not key.endswith(HASH_OF_FILE):
            continue
        now[key] = known_hash
        file = Path(now.get(key.removesuffix(HASH_OF_FILE), ""))
        # Only the nodes may see the file.
        if file.is_file():
            now[key] = blake3_of_file(file)

    if changes := _changes(manifest.config, now):
        return _changed("exists already, made with other settings", changes, folder)
    if difference := run.source.other_place(manifest.source_path):
        return _changed("exists already, from another source", [difference], folder)
    return StepState(text="done", finished=path.stat().st_mtime)


def _training_state(step: ChainStep, *, complete: bool) -> StepState:
    """Return the state of a training. complete: all steps that it needs are done."""
    folders = step_folders(step.folder / "checkpoints")
    newest = next((path for path in folders if whole_manifest(path)), None)
    if newest is None:
        return StepState(text="missing")

    last_step = step_of(newest)
    changes = _changes_since(step.run, step.folder / "config.yaml")
    # It started from what was there before, which nobody can compare any more.
    if not complete:
        needs = ", ".join(step.needs)
        changes = [f"what it starts from is missing or incomplete: {needs}"]
    if changes:
        what = f"trained to step {last_step:,} with other settings"
        return _changed(what, changes, step.folder)

    start = read_start(step.folder)
    if start is None or last_step < start.total_steps:
        return StepState(text=f"resumable (step {last_step:,})")
    return StepState(text="done", finished=(newest / MANIFEST).stat().st_mtime)


def _changed(what: str, changes: list[str], folder: Path) -> StepState:
    error = UserError(
        "\n    ".join([what, *changes]),
        where=folder,
        next_step="undo the change, remove this folder to make it again, or rename the chain",
    )
    return StepState(text="changed", error=error)


def _changes_since(run: Run, path: Path) -> list[str]:
    """List settings with an effect that differ from a configuration that was run."""
    try:
        before = load_run_file(RUN_TYPES, path).model_dump(mode="json")
    except UserError:
        return [f"{path} cannot be read by this version"]
    return _changes(before, run.model_dump(mode="json"))


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List settings with an effect that differ."""
    # Another number of nodes, or a tag, makes no other model.
    changes = changed_settings(before, now, purpose="chain")
    return [
        f"{key}: made with {old or 'nothing'}, now {new or 'nothing'}"
        for key, (old, new) in changes.items()
    ]


# ---- here -------------------------------------------------------------------------------------


def overview(chain: Chain, states: States) -> str:
    """Tabulate all runs with the stages that they wait for, and their states."""
    rows = []
    for step in chain.steps:
        # Names of stages, each once: a run may need ten of one sweep.
        stages = dict.fromkeys(name.partition("/")[0] for name in step.needs)
        needs = ", ".join(stages) or ABSENT
        rows.append((step.name, step.kind, needs, states[step.name].text))

    num_done = sum(state.is_done for state in states.values())
    title = f"Chain {chain.name}: {len(chain.steps)} runs, {num_done} done"
    header = ("run", "what", "after", "state")
    return plain_text(Table(title=title, header=header, rows=tuple(rows)))


def _start(chain: Chain, *, num_procs: int | None) -> dict[str, StepState]:
    """Show the runs with their states; num_procs is None on SLURM. Raises UserErrors."""
    states = chain_states(chain)
    say(overview(chain, states))
    check_unchanged(states)

    # Weights may be those that an earlier stage is to make.
    leave_out = {"weights"}
    if num_procs is not None:
        # The processes of one machine take what cores there are.
        leave_out.add("cores")
    refuse_or_warn(_checks(chain, states, num_procs), leave_out=leave_out)
    return states


def _checks(chain: Chain, states: States, num_procs: int | None) -> list[Check]:
    """Check all unfinished runs; equal rows appear once."""
    rows: list[Check] = []
    kinds = {step.name: step.kind for step in chain.steps}
    known: KnownFacts = {}
    for step in chain.steps:
        if states[step.name].is_done:
            continue
        # Shards that the chain is still to make cannot be checked.
        missing = [kinds[name] for name in step.needs if not states[name].is_done]
        if "data_prep" in missing:
            continue

        run = step.run
        if num_procs is not None:
            run = on_this_machine(run, num_procs)
            check_device(run)
        rows += run_checks(run, known=known)

    if num_procs is None:
        for script in _scripts(chain, states).values():
            rows += slurm_check(script)
    return list({(row.name, row.detail): row for row in rows}.values())


def _compare_line(chain: Chain) -> str:
    return f"  compare  vitscale compare {quote(str(chain.folder))}"


def run_chain(chain: Chain, *, num_procs: int, stop: StopFlag) -> int:
    """Run the unfinished steps in order. Returns 1 if a run failed, 75 or 130 if stopped."""
    states = _start(chain, num_procs=num_procs)
    failures: list[str] = []

    for number, step in enumerate(chain.steps, start=1):
        title = f"[{number}/{len(chain.steps)}] {step.name}"
        missing = [name for name in step.needs if not states[name].is_done]
        # Its input may have been made a moment ago.
        state = step_state(step, states)
        states[step.name] = state
        if state.is_done:
            say(f"{title}: done before")
            continue
        if missing:
            failures.append(f"{step.name}: not started: {missing[0]} is not done")
            continue
        if state.error is not None:
            failures.append(f"{step.name}: {state.error.text()}")
            continue

        say(title)
        job = prepare_job(step.run, cluster="local")
        code = run_here(
            job, python=step.run.launch.python, num_procs=num_procs, stop=stop
        )
        if code in (EXIT_STOPPED_RESUMABLE, EXIT_INTERRUPTED):
            say("stopped; the same command resumes the chain")
            return code
        # Runs that do not need this one still run.
        if code:
            alone = (
                f"vitscale launch --local --config {quote(os.path.relpath(job.config))}"
            )
            failures.append(f"{step.name}: ended with code {code}\n    alone: {alone}")
        states[step.name] = step_state(step, states)

    if failures:
        say(f"{len(failures)} run(s) of the chain are not done:")
        say("\n".join(f"  {failure}" for failure in failures))
        say("the same command runs what is not done")
        return 1
    say(_compare_line(chain))
    return 0


# ---- on SLURM ---------------------------------------------------------------------------------


def _scripts(chain: Chain, states: States) -> dict[str, str]:
    """Map the first unfinished step of each stage to its batch script; others are alike."""
    first: dict[str, ChainStep] = {}
    for step in chain.steps:
        if not states[step.name].is_done:
            first.setdefault(step.stage, step)
    return {step.name: batch_script(step.run) for step in first.values()}


def describe_chain(chain: Chain) -> str:
    """Describe the table, the checks and a batch script of each unfinished stage."""
    states = chain_states(chain)
    checks = as_table(_checks(chain, states, None))
    parts = [overview(chain, states), f"# Checks\n{checks}\n"]
    for name, script in _scripts(chain, states).items():
        parts.append(f"# Batch script of {name}\n{script.rstrip()}\n")
    return "\n".join(parts)


def submit_chain(chain: Chain) -> None:
    """Submit every run that is neither done, queued nor running.

    Raises UserErrors before anything is submitted, and UserError if sbatch refuses a job; what was
    accepted before stays submitted.
    """
    states = _start(chain, num_procs=None)
    if all(state.is_done for state in states.values()):
        say(_compare_line(chain))
        return

    require_slurm()
    # One question for all runs; without an answer, a run could be submitted twice.
    try:
        queue = user_jobs()
    except NoAnswerError as error:
        raise UserError(
            f"SLURM does not answer: {error}", next_step="try again later"
        ) from None

    ids_of: dict[str, list[str]] = {}
    new_ids: list[str] = []
    for step in chain.steps:
        name = step.name
        if states[name].is_done:
            say(f"skipped   {name}: done")
            continue

        # A job of an earlier submission goes on, and others may wait for it.
        kept = jobs_of(job_folder(step.run, cluster="slurm").parent, jobs=queue)
        if kept:
            ids_of[name] = submitted_ids(kept)
            say(f"kept      {name}: job {kept[0].job_id} is {kept[0].state.lower()}")
            continue

        # What is done has no job to wait for.
        needed = {job_id for need in step.needs for job_id in ids_of.get(need, ())}
        submission = submit_run(step.run, after_ok=sorted(needed), earlier="ignore")
        ids_of[name] = [submission.job_id]
        new_ids.append(submission.job_id)
        line = f"submitted {name}: job {submission.job_id}"
        if needed:
            line += f", after {' and '.join(sorted(needed))}"
        say(line)

    if new_ids:
        say(f"  state    vitscale status {quote(str(chain.folder))}")
        say(f"  cancel   scancel {' '.join(new_ids)}")
    say(_compare_line(chain))
    say("When the jobs have ended, the same command submits what is not done.")
