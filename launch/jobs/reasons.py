"""Explain SLURM's words about a job: why it waits, how it ended, and who must do what.

Owns: one table for every reason and state of SLURM, 22.05 to 25.05.
Leaves out: asking SLURM (`queue`) and the state of a run (`run_states`).
"""

from __future__ import annotations

import re

from launch.jobs.queue import QueuedJob

# JOB STATE CODES of `man squeue`, of jobs whose processes do not run.
WAITING_STATES = (
    "PENDING REQUEUED REQUEUE_HOLD REQUEUE_FED RESV_DEL_HOLD SPECIAL_EXIT STOPPED SUSPENDED"
).split()
BY_ITSELF = "it starts by itself"
RELEASE = "next: `scontrol release {job}`"
REPLACE = "next: `scancel {job}`, then submit with "
NODES = (
    "an administrator: `sinfo -R` says why, `scontrol update nodename={node} "
    "state=resume` returns it"
)
PARTITION = (
    "next: `scontrol update jobid={job} partition=NAME` moves it to another one; an "
    "administrator: `scontrol update partitionname=NAME state=up`"
)
ACCOUNT = (
    "; an administrator adds you, or changes the partition. `sacctmgr show assoc user=$USER` "
    "lists what you may use"
)
LIMITS = "; `sacctmgr show qos` and `sacctmgr show assoc` list the limits"

Rows = dict[str, tuple[str, str]]
"""Pattern -> what a job waits for or how it ended, and what to do about it."""


def _read(table: str, *, otherwise: str) -> Rows:
    """Read paragraphs: a pattern, what it means, and what to do. otherwise: if nothing is said."""
    rows = {}
    for paragraph in table.strip().split("\n\n"):
        pattern, meaning, *advice = paragraph.splitlines()
        rows[pattern] = (meaning, " ".join(advice) or otherwise)
    return rows


# JOB REASON CODES of `man squeue` and of slurm.schedmd.com/job_reason_codes.html, as regular
# expressions; the first one that fits the beginning of the state, else of the reason, counts.
# In order: of the scheduler; of other jobs; held, where only a release starts the job, and after an
# administrator's hold only that of an administrator; of nodes, some of which wait for repair, while
# others do not exist; of the partition, beyond whose limits SLURM accepts a job without
# EnforcePartLimits; of the account and the quality of service, whose limits named Grp count all
# jobs together, and those named PerJob a single one.
WAITING = _read(
    f"""
Priority
waits: jobs of higher priority are before it

Resources
waits for free nodes

BeginTime
waits for its start time, up to two minutes after a requeue

None|WaitingForScheduling
has not been looked at by the scheduler yet

Cleaning|Prolog|SchedDefer|FedJobLock|MpiPortsBusy|BlockFreeAction
waits for SLURM itself

Power|MaxPoweredUpNodes
waits for nodes that are switched on

Licenses
waits for a free licence

BurstBuffer(Resources|StageIn)
waits for its burst buffer

JobArrayTaskLimit
waits: as many of its tasks run as its array allows at a time

NonZero|Raised|TimeLimit|InactiveLimit|DeadLine|OutOfMemory|JobLaunchFailure
waits; SLURM's reason is that of its last end

Dependency( never satisfied|NeverSatisfied)
waits for a job that failed or was cancelled, so it never starts
next: `scancel {{job}}`, then submit that one and this one again

Dependency
waits for another job

JobHeldUser
is held by its user
{RELEASE}

JobHeldAdmin
is held by an administrator
an administrator: `scontrol release {{job}}`

JobHoldMaxRequeue
is held: it failed to start as often as the site allows
{RELEASE} when the nodes are repaired; {NODES}

launch failed requeued held
is held: a node could not start it
{RELEASE}; {NODES}

job requeued in special|SPECIAL_EXIT
is held: it was requeued in a special state, as after an exit code that the site names
{RELEASE}

.*\\b(held|hold)\\b|REQUEUE_HOLD
is held
{RELEASE}

SUSPENDED
is suspended and goes on by itself
an administrator: `scontrol resume {{job}}` resumes it at once

STOPPED
is stopped by a signal and keeps its nodes
next: `scancel --signal=CONT {{job}}`

COMPLETING|STAGE_OUT
is ending
if it stays so for minutes, an administrator: `scontrol update nodename=NODE state=down
reason=stuck`

CONFIGURING|POWER_UP_NODE
waits for its nodes to boot

RESIZING|SIGNALING|EXPEDITING
is being changed

ReqNodeNotAvail, Reserved
waits: its nodes are reserved, and it would not end before that begins
{BY_ITSELF} afterwards; a shorter `scontrol update jobid={{job}} timelimit=MINUTES` may let it
start before

ReqNodeNotAvail, May
waits for nodes reserved for another job

ReqNodeNotAvail|Nodes required|NodeDown|FrontEndDown
waits for nodes that are down, drained or reserved
it starts when they are back; {NODES}

BadConstraints|Constraints
asks for nodes or features that its partition does not have, or excludes them all: it never starts
{REPLACE}other nodes, features or launch.sbatch.exclude

Reservation(Deleted|Invalid)|RESV_DEL_HOLD
is held: its reservation was deleted
next: `scontrol update jobid={{job}} reservationname=`, then `scontrol release {{job}}`

Reservation
waits for its reservation to begin

PartitionDown
waits: its partition is down
{PARTITION}

PartitionInactive
waits: its partition is inactive
{PARTITION}

PartitionTimeLimit
asks for more time than its partition allows: it never starts
next: `scontrol update jobid={{job}} timelimit=MINUTES`, or `scancel {{job}}`, then submit with
a shorter launch.timeout_min

PartitionNodeLimit
asks for more or fewer nodes than its partition allows, or for ones that are down: it does not start
{REPLACE}other launch.nodes; {NODES}

PartitionConfig|MaxMemPerLimit
asks for more than the nodes of its partition have: it never starts
{REPLACE}a smaller launch section (`sinfo` shows the nodes)

InvalidAccount|AccountNotAllowed
names an account that may not be used here
{REPLACE}another launch.account{ACCOUNT}

InvalidQOS|QOSNotAllowed
names a quality of service that may not be used here
{REPLACE}another launch.sbatch.qos{ACCOUNT}

(Assoc|QOS)Max.*Per(Job|Node)
asks for more than its account allows one job: it never starts
{REPLACE}a smaller launch section, or an administrator raises the limit{LIMITS}

QOSMin
asks for less than its quality of service demands: it never starts
{REPLACE}a larger launch section, or another launch.sbatch.qos{LIMITS}

(Assoc|QOS)Grp.*(?<!Run)Minutes|AssociationTimeLimit|QOSTimeLimit|QOSUsageThreshold
waits: the time that its account may use is used up
{REPLACE}another launch.account, or an administrator adds time{LIMITS}

Assoc|QOS|Max|AccountingPolicy
waits: your account has reached a limit
{BY_ITSELF} when running jobs of it have ended{LIMITS}

BlockMaxError|SystemFailure|Burst
waits: SLURM, its storage or a node failed
an administrator: `scontrol show job {{job}}`
""",
    otherwise=BY_ITSELF,
)

