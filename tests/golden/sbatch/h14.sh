#!/bin/bash

# Parameters
#SBATCH --cpus-per-task=12
#SBATCH --gpus-per-node=8
#SBATCH --job-name=vit_h14-imagenet21k
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/runs/vit_h14-imagenet21k/slurm/%j/%j_0_log.out
#SBATCH --requeue
#SBATCH --signal=USR2@300
#SBATCH --time=1440

# setup
trap '' USR2 TERM
export PYTHONPATH=FOLDER/runs/vit_h14-imagenet21k/slurm/code-HASH${PYTHONPATH:+:$PYTHONPATH}
export PYTHONSAFEPATH=1
export SUBMITIT_LOG_LEVEL=CRITICAL

# command
export SUBMITIT_EXECUTOR=slurm
exec 4>&1
decided=$(PYTHON -u -m launch.jobs.supervision --decision-descriptor=3 --job-folder FOLDER/runs/vit_h14-imagenet21k/slurm/%j --signal-delay 300 --num-tasks 64 --max-requeues 100 --max-fruitless-restarts 3 --run-folder FOLDER/runs/vit_h14-imagenet21k -- \
srun --unbuffered --output FOLDER/runs/vit_h14-imagenet21k/slurm/%j/%j_%t_log.out --cpus-per-task=12 --kill-on-bad-exit=1 PYTHON -u -m submitit.core._submit FOLDER/runs/vit_h14-imagenet21k/slurm/%j 3>&1 >&4 4>&-) && code=0 || code=$?
job=$SLURM_JOB_ID
if [ -z "$decided" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ] &&
    scontrol show job "$job" | grep -q JobState=RUNNING; then
    echo "requeueing job $job: its supervisor did not start, or was killed"
    scontrol requeue "$job" || code=1
fi
exit "$code"
