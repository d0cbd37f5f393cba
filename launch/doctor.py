"""Check a run before it is submitted: configuration, data, memory, disk, servers, SLURM's limits.

python launch/doctor.py --config configs/vit_h14.yaml [key=value ...] [--json]

Exit code 2 if there is an error. launch/slurm.py runs the same checks.
"""

from __future__ import annotations

import sys

try:
    from launch.jobs.preparation import RUN_TYPES, launchable
    from launch.planning.checks import as_json, as_table, worst
    from launch.planning.cluster_checks import cluster_checks
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
        switches={"--json": "print the results as JSON"},
    )
    run = launchable(command.run)
    checks = [*run_checks(run), *cluster_checks(run)]
    print(as_json(checks) if "--json" in command.switches else as_table(checks))
    if worst(checks) == "error":
        raise SystemExit(EXIT_BAD_INPUT)


if __name__ == "__main__":
    run_script(main)
