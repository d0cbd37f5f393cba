"""Run a chain here, one run after another, or submit it: one SLURM job for each run.

Owns: the table before it starts, the checks of all runs, what is run, kept, submitted and
cancelled, and the dependencies between jobs.
Leaves out: one run (`launch.jobs`), and what is done (`states`).

A job waits for `afterok` of the jobs that its run needs, with kill-on-invalid-dep: when one of them
fails, SLURM cancels all that follows. The same command does what is missing.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from launch.chains.load import Chain, ChainStep
from launch.chains.states import States, chain_states, check_unchanged, step_state
from launch.comparison.report import ABSENT, Table, plain_text
from launch.jobs.monitor import StopFlag
from launch.jobs.preparation import job_folder, prepare_job, submit_run, with_num_workers
from launch.jobs.queue import NoAnswerError, QueuedJob, ask_slurm, jobs_of, submitted_ids, user_jobs
from launch.jobs.submission import require_slurm
from launch.jobs.supervision.foreground import start_and_watch
from launch.planning.checks import Check, refuse_or_warn, run_checks, slurm_check
from launch.planning.dry_run import batch_script, check_data, data_facts
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError, UserErrors
from vitscale.distributed.processes import num_cores
from vitscale.runs.data_prep import DataPrepRun
from vitscale.runs.training import TrainingRun


def say(text: str) -> None:
    print(text, flush=True)


def overview(chain: Chain, states: States) -> str:
    """All runs with what they wait for, what each asks for, and their states."""
    rows = []
    for step in chain.steps:
        after = dict.fromkeys(name.partition("/")[0] for name in step.needs)
        rows.append(
            (
                step.name,
                step.kind,
                ", ".join(after) or ABSENT,
                _resources(step),
                states[step.name].text,
            )
        )
    num_done = sum(state.is_done for state in states.values())
    title = f"Chain {chain.name}: {len(chain.steps)} runs, {num_done} done"
    header = ("run", "what", "after", "each", "state")
    return plain_text(Table(title=title, header=header, rows=tuple(rows)))


def _resources(step: ChainStep) -> str:
    """What one run asks SLURM for."""
    launch = step.run.launch
    if isinstance(step.run, DataPrepRun):
        return f"{launch.num_tasks} tasks x {launch.cpus_per_task} cores"
    if launch.gpus_per_node:
        return f"{launch.nodes} nodes x {launch.gpus_per_node} GPUs"
    return f"{launch.nodes * launch.tasks_per_node} tasks x {launch.cpus_per_task} cores"


def _check_data(chain: Chain, states: States) -> None:
    """Check the shards of all trainings but those whose shards the chain makes.

    Raises UserErrors with equal errors once.
    """
    errors: dict[str, UserError] = {}
    for step in chain.steps:
        if isinstance(step.run, TrainingRun) and not states[step.name].is_done:
            try:
                if not _is_made_here(chain, step, states):
                    check_data(step.run, data_facts(step.run))
            except UserError as error:
                errors.setdefault(error.text(), error)
    if errors:
        raise UserErrors(list(errors.values()))


def _is_made_here(chain: Chain, step: ChainStep, states: States) -> bool:
    """Whether the chain is still to make the shards of a run."""
    sources = chain.sources(step)
    return any(s.kind == "data_prep" and not states[s.name].is_done for s in sources)


def _compare_line(chain: Chain) -> str:
    return f"  compare  python launch/compare.py {chain.folder}"


# ---- here -------------------------------------------------------------------------------------


def run_here(chain: Chain, *, num_procs: int, stop: StopFlag) -> int:
    """Run what is missing, each with num_procs processes: 0, 1 after a failure, 75 if stopped."""
    states = chain_states(chain)
    say(overview(chain, states))
    check_unchanged(states)
    _check_data(chain, states)
    failures: list[str] = []
    for number, step in enumerate(chain.steps, start=1):
        title = f"[{number}/{len(chain.steps)}] {step.name}"
        missing = [name for name in step.needs if not states[name].is_done]
        # Its input may have been made a moment ago.
        states[step.name] = state = step_state(step, [states[name] for name in step.needs])
        if state.is_done:
            say(f"{title}: done before")
        elif missing:
            failures.append(f"{step.name}: not started: {missing[0]} is not done")
        elif state.error is not None:
            failures.append(f"{step.name}: {state.error.text()}")
        else:
            say(title)
            code, command = _run(step, num_procs=num_procs, stop=stop)
            if code == EXIT_STOPPED_RESUMABLE:
                say("stopped; the same command resumes the chain")
                return code
            if code:
                failures.append(f"{step.name}: ended with code {code}\n    alone: {command}")
            states[step.name] = step_state(step, [states[name] for name in step.needs])
    if failures:
        say(f"{len(failures)} run(s) of the chain are not done:")
        say("\n".join(f"  {failure}" for failure in failures))
        say("the same command runs what is not done")
        return 1
    say(_compare_line(chain))
    return 0


def _run(step: ChainStep, *, num_procs: int, stop: StopFlag) -> tuple[int, str]:
    """(exit code, the command that runs this step alone)."""
    run = with_num_workers(step.run, num_cores=max(1, num_cores() // num_procs))
    job, folder = prepare_job(run, cluster="local")
    words = ["python", "launch/local.py", "--config", os.path.relpath(job.config)]
    command = shlex.join([*words, "--num-procs", str(num_procs)])
    code = start_and_watch(job, launch=run.launch, num_procs=num_procs, folder=folder, stop=stop)
    return code, command


# ---- on SLURM ---------------------------------------------------------------------------------


def describe_chain(chain: Chain) -> str:
    """The table, and a batch script of each stage that has something to do. Writes nothing."""
    states = chain_states(chain)
    parts = [overview(chain, states)]
    for step in _first_missing(chain, states):
        script = batch_script(step.run)
        parts.append(f"# Batch script of {step.name}\n{script.rstrip()}\n")
        refuse_or_warn(slurm_check(script))
    return "\n".join(parts)


def submit_chain(chain: Chain) -> None:
    """Submit every run that is neither done, queued nor running.

    Raises UserErrors before anything is submitted, and UserError if sbatch refuses a job; what was
    accepted before stays submitted.
    """
    states = chain_states(chain)
    say(overview(chain, states))
    check_unchanged(states)
    if all(state.is_done for state in states.values()):
        say(_compare_line(chain))
        return
    _check_data(chain, states)
    require_slurm()
    refuse_or_warn(_checks(chain, states), leave_out={"weights"})
    try:
        queue = user_jobs()
    except NoAnswerError as error:
        raise UserError(f"SLURM does not answer: {error}", next_step="try again later") from None
    jobs: dict[str, list[str]] = {}
    new: list[str] = []
    for step in chain.steps:
        if states[step.name].is_done:
            say(f"skipped   {step.name}: done")
            continue
        needed = {job for name in step.needs for job in jobs.get(name, ())}
        if kept := _kept(step, queue, is_stale=not needed.isdisjoint(new)):
            jobs[step.name] = submitted_ids(kept)
            say(f"kept      {step.name}: job {kept[0].job_id} is {kept[0].state.lower()}")
            continue
        before = sorted(needed)
        submission = submit_run(step.run, after_ok=before, earlier="ignore")
        jobs[step.name] = [submission.job_id]
        new.append(submission.job_id)
        after = f", after {' and '.join(before)}" if before else ""
        say(f"submitted {step.name}: job {submission.job_id}{after}")
    if new:
        say(
            f"  state    python launch/status.py {chain.folder}\n  cancel   scancel {' '.join(new)}"
        )
    say(_compare_line(chain))
    say("When the jobs have ended, the same command submits what is not done.")


def _first_missing(chain: Chain, states: States) -> list[ChainStep]:
    """One run of each stage that has something to do: all ask for the same resources."""
    first: dict[str, ChainStep] = {}
    for step in chain.steps:
        if not states[step.name].is_done:
            first.setdefault(step.stage, step)
    return list(first.values())


def _checks(chain: Chain, states: States) -> list[Check]:
    rows: list[Check] = []
    for step in _first_missing(chain, states):
        rows += slurm_check(batch_script(step.run))
        if not _is_made_here(chain, step, states):
            rows += run_checks(step.run)
    return list({(row.name, row.detail): row for row in rows}.values())


def _kept(step: ChainStep, queue: Sequence[QueuedJob], *, is_stale: bool) -> list[QueuedJob]:
    """The jobs of a run that stay. One that waits for jobs that have failed is cancelled.

    is_stale: whether what the run needs was submitted again.
    """
    jobs = jobs_of(job_folder(step.run, cluster="slurm").parent, jobs=queue)
    waiting = [job for job in jobs if is_stale and job.state == "PENDING"]
    for job_id in submitted_ids(waiting):
        try:
            ask_slurm("scancel", job_id)
        except NoAnswerError as error:
            what = f"scancel {job_id} failed: {error}"
            raise UserError(what, next_step="try again later") from None
        say(f"cancelled {step.name}: job {job_id} waited for jobs that have failed")
    return [job for job in jobs if job not in waiting]
