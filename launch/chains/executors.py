"""Run a chain here, one run after another, or submit it: one SLURM job for each run.

A training is done when its last checkpoint is whole, a data preparation when its manifest is there,
an evaluation while its results are newer than all that it reads.
A job waits for `afterok` of the jobs that its run needs, with kill-on-invalid-dep: when one of them
fails, SLURM cancels all that follows. The same command does what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from launch.chains.load import Chain, ChainStep
from launch.comparison.report import ABSENT, Table, plain_text
from launch.jobs.preparation import RUN_TYPES, job_folder, prepare_job, submit_run
from launch.jobs.processes import EXIT_INTERRUPTED, StopFlag, run_here
from launch.jobs.queue import NoAnswerError, jobs_of, submitted_ids, user_jobs
from launch.jobs.run_states import RESULTS_NAME
from launch.jobs.submission import require_slurm
from launch.planning.dry_run import (
    Check,
    KnownFacts,
    as_table,
    batch_script,
    refuse_or_warn,
    run_checks,
    slurm_check,
)
from vitscale.checkpoint.folders import MANIFEST, looks_whole, step_folders, step_of
from vitscale.config.changes import changed_settings
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError, UserErrors
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepState:
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
    if errors := [state.error for state in states.values() if state.error is not None]:
        raise UserErrors(errors)


def step_state(step: ChainStep, states: States) -> StepState:
    """Return the state of one step. states: must include the steps that it needs."""
    if isinstance(step.run, DataPrepRun):
        return _data_prep_state(step, step.run)
    needs = [states[name] for name in step.needs]
    if step.kind != "evaluate":
        return _training_state(step, complete=all(state.is_done for state in needs))
    results = step.folder / RESULTS_NAME
    if not results.exists():
        return StepState(text="missing")
    finished = results.stat().st_mtime
    files = sorted(
        step.folder.glob("*/config-*.yaml"), key=lambda path: path.stat().st_mtime
    )
    is_newest = all(
        state.is_done and finished >= (state.finished or 0) for state in needs
    )
    if not is_newest or not files or _changes_since(step.run, files[-1]):
        return StepState(text="old")
    return StepState(text="done", finished=finished)


def _data_prep_state(step: ChainStep, run: DataPrepRun) -> StepState:
    folder = step.folder
    manifest = folder / MANIFEST_NAME
    if not manifest.exists():
        return StepState(text="missing")
    manifest_read = read_manifest(folder)
    made = manifest_read.config
    settings = run.model_dump(mode="json")
    now = flatten({key: settings[key] for key in made.keys() & settings.keys()})

    # A manifest also has the hash of each file that a setting names, as KEY_blake3.
    for key in [key for key in flatten(made) if key.endswith(HASH_OF_FILE)]:
        file = Path(now.get(key.removesuffix(HASH_OF_FILE), "")).expanduser()
        # Only the nodes may see the file.
        now[key] = blake3_of_file(file) if file.is_file() else flatten(made)[key]

    if changes := _changes(made, now):
        return _changed("exists already, made with other settings", changes, folder)
    if difference := run.source.other_place(manifest_read.source_path):
        return _changed("exists already, from another source", [difference], folder)
    return StepState(text="done", finished=manifest.stat().st_mtime)


def _training_state(step: ChainStep, *, complete: bool) -> StepState:
    """Return the state of a training. complete: all steps that it needs are done."""
    folders = step_folders(step.folder / "checkpoints")
    newest = next((path for path in folders if looks_whole(path)), None)
    if newest is None:
        return StepState(text="missing")
    at = step_of(newest)
    changes = _changes_since(step.run, step.folder / "config.yaml")
    if not complete:
        changes = [
            f"what it starts from is missing or incomplete: {', '.join(step.needs)}"
        ]
    if changes:
        return _changed(
            f"trained to step {at:,} with other settings", changes, step.folder
        )
    start = read_start(step.folder)
    if start is None or at < start.total_steps:
        return StepState(text=f"resumable (step {at:,})")
    return StepState(text="done", finished=(newest / MANIFEST).stat().st_mtime)


def _changed(what: str, changes: list[str], folder: Path) -> StepState:
    error = UserError(
        "\n    ".join([what, *changes]),
        where=str(folder),
        next_step="undo the change, remove this folder to make it again, or rename the chain",
    )
    return StepState(text="changed", error=error)


def _changes_since(run: Run, path: Path) -> list[str]:
    """Settings with an effect that differ from a configuration that was run."""
    try:
        made = load_run_file(RUN_TYPES, path).model_dump(mode="json")
    except UserError:
        return [f"{path} cannot be read by this version"]
    return _changes(made, run.model_dump(mode="json"))


def _changes(made: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings with an effect that differ."""
    changes = changed_settings(made, now, purpose="chain")
    return [
        f"{key}: made with {before or 'nothing'}, now {after or 'nothing'}"
        for key, (before, after) in changes.items()
    ]


