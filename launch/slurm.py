"""Submit any stage to SLURM after checking its configuration and data.

    python launch/slurm.py --config configs/vit_h14.yaml [key=value ...]
        [--dry-run | --after] [--follow]
    python launch/slurm.py --study configs/studies/digits_objectives.yaml [--dry-run]

--study submits a grid of runs as arrays.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    from launch.jobs.preparation import (
        RUN_TYPES,
        LaunchableRun,
        check_job,
        job_folder,
        launchable,
        make_private,
        prepare_job,
        removed_if_refused,
        run_name,
        with_num_workers,
    )
    from launch.jobs.queue import (
        NoAnswerError,
        QueuedJob,
        already_queued,
        depending_on,
        jobs_of,
        submitted_ids,
    )
    from launch.jobs.snapshot import kept_code
    from launch.jobs.status.following import follow_run
    from launch.jobs.status.text import shown_folder
    from launch.jobs.submission import Submission, folder_lock, require_slurm, submit_to_slurm
    from launch.planning.checks import as_table, refuse_or_warn, warn
    from launch.planning.dry_run import batch_script, describe
    from launch.planning.run_checks import run_checks, slurm_check
    from launch.plans.chains.command import names_a_plan, plan_command
    from launch.plans.chains.sweeps import names_a_sweep, sweep_command
    from launch.plans.command import run_on_slurm
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import UserError, run_script
    from vitscale.runs.data_prep import DataPrepRun
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


SWITCHES = {
    "--dry-run": "print the run, its plan and the batch script; submit nothing",
    "--after": "start when the queued or running job of this run has ended",
    "--follow": "show the job's state and log until the run ends; Ctrl-C leaves the job alone",
}


def main() -> None:
    argv, script = sys.argv[1:], "launch/slurm.py"
    if names_a_plan(argv):
        raise SystemExit(run_on_slurm(plan_command(argv, script=script, counts=())))
    if names_a_sweep(argv):
        raise SystemExit(run_on_slurm(sweep_command(argv, script=script, counts=())))
    command = load_command(
        RUN_TYPES,
        script="launch/slurm.py",
        description="Submit a stage to SLURM. The job requeues itself and resumes.",
        examples=(
            "python launch/slurm.py --config configs/vit_h14.yaml --dry-run",
            "python launch/slurm.py --config configs/vit_h14.yaml launch.nodes=8 --follow",
        ),
        switches=SWITCHES,
    )
    run = launchable(command.run)
    if "--follow" in command.switches and run.launch.num_tasks > 1:
        raise UserError(
            f"--follow shows the log of one job, and this is an array of {run.launch.num_tasks}",
            where="command line",
            next_step="submit without it; then python launch/status.py",
        )
    run = with_num_workers(run, num_cores=run.launch.cpus_per_task)
    check_job(run, num_tasks=run.launch.nodes * run.launch.tasks_per_node, cluster="slurm")
    script = batch_script(run)
    checks = [*run_checks(run), *slurm_check(script)]
    if "--dry-run" in command.switches:
        print(
            describe(run),
            f"# Checks\n{as_table(checks)}",
            f"# Batch script\n{script.rstrip()}",
            sep="\n\n",
        )
        return
    refuse_or_warn(checks)
    require_slurm()
    submission = submit(run, after="--after" in command.switches)
    print_next_steps(run, submission)
    if "--follow" in command.switches:
        print(flush=True)
        raise SystemExit(follow_run(job_folder(run, cluster="slurm").parent, output=sys.stdout))


def submit(run: LaunchableRun, *, after: bool) -> Submission:
    """Submit the run. after: start when its earlier jobs have ended."""
    folder = job_folder(run, cluster="slurm")
    with removed_if_refused(folder):
        make_private(folder)
        with folder_lock(folder.parent):
            earlier = earlier_jobs(run, folder.parent, after=after)
            code = kept_code(run.launch, folder)
            job, _ = prepare_job(run, cluster="slurm", code=code)
            return submit_to_slurm(
                job,
                launch=depending_on(run.launch, submitted_ids(earlier)),
                name=run_name(run),
                folder=folder,
                code=code,
            )


def earlier_jobs(run: LaunchableRun, run_folder: Path, *, after: bool) -> list[QueuedJob]:
    """Jobs of this run that the new one waits for. Raises UserError if it may not."""
    try:
        jobs = jobs_of(run_folder)
    except NoAnswerError as error:
        if after:
            raise UserError(
                f"SLURM does not say which job --after means: {error}",
                next_step="try again later, or leave it out",
            ) from None
        warn(f"SLURM does not say whether a job of this run is queued: {error}")
        return []
    if after:
        return jobs
    # Tasks of data preparation share the work, whichever job they belong to.
    if jobs and not isinstance(run, DataPrepRun):
        raise already_queued(jobs, run_folder=run_folder)
    return []


def print_next_steps(run: LaunchableRun, submission: Submission) -> None:
    job_id = submission.job_id
    if submission.is_array:
        kind, pause = "array", "finished work is kept, then requeue"
        log = f"{submission.log('TASK')}, TASK from 0 to {submission.num_tasks - 1}"
    else:
        kind, pause = "job", "checkpoint, then requeue"
        log = str(submission.log(0))
    status = f"python launch/status.py {shown_folder(job_folder(run, cluster='slurm').parent)}"
    follow = "" if submission.is_array else f"  watch    {status} --follow\n"
    print(
        f"submitted {kind} {job_id}: {run_name(run)}, {submission.num_tasks} task(s)\n"
        f"  log      {log}\n"
        f"  state    {status}\n"
        f"{follow}"
        f"  cancel   scancel {job_id}\n"
        f"  pause    scancel --signal=USR2 {job_id}   ({pause})"
    )


if __name__ == "__main__":
    run_script(main)
