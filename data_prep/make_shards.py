"""Turn a raw corpus into shuffled WebDataset tars with an index and a ledger.

    python data_prep/make_shards.py --config configs/data/image_folder.yaml \
        source.path=IMAGES output=SHARDS

Run again after an interruption, the command resumes. Several commands at a time, on machines that
share the output's folder, divide the work. Formats: docs/data_format.md.
"""

from __future__ import annotations

import gc
import os
import sys

# The modules stay to the end: to look for garbage among them takes a fifth of the start.
gc.disable()
# NumPy would start threads, and a process that has some cannot fork its workers.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

try:
    from pathlib import Path

    from data_prep.steps import finish, list_inputs, plan_shards, tars
    from data_prep.steps.plan_shards import read_plan
    from data_prep.steps.work import Step, make_output
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import UserError, run_script
    from vitscale.runs.data_prep import DataPrepRun
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

gc.freeze()
gc.enable()

STEPS = (
    Step(
        "open source", lambda _: [list_inputs.CONTAINERS], list_inputs.list_containers
    ),
    Step("list inputs", list_inputs.list_units, list_inputs.list_inputs),
    Step("plan shards", lambda _: [plan_shards.PLAN], plan_shards.plan_shards),
    Step(
        "write shards",
        lambda work: read_plan(work).units,
        tars.write_shard,
        images=lambda work: read_plan(work).num_rows,
    ),
    Step("finish", lambda _: [finish.FINISHED], finish.finish_shards),
)


def main() -> None:
    command = load_command(
        DataPrepRun,
        program="vitscale prepare shards",
        description="Turn a raw corpus into shuffled WebDataset tars with index and ledger.\n"
        "`vitscale prepare shards CONFIG --dry-run` shows the settings and checks alone.",
    )
    run = command.run
    output, source = (Path(path).resolve() for path in (run.output, run.source.path))
    # The output would become part of the source at the next start.
    if output.is_relative_to(source):
        raise UserError(
            "is inside source.path", where="output", next_step="choose another folder"
        )
    make_output(run, STEPS)


if __name__ == "__main__":
    run_script(main)