# The same for the state and reason of a job that has ended, such as "FAILED JobLaunchFailure".
# What follows for all: the run is submitted again.
ENDED = _read(
    f"""
CANCELLED DependencyNeverSatisfied
was cancelled, since a job that it needs failed or was cancelled

CANCELLED
was cancelled

REVOKED
was started on another cluster

TIMEOUT|FAILED TimeLimit
reached its time limit

PREEMPTED
was preempted

DEADLINE|FAILED DeadLine
could not end before its deadline
leave `deadline` out of launch.sbatch

NODE_FAIL|FAILED NodeDown
lost a node
{NODES}

BOOT_FAIL
got a node that did not boot
{NODES}

OUT_OF_MEMORY|FAILED OutOfMemory
ran out of memory
a larger launch.mem_gb, or fewer data.num_workers, may help

LAUNCH_FAILED|RECONFIG_FAIL|FAILED (JobLaunchFailure|SystemFailure)
could not be started
the folder of its log may be missing, also on a node alone; {NODES}

FAILED BadConstraints
asked for nodes or features that its partition does not have
change the launch section

FAILED Invalid(Account|QOS)
names an account or a quality of service that does not exist
`sacctmgr show assoc user=$USER` lists yours

FAILED
failed
its log may say why

COMPLETED
ended
its log may say why
""",
    otherwise="",
)


def why_it_waits(job: QueuedJob) -> tuple[str, str]:
    """What a job waits for, such as `is held by its user (JobHeldUser)`, and what to do about it.

    A reason that nobody knows, of a newer SLURM or a plugin, is shown as it is.
    """
    # Versions write a reason with blanks or with underscores.
    words = (job.reason or "").replace("_", " ")
    unknown = (
        "waits",
        "next: `scontrol show job {job}`; ask an administrator if it stays",
    )
    # The state says more than the reason, which may be that of an earlier wait.
    what, advice = next(
        (
            row
            for text in (job.state, words or "None")
            for pattern, row in WAITING.items()
            if re.match(pattern, text)
        ),
        unknown,
    )
    if job.reason:
        what += f" ({job.reason})"

    # UnavailableNodes:n[1-2] is part of a reason, and names those that an administrator repairs.
    node = "NODE"
    if nodes := re.search(r"Unavailable(?:Nodes)?:([^\s)]+)", job.reason or ""):
        node = nodes[1]
    return what, advice.format(job=job.job_id, node=node)


def how_it_ended(job: QueuedJob) -> tuple[str, str]:
    """How a job has ended, such as `was cancelled (CANCELLED)`, and what to do beside submitting.

    The second is empty where nothing else is to be done.
    """
    assert job.has_ended
    words = f"{job.state} {job.reason or ''}"
    what, advice = next(
        row for pattern, row in ENDED.items() if re.match(pattern, words)
    )

    # SLURM's own words are what its manual and other people know.
    shown = job.state
    if job.reason:
        shown += f", {job.reason}"
    return f"{what} ({shown})", advice.format(node="NODE")
