"""Index external WebDataset tars without rewriting them.

    python data_prep/index_shards.py --config configs/data/index_shards.yaml \\
        source.path=TARS output=INDEX

INDEX is used for training like a shard folder; the tars stay where they are. TARS may be a URL
(http, https, s3, gs). After a kill or an outage the same command resumes. On several machines, as
an array, it shares the tars among them. Formats: docs/data_format.md.
"""

from __future__ import annotations

import os
import sys

# NumPy would start threads, and a process that has some cannot fork its workers.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

try:
    from data_prep.steps import finish, list_inputs, tars
    from data_prep.steps.work import Step, make_output
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import UserError, UserErrors, run_script
    from vitscale.runs.data_prep import DataPrepRun
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

STEPS = (
    Step("list tars", lambda _: [list_inputs.CONTAINERS], tars.list_tars),
    Step("index tars", tars.tar_units, tars.index_tar),
    Step("finish", lambda _: [finish.FINISHED], finish.finish_index),
)


def main() -> None:
    command = load_command(
        DataPrepRun,
        program="vitscale prepare index",
        description="Index external WebDataset tars without rewriting them.",
    )
    refuse_rewriting(command.run)
    make_output(command.run, STEPS)


def refuse_rewriting(run: DataPrepRun) -> None:
    """Raise UserErrors for settings that would require rewriting the tars."""
    keys = ("holdout_fraction", "val_per_class", "min_images_per_class", "leave_out")
    wanted = {f"source.{key}": getattr(run.source, key) for key in keys}
    wanted["images.short_side"] = run.images.short_side
    # The truth of a value decides: 0, null and an empty list ask for nothing.
    errors = [
        UserError(
            "requires rewriting the tars, which indexing does not do",
            where=key,
            next_step="remove this key, or make new shards with vitscale prepare shards",
        )
        for key, value in wanted.items()
        if value
    ]
    if run.source.kind != "webdataset":
        errors.append(UserError("must be webdataset", where="source.kind"))
    if errors:
        raise UserErrors(errors)


if __name__ == "__main__":
    run_script(main)
