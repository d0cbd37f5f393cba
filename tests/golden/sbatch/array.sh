#!/bin/bash

# Parameters
#SBATCH --array=0-63%64
#SBATCH --cpus-per-task=8
#SBATCH --job-name=data_prep-shards
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/runs/data_prep-shards/slurm/%A/%A_%a_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=720

# setup
trap '' USR2 TERM
export PYTHONPATH=FOLDER/runs/data_prep-shards/slurm/code-HASH${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1
export SUBMITIT_LOG_LEVEL=CRITICAL

# command
export SUBMITIT_EXECUTOR=slurm
exec 4>&1
decided=$(PYTHON -u -m launch.jobs.supervision --decision-descriptor=3 --job-folder FOLDER/runs/data_prep-shards/slurm/%A --signal-delay 120 --num-tasks 1 --max-requeues 100 --max-fruitless-restarts 3 -- \
srun --unbuffered --output FOLDER/runs/data_prep-shards/slurm/%A/%A_%a_%t_log.out --cpus-per-task=8 --kill-on-bad-exit=1 PYTHON -u -m submitit.core._submit FOLDER/runs/data_prep-shards/slurm/%A 3>&1 >&4 4>&-) && code=0 || code=$?
job=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}
if [ -z "$decided" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ] &&
    scontrol show job "$job" | grep -q JobState=RUNNING; then
    echo "requeueing job $job: its supervisor did not start, or was killed"
    scontrol requeue "$job" || code=1
fi
exit "$code"
