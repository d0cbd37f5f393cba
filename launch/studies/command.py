"""Run a study: read it, show it, train or submit what is missing, tabulate and draw.

Owns: the options after --study, and the order of the steps, which both launchers share.
Leaves out: the steps themselves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.comparison.text import plain_text
from launch.jobs.monitor import StopFlag
from launch.jobs.submission import require_slurm
from launch.jobs.supervision.foreground import EXIT_INTERRUPTED
from launch.planning.before_submitting import check
from launch.planning.dry_run import check_data
from launch.studies.arrays import arrays, batch_scripts, submit
from launch.studies.figure import draw
from launch.studies.grid import Grid, expand
from launch.studies.results import check_metrics, collect, collect_trials, table, write_csv
from launch.studies.running import LocalTrainings, report
from launch.studies.selection import (
    check_held_out,
    resolve,
    selected_table,
    selections,
    write_selected,
)
from launch.studies.settings import StudyRun
from launch.studies.states import FINISHED, TrainingState, check_unchanged, overview, states_of
from launch.studies.tables import markdown_page, paper_table, printed, write_tables
from launch.studies.tracking import as_children, close_study_parent, open_study_parent, publish
from vitscale.config.command_line import load_command
from vitscale.config.errors import EXIT_STOPPED_RESUMABLE, UserError, UserErrors
from vitscale.tracking.parent_run import ParentRun

STUDY = "--study"
LOCAL_COUNTS = ("--num-procs", "--parallel")
SWITCHES = {
    "--dry-run": "list the trainings with their costs and states; train nothing",
    "--results": "tabulate and draw what is finished; train nothing",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyCommand:
    """The command line of a study."""

    study: StudyRun
    again: str
    """The arguments that name the study, for messages."""
    switches: frozenset[str]
    num_procs: int = 1
    parallel: int = 1


def names_a_study(argv: Sequence[str]) -> bool:
    return any(word.partition("=")[0] == STUDY for word in argv)


def parse(argv: Sequence[str], *, script: str, counts: Sequence[str]) -> StudyCommand:
    """counts: the options that take a number of processes, with their meaning in `StudyCommand`."""
    others, numbers, file = split_option(argv, STUDY, counts=counts)
    command = load_command(
        StudyRun,
        script=f"{script} {STUDY}",
        description="Train, tabulate and draw a study: a grid of runs.",
        argv=others,
        switches=SWITCHES,
    )
    again = f"{STUDY} {file}"
    return StudyCommand(study=command.run, again=again, switches=command.switches, **numbers)


def split_option(
    argv: Sequence[str], option: str, *, counts: Sequence[str]
) -> tuple[list[str], dict[str, int], str]:
    """(arguments with --config for `option FILE`, numbers of processes, FILE).

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
    return (["--config", found.file, *others] if found.file else others), numbers, found.file


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


def run_study_locally(argv: Sequence[str]) -> int:
    return train_study(parse(argv, script="launch/local.py", counts=LOCAL_COUNTS))


def run_study_on_slurm(argv: Sequence[str]) -> int:
    return submit_study(parse(argv, script="launch/slurm.py", counts=()))


def train_study(command: StudyCommand) -> int:
    """Train what is missing on this machine, then show the results. Returns the exit code."""
    # First of all: a signal that comes while the grid is read must not be missed.
    stop = StopFlag()
    grid = read_grid(command, cluster="local", num_tasks=command.num_procs)
    grid, states = show_states(grid, command)
    if states is None:
        return 0
    parent = open_study_parent(grid, say=say)
    trainings = LocalTrainings(
        grid=as_children(grid, parent),
        num_procs=command.num_procs,
        parallel=command.parallel,
        say=say,
        stop=stop,
    )
    try:
        trainings.train(states)
    except KeyboardInterrupt:
        print("\ninterrupted: all processes were ended", file=sys.stderr, flush=True)
        close_study_parent(parent, "KILLED", say=say)
        return EXIT_INTERRUPTED
    grid, states = resolve(grid)
    status = "KILLED" if trainings.was_stopped else "FAILED" if trainings.failures else "FINISHED"
    try:
        show_results(grid, states, parent)
    finally:
        close_study_parent(parent, status, say=say)
    if trainings.failures:
        print(report(trainings.failures, again=command.again), file=sys.stderr, flush=True)
        return 1
    if trainings.was_stopped:
        print("stopped; the same command resumes the study", flush=True)
        return EXIT_STOPPED_RESUMABLE
    return 0