# ---- here -------------------------------------------------------------------------------------


def overview(chain: Chain, states: States) -> str:
    """Tabulate all runs with the stages that they wait for, and their states."""
    rows = []
    for step in chain.steps:
        after = ", ".join(dict.fromkeys(name.partition("/")[0] for name in step.needs))
        state = states[step.name].text
        rows.append((step.name, step.kind, after or ABSENT, state))
    num_done = sum(state.is_done for state in states.values())
    title = f"Chain {chain.name}: {len(chain.steps)} runs, {num_done} done"
    header = ("run", "what", "after", "state")
    return plain_text(Table(title=title, header=header, rows=tuple(rows)))


def _start(chain: Chain, *, num_procs: int | None) -> dict[str, StepState]:
    """Show the runs with their states; num_procs is None on SLURM. Raises UserErrors."""
    states = chain_states(chain)
    say(overview(chain, states))
    check_unchanged(states)
    # A stage takes weights that an earlier one makes and, on one machine, what cores there are.
    leave_out = {"weights"} if num_procs is None else {"weights", "cores"}
    refuse_or_warn(_checks(chain, states, num_procs), leave_out=leave_out)
    return states


def _checks(chain: Chain, states: States, num_procs: int | None) -> list[Check]:
    """Check all unfinished runs; equal rows appear once."""
    kinds, rows = {step.name: step.kind for step in chain.steps}, []
    known: KnownFacts = {}
    for step in chain.steps:
        missing = [kinds[name] for name in step.needs if not states[name].is_done]
        # Shards that the chain is still to make cannot be checked.
        if not states[step.name].is_done and "data_prep" not in missing:
            run = step.run
            if num_procs is not None:
                launch = run.launch.model_copy(
                    update={"nodes": 1, "tasks_per_node": num_procs}
                )
                run = run.model_copy(update={"launch": launch})
            rows += run_checks(run, known=known)
    if num_procs is None:
        rows += [
            row
            for script in _scripts(chain, states).values()
            for row in slurm_check(script)
        ]
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
        states[step.name] = state = step_state(step, states)
        if state.is_done:
            say(f"{title}: done before")
        elif missing:
            failures.append(f"{step.name}: not started: {missing[0]} is not done")
        elif state.error is not None:
            failures.append(f"{step.name}: {state.error.text()}")
        else:
            say(title)
            job = prepare_job(step.run, cluster="local")
            code = run_here(
                job, python=step.run.launch.python, num_procs=num_procs, stop=stop
            )
            if code in (EXIT_STOPPED_RESUMABLE, EXIT_INTERRUPTED):
                say("stopped; the same command resumes the chain")
                return code
            if code:
                alone = f"vitscale launch --local --config {quote(os.path.relpath(job.config))}"
                failures.append(
                    f"{step.name}: ended with code {code}\n    alone: {alone}"
                )
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
    """Map one unfinished step of each stage to its batch script; others of a stage are alike."""
    stages = {s.stage: s for s in reversed(chain.steps) if not states[s.name].is_done}
    return {step.name: batch_script(step.run) for step in reversed(stages.values())}


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
    try:
        queue = user_jobs()
    except NoAnswerError as error:
        raise UserError(
            f"SLURM does not answer: {error}", next_step="try again later"
        ) from None
    jobs: dict[str, list[str]] = {}
    new: list[str] = []
    for step in chain.steps:
        if states[step.name].is_done:
            say(f"skipped   {step.name}: done")
            continue
        needed = sorted({job for name in step.needs for job in jobs.get(name, ())})
        kept = jobs_of(job_folder(step.run, cluster="slurm").parent, jobs=queue)
        if kept:
            jobs[step.name] = submitted_ids(kept)
            say(
                f"kept      {step.name}: job {kept[0].job_id} is {kept[0].state.lower()}"
            )
            continue
        submission = submit_run(step.run, after_ok=needed, earlier="ignore")
        jobs[step.name] = [submission.job_id]
        new.append(submission.job_id)
        after = f", after {' and '.join(needed)}" if needed else ""
        say(f"submitted {step.name}: job {submission.job_id}{after}")
    if new:
        say(f"  state    vitscale status {quote(str(chain.folder))}")
        say(f"  cancel   scancel {' '.join(new)}")
    say(_compare_line(chain))
    say("When the jobs have ended, the same command submits what is not done.")
