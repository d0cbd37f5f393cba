"""Say in plain words why SLURM keeps a job waiting.

Source of the names: JOB REASON CODES of `man squeue`, SLURM 22.05 to 24.11.
"""

from __future__ import annotations

REASONS = {
    "AssociationJobLimit": "your account has reached its limit of jobs",
    # cred_expire in slurm.conf: until the old credential has expired.
    "BeginTime": "waits for its start time; SLURM holds a requeued job back for two minutes",
    "Cleaning": "SLURM still cleans up after the last attempt",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "waits for a job that has failed: it will never start",
    "JobArrayTaskLimit": "launch.max_running_tasks tasks are running",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held by its user: `scontrol release` lets it start",
    "Licenses": "waits for a license",
    "NodeDown": "a node that it needs is down",
    "PartitionDown": "its partition starts no jobs at present",
    "PartitionInactive": "its partition accepts no jobs at present",
    "PartitionNodeLimit": "asks for more or fewer nodes than its partition allows: it will never "
    "start",
    "PartitionTimeLimit": "asks for more time than its partition allows: it will never start",
    "Priority": "jobs of higher priority are before it",
    "Reservation": "waits for its reservation to begin",
    "Resources": "waits for free nodes",
}
# Families of reasons with many members.
PREFIXES = {
    "Assoc": "your account has reached a limit",
    "Max": "your account has reached a limit",
    "QOS": "its quality of service has reached a limit",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "launch_failed_requeued_held": "a node could not start it, so it is held: `scontrol release` "
    "tries again",
}


def plain_reason(reason: str | None) -> str:
    """A sentence's end for SLURM's word, followed by that word."""
    if reason is None:
        return "the scheduler has not looked at it yet"
    word = reason.replace(" ", "_")
    found = REASONS.get(word)
    if found is None:
        found = next((text for start, text in PREFIXES.items() if word.startswith(start)), None)
    return f"SLURM says {reason}" if found is None else f"{found} ({reason})"
