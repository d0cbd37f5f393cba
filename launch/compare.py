"""Compare runs: differing parameters, metrics, and an HTML report with curves.

    python launch/compare.py runs/a runs/b [--output FILE.html] [--uri URI]

Owns: the command line. Leaves out: reading runs, comparing, printing and the HTML report
(`launch/comparison`).
"""

from __future__ import annotations

import argparse
import sys

try:
    from launch.comparison.differences import compare
    from launch.comparison.page.write import default_output, write_report
    from launch.comparison.runs import load_runs
    from launch.comparison.text import print_comparison
    from vitscale.config.errors import UserError, run_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare runs: differing parameters, metrics, and an HTML report with curves."
    )
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="run folder, name of a folder under runs/, or id or name of an MLflow run; "
        "differences are relative to the first",
    )
    parser.add_argument("--output", metavar="FILE.html", help="report to write")
    parser.add_argument(
        "--uri",
        help="MLflow tracking URI to search first; default: runs/mlflow.db, searched last",
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if not arguments.runs:
        raise UserError(
            "no run given",
            where="RUN",
            allowed="one or more run folders, names under runs/, or MLflow runs",
            next_step="python launch/compare.py runs/FIRST runs/SECOND",
        )
    runs = load_runs(arguments.runs, uri=arguments.uri)
    comparison = compare(runs)
    print_comparison(comparison)
    output = write_report(comparison, path=arguments.output or default_output(runs))
    print(f"report: {output}")


if __name__ == "__main__":
    run_script(main)
