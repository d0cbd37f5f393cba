"""Submit any stage to SLURM after checking its configuration and data.

    python launch/slurm.py --config configs/vit_h14.yaml [key=value ...] [--dry-run]
    python launch/slurm.py --study configs/studies/vit_subsets.yaml [--dry-run | --results]

--study submits a grid of runs as arrays.
"""

from __future__ import annotations

import sys

try:
    from launch.jobs.preparation import (
        RUN_TYPES,
        LaunchableRun,
        check_job,
        launchable,
        prepare_job,
        run_name,
        with_num_workers,
    )
    from launch.jobs.submission import Submission, require_slurm, submit_to_slurm
    from launch.planning.dry_run import check_data, describe
    from launch.studies.command import names_a_study, run_study_on_slurm
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import run_script
    from vitscale.runs.training import TrainingRun
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def main() -> None:
    if names_a_study(sys.argv[1:]):
        raise SystemExit(run_study_on_slurm(sys.argv[1:]))
    command = load_command(
        RUN_TYPES,
        script="launch/slurm.py",
        description="Submit a stage to SLURM. The job requeues itself and resumes.",
        switches={"--dry-run": "print the run, its plan and the batch script; submit nothing"},
    )
    run = launchable(command.run)
    run = with_num_workers(run, num_cores=run.launch.cpus_per_task)
    check_job(run, num_tasks=run.launch.nodes * run.launch.tasks_per_node, cluster="slurm")
    if "--dry-run" in command.switches:
        print(describe(run, show_script=True))
        return
    if isinstance(run, TrainingRun):
        check_data(run)
    require_slurm()
    job, folder = prepare_job(run, cluster="slurm")
    submission = submit_to_slurm(job, launch=run.launch, name=run_name(run), folder=folder)
    print_next_steps(run, submission)


def print_next_steps(run: LaunchableRun, submission: Submission) -> None:
    job_id = submission.job_id
    if submission.is_array:
        kind, pause = "array", "finished shards are kept, then requeue"
        log = f"{submission.log('TASK')}, TASK from 0 to {submission.num_tasks - 1}"
        watch = submission.log("*")
    else:
        kind, pause = "job", "checkpoint, then requeue"
        log = str(watch := submission.log(0))
    print(
        f"submitted {kind} {job_id}: {run_name(run)}, {submission.num_tasks} task(s)\n"
        f"  log      {log}\n"
        f"  watch    tail -F {watch}\n"
        f"  state    squeue -j {job_id}\n"
        f"  cancel   scancel {job_id}\n"
        f"  pause    scancel --signal=USR2 {job_id}   ({pause})"
    )


if __name__ == "__main__":
    run_script(main)
