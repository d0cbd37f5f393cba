"""Train a stretch of a run again and compare the result with the run, bit by bit.

    python launch/replay.py RUN [--from-step A] [--to-step B] [--twice] [--slurm]

Starts from the checkpoint of step A in a folder of its own; RUN is only read. Exit code 0: equal.
1: different; the first step, rank and tensor that differ are printed. 2: bad arguments. Others: the
replay failed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

try:
    from launch.comparison.replaying import (
        Stretch,
        changed_environment,
        compare,
        fill_scratch,
        find_stretch,
        replay_run,
    )
    from launch.jobs.monitor import StopFlag
    from launch.jobs.preparation import check_job, make_private, prepare_job, run_name
    from launch.jobs.snapshot import kept_code
    from launch.jobs.status.following import follow_run
    from launch.jobs.submission import require_slurm, submit_to_slurm
    from launch.jobs.supervision.foreground import start_and_watch
    from vitscale.config.errors import UserError, run_script
    from vitscale.runs.launching import LaunchSettings
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

EXIT_DIFFERENT = 1
# Instead of the 1 of a training that failed.
EXIT_NOT_REPLAYED = 3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a stretch of a run again and compare the result bit by bit.",
        epilog="Exit code 0: equal; 1: different; 2: bad arguments; others: the replay failed.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run, which is only read")
    parser.add_argument(
        "--from-step", type=int, metavar="A", help="default: the checkpoint before B; 0: the start"
    )
    parser.add_argument(
        "--to-step",
        type=int,
        metavar="B",
        help="default: the last checkpoint; without one of B the journal alone is compared",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="configuration of these steps; default: RUN/config.yaml"
    )
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="keep the replay there; default: a folder beside RUN, removed if all is equal",
    )
    parser.add_argument("--slurm", action="store_true", help="as a job; wait for its end")
    parser.add_argument(
        "--twice",
        action="store_true",
        help="if it differs, replay again, to tell whether these nodes repeat themselves",
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    stretch = find_stretch(
        Path(arguments.run),
        start=arguments.from_step,
        stop=arguments.to_step,
        config=None if arguments.config is None else Path(arguments.config),
    )
    scratch = new_folder(stretch, arguments.output)
    replay(stretch, scratch, slurm=arguments.slurm)
    found = compare(stretch, scratch)
    if not found:
        print(f"equal: {stretch.title}; compared: {compared(stretch)}")
        if arguments.output is None:
            shutil.rmtree(scratch)
        return
    print(f"different: {stretch.title}; the replay is in {scratch}")
    print("\n".join(f"  {line}" for line in found))
    for line in changed_environment(stretch, scratch):
        print(f"  not as then, and may be the reason: {line}")
    if arguments.twice:
        again = new_folder(stretch, None)
        replay(stretch, again, slurm=arguments.slurm)
        print(verdict(stretch, scratch, again))
    raise SystemExit(EXIT_DIFFERENT)


def compared(stretch: Stretch) -> str:
    steps = ", ".join(map(str, stretch.kept))
    if stretch.stop in stretch.kept:
        return f"journal, checkpoint of step {steps}"
    others = f", checkpoint of step {steps}" if steps else ""
    return f"journal{others}; the checkpoint of step {stretch.stop} is not kept"


def new_folder(stretch: Stretch, output: str | None) -> Path:
    """A new run folder with the checkpoint that the replay starts from. Raises UserError."""
    try:
        if output is None:
            run = stretch.folder.absolute()
            folder = Path(tempfile.mkdtemp(prefix=f"{run.name}-replay-", dir=run.parent))
        else:
            folder = Path(output)
            folder.mkdir(parents=True)
        fill_scratch(stretch, folder)
    except OSError as error:
        where = "--output" if output else str(stretch.folder.absolute().parent)
        what = f"cannot create the folder of the replay: {error}"
        raise UserError(what, where=where, next_step="choose another --output") from None
    return folder


def replay(stretch: Stretch, scratch: Path, *, slurm: bool) -> None:
    """Train the stretch again in `scratch`. Raises SystemExit when that fails."""
    run = replay_run(stretch, scratch)
    print(f"replaying {stretch.title}", flush=True)
    if slurm:
        tasks = run.launch.nodes * run.launch.tasks_per_node
        if tasks != stretch.num_ranks:
            raise UserError(
                f"{tasks} tasks, but these steps were trained on {stretch.num_ranks}",
                where="launch.nodes x launch.tasks_per_node",
                next_step="change launch.* in a copy of config.yaml, and give it with --config",
            )
        check_job(run, num_tasks=tasks, cluster="slurm")
        require_slurm()
        make_private(scratch / "slurm")
        code = kept_code(run.launch, scratch / "slurm")
        job, folder = prepare_job(run, cluster="slurm", code=code)
        name = f"{run_name(run)}-replay"
        submit_to_slurm(job, launch=run.launch, name=name, folder=folder, code=code)
        exit_code = follow_run(scratch, output=sys.stdout)
    else:
        check_job(run, num_tasks=stretch.num_ranks, cluster="local")
        job, folder = prepare_job(run, cluster="local")
        launch: LaunchSettings = run.launch
        exit_code = start_and_watch(
            job, launch=launch, num_procs=stretch.num_ranks, folder=folder, stop=StopFlag()
        )
    if exit_code:
        print(f"the replay did not end; what it left is in {scratch}", file=sys.stderr)
        raise SystemExit(EXIT_NOT_REPLAYED if exit_code == EXIT_DIFFERENT else exit_code)


def verdict(stretch: Stretch, first: Path, second: Path) -> str:
    """What a second replay says about the first."""
    of_replays = replace(stretch, folder=first, kept=(stretch.stop,))
    found = compare(of_replays, second)
    if not found:
        return f"two replays are equal: the run itself was wrong, or not trained as now ({second})"
    lines = "\n".join(f"  {line}" for line in found)
    return f"two replays differ: these nodes do not repeat themselves ({second})\n{lines}"


if __name__ == "__main__":
    run_script(main)