def submit_study(command: StudyCommand) -> int:
    """Submit what is missing, or show the results if nothing is. Returns the exit code."""
    grid, states = show_states(read_grid(command, cluster="slurm"), command)
    if "--dry-run" in command.switches:
        for text in batch_scripts(grid, states_of(grid)):
            print(text)
    if states is None:
        return 0
    if all(state.progress in FINISHED for state in states.values()):
        parent = open_study_parent(grid, say=say)
        show_results(grid, states, parent)
        close_study_parent(parent, "FINISHED", say=say)
        return 0
    require_slurm()
    for array in arrays(grid, states):
        # One stands for all: they ask for the same resources. Weights come from the study itself.
        check(array.trainings[0].run, leave_out={"weights"})
    submitted = submit(as_children(grid, open_study_parent(grid, say=say)), states)
    for name, submission in submitted:
        log = submission.log("TASK" if submission.is_array else 0)
        print(f"submitted {name}: job {submission.job_id}, log {log}")
    job_ids = ",".join(submission.job_id for _, submission in submitted)
    print(
        f"  state    python launch/status.py {grid.study.folder} --watch\n"
        f"  cancel   scancel {job_ids.replace(',', ' ')}\n"
        f"  results  python launch/slurm.py {command.again} --results\n"
        "When the jobs have ended, the same command submits what is still missing."
    )
    return 0


def say(text: str) -> None:
    print(text, flush=True)


def read_grid(command: StudyCommand, *, cluster: str, num_tasks: int | None = None) -> Grid:
    grid = expand(command.study, cluster=cluster, num_tasks=num_tasks)
    check_held_out(grid)
    check_metrics(grid)
    return grid


def show_states(grid: Grid, command: StudyCommand) -> tuple[Grid, dict[str, TrainingState] | None]:
    """Print the overview. The grid with the choices made so far; the states, checked, if something
    is to be trained, else None."""
    grid, states = resolve(grid)
    print(overview(grid, states), flush=True)
    if "--dry-run" in command.switches:
        return grid, None
    check_unchanged(grid, states)
    if "--results" in command.switches:
        show_results(grid, states, None)
        return grid, None
    errors = []
    for name, training in grid.trainings.items():
        if states[name].progress not in FINISHED:
            try:
                check_data(training.run)
            except UserError as error:
                errors.append(error)
    if errors:
        raise UserErrors(list({error.text(): error for error in errors}.values()))
    return grid, states


def show_results(grid: Grid, states: Mapping[str, TrainingState], parent: ParentRun | None) -> None:
    """Print the tables, write them with the figures, and send them to the study's MLflow run."""
    study, folder = grid.study, Path(grid.study.folder)
    found = selections(grid, states)
    files: list[Path] = []
    selected = selected_table(grid, found) if found else None
    if selected is not None:
        print(plain_text(selected))
    if any(each.label is not None for each in found):
        files.append(write_selected(grid, found, folder=folder))
    by_metric = [collect(grid, states, metric=metric) for metric in study.metrics]
    tables = [paper_table(study, each) for each in by_metric] if study.table is not None else []
    for shown in map(printed, tables) if tables else [table(grid, by_metric[0])]:
        print(plain_text(shown))
    if any(result.by_seed for result in by_metric[0]):
        files.append(write_csv(grid, [r for each in by_metric for r in each], folder=folder))
        if tables:
            page = markdown_page(study, tables, selected, num_seeds=len(study.seeds))
            files += write_tables(folder, page=page, tables=tables)
    for path in files:
        print(f"results: {path}")
    trials = collect_trials(grid, states)
    for path in draw(study, by_metric[0], folder=folder, trials=trials):
        print(f"figure:  {path}, and as PNG")
        files.append(path.with_suffix(".png"))
    publish(grid, found, parent, by_metric=by_metric, files=files, say=say)
