#!/bin/bash

# Parameters
#SBATCH --account=vision
#SBATCH --cpus-per-task=1
#SBATCH --gres=gpu:h200:4
#SBATCH --job-name=small
#SBATCH --mem=512GB
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=FOLDER/runs/small/slurm/%j/%j_0_log.out
#SBATCH --partition=long,short
#SBATCH --requeue
#SBATCH --signal=USR2@300
#SBATCH --time=1440

# setup
trap '' USR2 TERM
for limit in t f v n u; do ulimit -S -$limit "$(ulimit -H -$limit)"; done
unset SLURM_EXPORT_ENV
unset MASTER_ADDR MASTER_PORT RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE
set +eu
job=$SLURM_JOB_ID restart=${SLURM_RESTART_COUNT:-0}
export VITSCALE_ATTEMPT=$job/$restart
if [ "$restart" -gt 9 ]; then
    echo "not started: launch.max_requeues=9 is reached"
    exit 75
fi
until [ -n "$MASTER_PORT" ]; do
    port=$((20000 + RANDOM % 12000))
    (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null || export MASTER_PORT=$port
done
# submitit reports the end of every process as a success, and signals that the stages handle.
export SUBMITIT_LOG_LEVEL=CRITICAL
srun_errors=$(mktemp) || srun_errors=/dev/null
# A node that was away gets signals to its last step a minute later: this one has another number.
[ $((restart % 2)) = 0 ] || srun --nodes=1 --ntasks=1 true
# A daemon that was away when the ranks ended leaves srun waiting for them until the time limit.
watch_lock() {
    local first now last still=0
    first=$(stat -c "%y %s" "$1" 2> /dev/null)
    while sleep 60; do
        now=$(stat -c "%y %s" "$1" 2> /dev/null)
        # Rank 0 touches its lock every few seconds, from when it has opened the run.
        # Storage that fails says nothing of them.
        still=$((still + 1))
        [ -n "$now" ] && [ "$now" = "$last" ] && [ "$now" != "$first" ] || still=0
        last=$now
        [ "$still" -lt 5 ] || {
            echo "no rank has touched $1 since $(date -r "$1" 2>&1): srun is ended"
            pkill -KILL -s 0 -x srun
            return
        }
    done
}
watch_lock FOLDER/runs/small/.lock 2> /dev/null & watcher=$!
disown
# srun lets the others wait for a task that could not start: its log cannot be opened, for example.
end_step='scancel $(squeue -hs -j "$SLURM_JOB_ID" -o %i | grep "[.][0-9]")'
{

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output FOLDER/runs/small/slurm/%j/%j_%t_log.out --cpus-per-task=1 --kill-on-bad-exit=1 PYTHON -u -m submitit.core._submit FOLDER/runs/small/slurm/%j


# teardown
} 2>&1 | tee "$srun_errors" >(sed -nu "/ launch failed: /e $end_step")
code=${PIPESTATUS[0]}
# Its sleep, and then itself: TERM is ignored here.
pkill -KILL -P "$watcher"
kill -KILL "$watcher" 2> /dev/null
next=$(PYTHON -u -m launch.jobs.requeue_decision FOLDER/runs/small --signal-delay 300 --max-requeues 9 --script "$0" --job "$job" --code "$code" < "$srun_errors")
[ ! -f "$srun_errors" ] || rm "$srun_errors"
# Without Python on this node: a line for each start in a row, as `requeue_decision` would do.
failed=FOLDER/runs/small/slurm/$SLURM_JOB_ID/"$job".failed_starts
[ -z "$next" ] || { rm -f "$failed"; exit "$next"; }
[ "$code" != 0 ] || exit 0
echo "$SLURMD_NODENAME" >> "$failed"
echo "job $job: Python did not start on $SLURMD_NODENAME, or was killed"
if [ "$restart" -ge 9 ] || [ "$(wc -l < "$failed")" -gt 3 ]; then
    echo "not requeued: submit again when the cause is removed"
elif fields=$(scontrol --oneliner show job "$job") && [[ "$fields" = *JobState=RUNNING* ]]; then
    echo "requeueing job $job"
    scontrol requeue "$job" && scontrol update "JobId=$job" StartTime=now+5
    node=$(tail -n 2 "$failed" | uniq -d)
    before=$(grep -o 'ExcNodeList=[^ (]*' <<< "$fields") before=${before#*=}
    up=$(sinfo -hN -o %N -t idle,mix,alloc,comp -p "$SLURM_JOB_PARTITION" | sort -u | wc -l)
    all=$node${before:+,$before}
    [ -z "$node" ] || [ "$up" -le 8 ] ||
        ! sbatch --test-only --dependency= --exclude="$all" "$0" 2> /dev/null ||
        for try in {1..10}; do
            scontrol update "JobId=$job" "ExcNodeList=$all" && break
            sleep 2
        done
fi
exit "$code"
