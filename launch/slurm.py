"""Submit any stage to SLURM after checking its configuration and data.

    python launch/slurm.py --config configs/vit_h14.yaml [key=value ...]
        [--dry-run | --after]

A chain, and a sweep such as optim.lr=[0.003,0.03], is one job for each of its runs.
"""

from __future__ import annotations

import sys
from shlex import quote

try:
    from launch.chains.load import launch_command, load_chain
    from launch.chains.settings import ChainRun
    from launch.jobs.preparation import (
        LaunchableRun,
        check_job,
        job_folder,
        run_name,
        submit_run,
        with_num_workers,
    )
    from launch.jobs.submission import Submission, require_slurm
    from launch.planning.dry_run import (
        as_table,
        batch_script,
        describe,
        refuse_or_warn,
        run_checks,
        slurm_check,
    )
    from vitscale.config.errors import UserError, run_script
    from vitscale.config.loader import shown_path
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


SWITCHES = {
    "--dry-run": "print the run, its plan and the batch script; submit nothing",
    "--after": "start when the queued or running job of this run has ended",
}


def main() -> None:
    command = launch_command(
        sys.argv[1:],
        program="vitscale launch",
        description="Submit a stage to SLURM. The job requeues itself and resumes.",
        examples=(
            "vitscale launch vit_h14 --dry-run",
            "vitscale launch vit_h14 launch.nodes=8",
        ),
        switches=SWITCHES,
    )
    is_dry_run = "--dry-run" in command.switches
    run = command.run

    # Jobs of several end at different times.
    is_one_job = not isinstance(run, ChainRun) and run.launch.num_tasks == 1
    if "--after" in command.switches and not is_one_job:
        raise UserError(
            "--after is for one job, not for a chain, a sweep or an array",
            where="command line",
            next_step="submit without it; then vitscale status",
        )

    if isinstance(run, ChainRun):
        # A single run needs none of the code of chains.
        from launch.chains.executors import describe_chain, submit_chain

        chain = load_chain(run, cluster="slurm")
        if is_dry_run:
            print(describe_chain(chain))
        else:
            submit_chain(chain)
        return

    # All that can be wrong is reported before the first command of SLURM that changes anything.
    run = with_num_workers(run)
    check_job(run, cluster="slurm")
    text = batch_script(run)
    checks = [*run_checks(run), *slurm_check(text)]

    if is_dry_run:
        # From what was asked to what SLURM would get.
        print(
            describe(run),
            f"# Checks\n{as_table(checks)}",
            f"# Batch script\n{text.rstrip()}",
            sep="\n\n",
        )
        return
    refuse_or_warn(checks)
    require_slurm()

    if "--after" in command.switches:
        submission = submit_run(run, earlier="wait")
    else:
        submission = submit_run(run)
    print_next_steps(run, submission)


def print_next_steps(run: LaunchableRun, submission: Submission) -> None:
    job_id = submission.job_id
    # Commands that can be copied: a relative path is shorter, and quoted for the shell.
    folder = shown_path(job_folder(run, cluster="slurm").parent)
    status = f"vitscale status {quote(folder)}"

    kind = "job"
    pause = "checkpoint, then requeue"
    log = str(submission.log(0))
    num_tasks = run.launch.num_tasks * run.launch.num_ranks
    if run.launch.num_tasks > 1:
        # Each task of an array is a job of its own, with a log of its own and no checkpoints.
        kind = "array"
        pause = "finished work is kept, then requeue"
        log = f"{submission.log('TASK_0')}, TASK from 0 to {num_tasks - 1}"

    print(
        f"submitted {kind} {job_id}: {run_name(run)}, {num_tasks} task(s)\n"
        f"  log      {log}\n"
        f"  state    {status}\n"
        f"  cancel   scancel {job_id}\n"
        f"  pause    scancel --signal=USR2 {job_id}   ({pause})"
    )


if __name__ == "__main__":
    run_script(main)
