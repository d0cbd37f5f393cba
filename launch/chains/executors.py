"""Run a chain here, one run after another, or submit it: one SLURM job for each run.

Owns: the table before it starts, the checks of all runs, what is run, kept and submitted, and
the dependencies between jobs.
Leaves out: one run (`launch.jobs`), and what is done (`states`).

A job waits for `afterok` of the jobs that its run needs, with kill-on-invalid-dep: when one of them
fails, SLURM cancels all that follows. The same command does what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Container
from functools import partial

from launch.chains.load import Chain
from launch.chains.states import States, StepState, chain_states, check_unchanged, step_state
from launch.comparison.report import ABSENT, Table, plain_text
from launch.jobs.preparation import job_folder, prepare_job, submit_run
from launch.jobs.processes import StopFlag, run_here
from launch.jobs.queue import NoAnswerError, jobs_of, submitted_ids, user_jobs
from launch.jobs.submission import require_slurm
from launch.planning.checks import refuse_or_warn, run_checks, slurm_check
from launch.planning.dry_run import batch_script
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError

say = partial(print, flush=True)


def overview(chain: Chain, states: States) -> str:
    """All runs with what they wait for, and their states."""
    rows = []
    for step in chain.steps:
        after = ", ".join(dict.fromkeys(name.partition("/")[0] for name in step.needs))
        state = states[step.name].text
        rows.append((step.name, step.kind, after or ABSENT, state))
    num_done = sum(state.is_done for state in states.values())
    title = f"Chain {chain.name}: {len(chain.steps)} runs, {num_done} done"
    header = ("run", "what", "after", "state")
    return plain_text(Table(title=title, header=header, rows=tuple(rows)))


def _start(chain: Chain, *, leave_out: Container[str]) -> dict[str, StepState]:
    """Show the runs with their states. Raises UserErrors for what stops the chain.

    leave_out: checks whose warnings are not shown.
    """
    states = chain_states(chain)
    say(overview(chain, states))
    check_unchanged(states)
    kinds, rows = {step.name: step.kind for step in chain.steps}, []
    for step in chain.steps:
        missing = [kinds[name] for name in step.needs if not states[name].is_done]
        # Shards that the chain is still to make cannot be checked.
        if not states[step.name].is_done and "data_prep" not in missing:
            rows += run_checks(step.run)
    each_once = {(row.name, row.detail): row for row in rows}
    refuse_or_warn(list(each_once.values()), leave_out=leave_out)
    return states


def _compare_line(chain: Chain) -> str:
    return f"  compare  python launch/compare.py {chain.folder}"


def run_chain(chain: Chain, *, num_procs: int, stop: StopFlag) -> int:
    """Run what is missing, each with num_procs processes: 0, 1 after a failure, 75 if stopped."""
    # A stage takes weights that an earlier one makes, and what cores there are.
    states = _start(chain, leave_out={"weights", "cores"})
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
            code = run_here(job, python=step.run.launch.python, num_procs=num_procs, stop=stop)
            if code == EXIT_STOPPED_RESUMABLE:
                say("stopped; the same command resumes the chain")
                return code
            if code:
                alone = f"python launch/local.py --config {os.path.relpath(job.config)}"
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
    """A step of each stage that has something to do -> its batch script: they ask for the same."""
    stages = {s.stage: s for s in reversed(chain.steps) if not states[s.name].is_done}
    return {step.name: batch_script(step.run) for step in reversed(stages.values())}


def describe_chain(chain: Chain) -> str:
    """The table, and a batch script of each stage that has something to do. Writes nothing."""
    states = chain_states(chain)
    parts = [overview(chain, states)]
    for name, script in _scripts(chain, states).items():
        parts.append(f"# Batch script of {name}\n{script.rstrip()}\n")
        refuse_or_warn(slurm_check(script))
    return "\n".join(parts)


def submit_chain(chain: Chain) -> None:
    """Submit every run that is neither done, queued nor running.

    Raises UserErrors before anything is submitted, and UserError if sbatch refuses a job; what was
    accepted before stays submitted.
    """
    states = _start(chain, leave_out={"weights"})
    if all(state.is_done for state in states.values()):
        say(_compare_line(chain))
        return
    require_slurm()
    for script in _scripts(chain, states).values():
        refuse_or_warn(slurm_check(script))
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
        needed = sorted({job for name in step.needs for job in jobs.get(name, ())})
        kept = jobs_of(job_folder(step.run, cluster="slurm").parent, jobs=queue)
        if kept:
            jobs[step.name] = submitted_ids(kept)
            say(f"kept      {step.name}: job {kept[0].job_id} is {kept[0].state.lower()}")
            continue
        submission = submit_run(step.run, after_ok=needed, earlier="ignore")
        jobs[step.name] = [submission.job_id]
        new.append(submission.job_id)
        after = f", after {' and '.join(needed)}" if needed else ""
        say(f"submitted {step.name}: job {submission.job_id}{after}")
    if new:
        say(f"  state    python launch/status.py {chain.folder}")
        say(f"  cancel   scancel {' '.join(new)}")
    say(_compare_line(chain))
    say("When the jobs have ended, the same command submits what is not done.")
