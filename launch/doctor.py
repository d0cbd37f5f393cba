"""Check a run before it is submitted: configuration, data, memory, disk, servers, SLURM's limits.

python launch/doctor.py --config configs/vit_h14.yaml [key=value ...] [--json] [--nodes-check]

Exit code 2 if there is an error. launch/slurm.py runs the same checks. --nodes-check also submits a
short job with the run's resources, which names slow or broken nodes.
"""

from __future__ import annotations

import sys

try:
    from launch.jobs.preparation import RUN_TYPES, launchable
    from launch.planning.checks import as_json, as_table, caught, worst
    from launch.planning.cluster_checks import cluster_checks
    from launch.planning.nodes_check import nodes_check
    from launch.planning.run_checks import run_checks
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import EXIT_BAD_INPUT, run_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def main() -> None:
    command = load_command(
        RUN_TYPES,
        script="launch/doctor.py",
        description="Check a run before it is submitted. Exit code 2 if there is an error.",
        switches={
            "--json": "print the results as JSON",
            "--nodes-check": "then run a short job that names slow nodes, and wait for it",
        },
    )
    run = launchable(command.run)
    checks = [*run_checks(run), *cluster_checks(run)]
    if "--nodes-check" in command.switches and worst(checks) != "error":
        checks += caught("nodes", lambda: nodes_check(run))
    print(as_json(checks) if "--json" in command.switches else as_table(checks))
    if worst(checks) == "error":
        raise SystemExit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    run_script(main)
