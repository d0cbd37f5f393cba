"""Run or submit a plan from the command line: show it, check it, do what is missing.

Owns: the options of --study, --chain and sweeps, and the order of the steps on both launchers.
Leaves out: reading the plan (`launch.plans.chains`), and the steps themselves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launch.jobs.monitor import StopFlag
from launch.jobs.submission import require_slurm
from launch.jobs.supervision.foreground import EXIT_INTERRUPTED
from launch.planning.checks import refuse_or_warn
from launch.planning.dry_run import check_data
from launch.planning.run_checks import run_checks, slurm_check
from launch.plans.overview import overview
from launch.plans.record import recorded_jobs, write_record
from launch.plans.running import LocalPlan, report
from launch.plans.stages import Plan, Stage
from launch.plans.states import States, check_unchanged, plan_states
from launch.plans.submitting import PlanSubmission, batch_script, missing_steps, queued_jobs
from launch.studies.grid import in_runs
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError, UserErrors

LOCAL_COUNTS = ("--num-procs", "--parallel")
SWITCHES = {
    "--dry-run": "list the runs with their states, on SLURM with the batch scripts; start nothing",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCommand:
    """The command line of a plan."""

    load: Callable[[str, int | None], Plan]
    """(local or slurm, processes of each run or None) -> the plan, validated."""
    is_dry_run: bool
    num_procs: int = 1
    parallel: int = 1


def split_option(
    argv: Sequence[str], option: str, *, counts: Sequence[str]
) -> tuple[list[str], dict[str, int]]:
    """(arguments with --config for `option FILE`, numbers of processes).

    Raises UserError if --config is given too.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(option, nargs="?", const="", dest="file")
    found, others = parser.parse_known_args(argv)
    numbers, others = parse_counts(others, counts)
    if any(word.partition("=")[0] == "--config" for word in others):
        raise UserError(
            f"--config together with {option}",
            where="command line",
            next_step=f"give {option} alone",
        )
    return (["--config", found.file, *others] if found.file else others), numbers


def parse_counts(argv: Sequence[str], names: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """({"num_procs": 2}, the other arguments) for options such as --num-procs; 1 by default."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(name, nargs="?", const="", default="1", metavar="N")
    found, others = parser.parse_known_args(argv)
    numbers = {}
    for name in names:
        key = name.removeprefix("--").replace("-", "_")
        text = getattr(found, key)
        if not text.isdecimal() or int(text) == 0:
            raise UserError(f"{text!r} is not a number above 0", where=name, allowed="1, 2, …")
        numbers[key] = int(text)
    return numbers, others


def run_locally(command: PlanCommand) -> int:
    """Run what is missing on this machine. Returns the exit code."""
    # First of all: a signal that comes while the plan is read must not be missed.
    stop = StopFlag()
    plan = command.load("local", command.num_procs)
    states = plan_states(plan)
    say(overview(plan, states, {}))
    if command.is_dry_run:
        return 0
    check_unchanged(states)
    check_known_data(plan, states)
    write_record(plan, recorded_jobs(plan.folder))
    local = LocalPlan(
        plan=plan, num_procs=command.num_procs, parallel=command.parallel, say=say, stop=stop
    )
    try:
        code = local.run()
    except KeyboardInterrupt:
        print("\ninterrupted: all processes were ended", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    if local.failures:
        print(report(local.failures, plan=plan), file=sys.stderr, flush=True)
    if code == EXIT_STOPPED_RESUMABLE:
        say(f"stopped; the same command resumes the {plan.kind}")
    if code == 0:
        say(comparison_of(plan))
    return code


def run_on_slurm(command: PlanCommand) -> int:
    """Submit what is missing. Returns the exit code."""
    plan = command.load("slurm", None)
    states = plan_states(plan)
    if command.is_dry_run:
        say(overview(plan, states, {}))
        for array in (each for stage in plan.stages for each in missing_steps(stage, states)):
            script = batch_script(array)
            say(f"# {array.name}: {array.what}\n{script.rstrip()}\n")
            refuse_or_warn(slurm_check(script))
        return 0
    if all(state.is_done for state in states.values()):
        say(overview(plan, states, {}))
        say(comparison_of(plan))
        return 0
    check_unchanged(states)
    check_known_data(plan, states)
    require_slurm()
    check_arrays(plan, states)
    queued = queued_jobs(plan)
    say(overview(plan, states, queued))
    submission = PlanSubmission(plan=plan, states=states, queued=queued, say=say)
    submission.submit()
    if ids := [each.job_id for each in submission.submitted]:
        say(
            f"  state    python launch/status.py {plan.folder}\n"
            f"  cancel   scancel {' '.join(ids)}\n"
            f"{comparison_of(plan)}\n"
            "When the jobs have ended, the same command submits what is not done."
        )
    return 0


def comparison_of(plan: Plan) -> str:
    """How to compare what the plan has trained."""
    return f"  compare  python launch/compare.py {plan.folder}"


def say(text: str) -> None:
    print(text, flush=True)


def is_made_by(plan: Plan, stage: Stage, states: States) -> bool:
    """Whether the shards of a stage are still to be made by the plan."""
    sources = [each for each in plan.inputs_of(stage) if each.kind == "data_prep"]
    return not all(states[step.name].is_done for source in sources for step in source.steps)


def check_known_data(plan: Plan, states: States) -> None:
    """Check the shards of all trainings but those whose shards the plan makes.

    Raises UserErrors.
    """
    found: dict[str, list[str]] = {}
    for stage in plan.stages:
        for step in stage.steps:
            if step.training is None or is_made_by(plan, stage, states):
                continue
            try:
                if not states[step.name].is_done:
                    check_data(step.training.run)
            except UserError as error:
                found.setdefault(error.text(), []).append(step.name)
    if found:
        raise UserErrors([in_runs(text, names) for text, names in found.items()])


def check_arrays(plan: Plan, states: States) -> None:
    """Check one run for each array: all ask for the same resources.

    Prints warnings. Raises UserErrors with all errors.
    """
    errors: list[UserError] = []
    for stage in plan.stages:
        for array in missing_steps(stage, states):
            training, checks = array.steps[0].training, slurm_check(batch_script(array))
            if training is not None and not is_made_by(plan, stage, states):
                checks += run_checks(training.run)
            try:
                # Weights may come from the plan itself.
                refuse_or_warn(checks, leave_out={"weights"})
            except UserErrors as error:
                errors += error.errors
    if errors:
        raise UserErrors(list({error.text(): error for error in errors}.values()))
