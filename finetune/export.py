"""Export a trained model to a folder that another library loads.

python finetune/export.py init=runs/demo-finetune --to timm exported/demo [--dry-run]
python finetune/export.py init=runs/demo-finetune --to timm --push OWNER/NAME exported/demo
"""

from __future__ import annotations

import sys

try:
    from finetune.settings import DRY_RUN, ExportRun, check_paths
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import run_script
    from vitscale.distributed.processes import quick_imports
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def export(run: ExportRun, *, is_dry_run: bool) -> None:
    # Imported late: torch takes seconds, and a wrong configuration fails before it.
    with quick_imports():
        from pathlib import Path

        from finetune.exporting.folder import check_export, format_for, write_folder
        from vitscale.config.errors import UserError
        from vitscale.evaluation.trained_model import open_model
        from vitscale.tracking.mlflow_sync import read_record, upload

    # A wrong setting is an error before the model is opened.
    check_export(run)
    model = open_model(**run.source())
    record = None
    if model.run is not None:
        record = read_record(model.run.folder)

    # An export takes long, so what its last step needs is looked for first.
    if run.mlflow and (record is None or record.uri is None):
        raise UserError(
            "no MLflow run trained this model",
            where=f"mlflow: {model.source}",
            allowed="a run that was started with a tracking.uri",
            next_step="export without mlflow=true",
        )
    if is_dry_run:
        format_for(run, model)
        print(f"dry run: {model.source} would be written to {run.output} for {run.to}")
        return
    for line in write_folder(run, model):
        print(line)
    # Last, so that a server that does not answer cannot cost the export.
    if run.mlflow and model.run is not None:
        folder = Path(run.output)
        upload(
            model.run.folder,
            sorted(folder.iterdir()),
            place=f"exported/{folder.name}",
            say=print,
        )


def main() -> None:
    command = load_command(
        ExportRun,
        program="vitscale export",
        description="Export a trained model to a folder that another library loads.",
        needs_config=False,
        switches=DRY_RUN,
        options={"--to": "to", "--push": "push"},
        words_key="output",
    )
    run = command.run
    check_paths(run.init, output=run.output)
    export(run, is_dry_run="--dry-run" in command.switches)


if __name__ == "__main__":
    run_script(main)
