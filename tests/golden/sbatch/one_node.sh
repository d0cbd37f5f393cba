#!/bin/bash

# Parameters
#SBATCH --cpus-per-task=4
#SBATCH --job-name=small
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/runs/small/slurm/%j/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=1440

# setup
trap '' USR2 TERM
export SUBMITIT_LOG_LEVEL=CRITICAL

# command
export SUBMITIT_EXECUTOR=slurm
exec 4>&1
decided=$(PYTHON -u -m launch.jobs.supervision --decision-descriptor=3 --job-folder FOLDER/runs/small/slurm/%j --signal-delay 120 --num-tasks 1 --max-requeues 9 --max-fruitless-restarts 3 --run-folder FOLDER/runs/small -- \
srun --unbuffered --output FOLDER/runs/small/slurm/%j/%j_%t_log.out --cpus-per-task=4 --kill-on-bad-exit=1 PYTHON -u -m submitit.core._submit FOLDER/runs/small/slurm/%j 3>&1 >&4 4>&-) && code=0 || code=$?
job=$SLURM_JOB_ID
if [ -z "$decided" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 9 ] &&
    scontrol show job "$job" | grep -q JobState=RUNNING; then
    echo "requeueing job $job: its supervisor did not start, or was killed"
    scontrol requeue "$job" || code=1
fi
exit "$code"
