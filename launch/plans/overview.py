"""Show a plan before it runs: its stages or trainings, with their states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from launch.comparison.text import ABSENT, Table, plain_text
from launch.jobs.queue import QueuedJob
from launch.plans.stages import Plan, Step
from launch.plans.states import States
from launch.studies.states import overview as grid_overview
from launch.studies.states import states_of
from vitscale.runs.data_prep import DataPrepRun

Queued = Mapping[str, QueuedJob]
"""Name of a step -> its job."""


def overview(plan: Plan, states: States, queued: Queued) -> str:
    """All runs with their states; of a study also what each costs."""
    if plan.kind == "study":
        [stage] = plan.stages
        assert stage.grid is not None
        return grid_overview(stage.grid, states_of(stage.grid))
    rows = []
    for stage in plan.stages:
        rows.append(
            (
                stage.name,
                stage.kind,
                ", ".join(stage.needs) or ABSENT,
                str(len(stage.steps)),
                resources(stage.steps[0]),
                _states_text([_text(step, states, queued) for step in stage.steps]),
            )
        )
        if len(stage.steps) > 1:
            for step in stage.steps:
                state = _text(step, states, queued)
                rows.append((f"  {step.short_name}", "", "", "", "", state))
    num_runs = sum(len(stage.steps) for stage in plan.stages)
    return plain_text(
        Table(
            title=f"Chain {plan.name}: {len(plan.stages)} stages, {num_runs} runs",
            header=("stage", "what", "after", "runs", "each", "state"),
            rows=tuple(rows),
        )
    )


def _text(step: Step, states: States, queued: Queued) -> str:
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


def resources(step: Step) -> str:
    """What one run asks SLURM for."""
    launch = step.run.launch
    if isinstance(step.run, DataPrepRun):
        return f"{launch.num_tasks} tasks x {launch.cpus_per_task} cores"
    if launch.gpus_per_node:
        return f"{launch.nodes} nodes x {launch.gpus_per_node} GPUs"
    num_tasks = launch.nodes * launch.tasks_per_node
    return f"{num_tasks} tasks x {launch.cpus_per_task} cores"
