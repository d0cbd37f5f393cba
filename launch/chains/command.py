"""Run a chain: read it, show it, run or submit what is missing.

    python launch/local.py --chain configs/chains/demo.yaml --num-procs 2
    python launch/slurm.py --chain configs/chains/vit_l16_imagenet.yaml [--dry-run]

Owns: the options after --chain, and what is printed of the graph.
Leaves out: running (`running`) and submitting (`submission`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from launch.chains.graph import Chain, ChainStep, load_chain
from launch.chains.record import recorded_jobs, write_record
from launch.chains.running import LocalChain, report
from launch.chains.settings import ChainRun
from launch.chains.states import States, chain_states
from launch.chains.submission import ChainSubmission, batch_scripts, queued_jobs
from launch.chains.tracking import close, open_parent
from launch.comparison.text import ABSENT, Table, plain_text
from launch.jobs.monitor import StopFlag
from launch.jobs.queue import QueuedJob
from launch.jobs.submission import require_slurm
from launch.planning.checks import caught
from launch.planning.cluster_checks import slurm_limits
from launch.planning.dry_run import check_data
from launch.studies.command import split_option
from vitscale.config.command_line import load_command
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError, UserErrors
from vitscale.runs.data_prep import DataPrepRun
from vitscale.runs.training import TrainingRun

CHAIN = "--chain"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainCommand:
    """The command line of a chain."""

    chain: ChainRun
    file: str
    is_dry: bool
    num_procs: int = 1


def names_a_chain(argv: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == CHAIN for word in argv)


def parse(argv: Sequence[str], *, script: str, counts: Sequence[str]) -> ChainCommand:
    others, numbers, file = split_option(argv, CHAIN, counts=counts)
    command = load_command(
        ChainRun,
        script=f"{script} {CHAIN}",
        description="Run a chain: stages that use what earlier stages have made.",
        argv=others,
        switches={"--dry-run": "show the stages with their runs and states; start nothing"},
    )
    is_dry = "--dry-run" in command.switches
    return ChainCommand(chain=command.run, file=file, is_dry=is_dry, **numbers)


def run_chain_locally(argv: Sequence[str]) -> int:
    """Run what is missing on this machine. Returns the exit code."""
    command = parse(argv, script="launch/local.py", counts=("--num-procs",))
    # First of all: a signal that comes while the chain is read must not be missed.
    stop = StopFlag()
    chain = load_chain(command.chain, cluster="local", num_tasks=command.num_procs)
    states = chain_states(chain)
    print(overview(chain, states, {}), flush=True)
    if command.is_dry:
        return 0
    check_known_data(chain, states)
    write_record(chain, recorded_jobs(chain.folder))
    local = LocalChain(chain=chain, num_procs=command.num_procs, say=say, stop=stop)
    code = local.run()
    if local.failures:
        print(report(local.failures), file=sys.stderr, flush=True)
    if code == EXIT_STOPPED_RESUMABLE:
        say("stopped; the same command resumes the chain")
    return code


def run_chain_on_slurm(argv: Sequence[str]) -> int:
    """Submit what is missing, or show the results if nothing is. Returns the exit code."""
    command = parse(argv, script="launch/slurm.py", counts=())
    chain = load_chain(command.chain, cluster="slurm")
    states = chain_states(chain)
    if command.is_dry:
        print(overview(chain, states, {}))
        for stage in chain.stages:
            missing = [step for step in stage.steps if not states[step.name].is_done]
            for text in batch_scripts(chain, stage, missing):
                print(text)
        return 0
    check_known_data(chain, states)
    require_slurm()
    check_limits(chain, states)
    queued = queued_jobs(chain)
    print(overview(chain, states, queued), flush=True)
    submission = ChainSubmission(chain=chain, states=states, queued=queued, say=say)
    submission.submit()
    if all(state.is_done for state in states.values()):
        for stage in chain.stages:
            close(stage, open_parent(stage, say=say), status="FINISHED", say=say)
    if submission.submitted:
        ids = [each.job_id for each in submission.submitted]
        say(
            f"  state    squeue -j {','.join(ids)}\n"
            f"  cancel   scancel {' '.join(ids)}\n"
            "If a job fails, SLURM cancels those that wait for it; the same command submits them "
            "again."
        )
    return 0


def say(text: str) -> None:
    print(text, flush=True)


def check_known_data(chain: Chain, states: States) -> None:
    """Check the shards of all trainings but those whose shards the chain makes.

    Raises UserErrors.
    """
    made = {
        stage.name
        for stage in chain.stages
        if stage.kind == "data_prep" and not all(states[step.name].is_done for step in stage.steps)
    }
    errors = []
    for stage in chain.stages:
        for step in stage.steps:
            if not isinstance(step.run, TrainingRun) or made & set(stage.needs):
                continue
            try:
                if not states[step.name].is_done:
                    check_data(step.training.run)
            except UserError as error:
                errors.append(UserError(f"{error.text()}\n  in: {step.name}"))
    if errors:
        raise UserErrors(errors)


def check_limits(chain: Chain, states: States) -> None:
    """Raise UserErrors for stages that their partitions could never start."""
    errors = []
    for stage in chain.stages:
        missing = [step.run for step in stage.steps if not states[step.name].is_done]
        launches = {run.launch.model_dump_json(): run.launch for run in missing}
        for launch in launches.values():
            checks = caught("SLURM limits", partial(slurm_limits, launch))
            errors += [
                UserError(f"{each.error.text()}\n  in: stage {stage.name}")
                for each in checks
                if each.error is not None
            ]
    if errors:
        raise UserErrors(errors)


def overview(chain: Chain, states: States, queued: dict[str, QueuedJob]) -> str:
    """All stages with their resources and states; the runs of stages with several."""
    rows = []
    for stage in chain.stages:
        first = stage.steps[0]
        rows.append(
            (
                stage.name,
                stage.kind,
                ", ".join(stage.needs) or ABSENT,
                str(len(stage.steps)),
                resources(first),
                _states_text([_text(step, states, queued) for step in stage.steps]),
            )
        )
        if len(stage.steps) > 1:
            for step in stage.steps:
                state = _text(step, states, queued)
                rows.append((f"  {step.short_name}", "", "", "", "", state))
    num_runs = sum(len(stage.steps) for stage in chain.stages)
    return plain_text(
        Table(
            title=f"Chain {chain.settings.name}: {len(chain.stages)} stages, {num_runs} runs",
            header=("stage", "what", "after", "runs", "each", "state"),
            rows=tuple(rows),
        )
    )


def _text(step: ChainStep, states: States, queued: dict[str, QueuedJob]) -> str:
    job = queued.get(step.name)
    return states[step.name].text if job is None else f"{job.state.lower()} (job {job.job_id})"


def _states_text(texts: Sequence[str]) -> str:
    # Each run names its job in a line of its own.
    counts = Counter(text.partition(" (job ")[0] if len(texts) > 1 else text for text in texts)
    return (
        next(iter(counts))
        if len(counts) == 1
        else ", ".join(f"{n} {text}" for text, n in counts.items())
    )


def resources(step: ChainStep) -> str:
    """What one run asks SLURM for."""
    launch = step.run.launch
    if isinstance(step.run, DataPrepRun):
        return f"{launch.num_tasks} tasks x {launch.cpus_per_task} cores"
    if launch.gpus_per_node:
        return f"{launch.nodes} nodes x {launch.gpus_per_node} GPUs"
    num_tasks = launch.nodes * launch.tasks_per_node
    return f"{num_tasks} tasks x {launch.cpus_per_task} cores"
