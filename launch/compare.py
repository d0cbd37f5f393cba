"""Compare runs: differing parameters, metrics, and an HTML report with curves.

python launch/compare.py runs/a runs/b [--at samples] [--output FILE.html] [--json FILE.json]
python launch/compare.py --filter "params.model.depth = '12'" --uri URI
python launch/compare.py sync runs/a runs/b [--to tensorboard]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

try:
    from launch.comparison.differences import compare, parse_budget
    from launch.comparison.page import render
    from launch.comparison.report import plain_text, tables, write_file, write_json
    from launch.comparison.runs import load_runs, search_runs
    from launch.comparison.sync import sync
    from launch.comparison.verdict import verdict
    from vitscale.config.errors import UserError, run_script
    from vitscale.config.redaction import printable
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vitscale compare",
        description="Compare runs: differing parameters, metrics, and an HTML report with curves.",
        epilog="To copy runs into MLflow, TensorBoard or W&B: vitscale compare sync --help",
    )
    text = "run folder, name under runs/, or MLflow run; differences are relative to the first"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=text)
    text = "runs of the MLflow store that its filter finds: \"params.seed = '0'\""
    parser.add_argument("--filter", metavar="TEXT", help=text)
    text = "compare at equal steps, samples, hours or flops; default TOTAL: all runs' minimum"
    parser.add_argument("--at", metavar="AXIS[=TOTAL]", help=text)
    parser.add_argument(
        "--output",
        type=os.path.expanduser,
        metavar="FILE.html",
        default="runs/compare.html",
        help="report to write",
    )
    parser.add_argument(
        "--json",
        type=os.path.expanduser,
        metavar="FILE",
        help="write the whole comparison",
    )
    text = "MLflow store, searched first; default: that of the site file, or runs/mlflow.db"
    parser.add_argument("--uri", help=text)
    arguments = parser.parse_args()
    if bool(arguments.runs) == (arguments.filter is not None):
        raise UserError(
            "both runs and --filter given" if arguments.runs else "no run given",
            where="RUN",
            allowed="one or more run folders, names under runs/, or MLflow runs; or --filter",
            next_step="vitscale compare runs/FIRST runs/SECOND",
        )
    if Path(arguments.output).suffix not in (".html", ".htm"):
        raise UserError(
            f"{arguments.output!r} is not an HTML file",
            where="--output",
            allowed="FILE.html",
            next_step="to save the report as PDF, print it from a browser",
        )
    return arguments


def main() -> None:
    if sys.argv[1:2] == ["sync"]:
        sync(sys.argv[2:])
        return
    arguments = parse_arguments()
    axis, total = (None, None) if arguments.at is None else parse_budget(arguments.at)
    if arguments.filter is None:
        runs = load_runs(arguments.runs, uri=arguments.uri)
    else:
        runs = search_runs(arguments.filter, uri=arguments.uri)
    comparison = compare(runs, axis=axis, total=total)
    print(*map(printable, verdict(comparison)), "", sep="\n")
    print("\n".join(map(plain_text, tables(comparison))))
    if arguments.json is not None:
        write_json(comparison, Path(arguments.json))
        print(f"wrote {arguments.json}")
    write_file(Path(arguments.output), render(comparison))
    print(f"report: {arguments.output}")


if __name__ == "__main__":
    run_script(main)
