"""Export a trained model to a folder that another library loads.

python finetune/export.py init=runs/demo-finetune --to timm exported/demo
python finetune/export.py init=runs/demo-finetune --to safetensors exported/demo mlflow=true
"""

from __future__ import annotations

import sys

try:
    from finetune.exporting.settings import ExportRun
    from vitscale.config.command_line import load_command
    from vitscale.config.errors import run_script
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None


def export(run: ExportRun) -> None:
    # Imported late: torch takes seconds, and a wrong configuration fails before it.
    from finetune.exporting.folder import check_folder, check_packages, write_folder
    from finetune.exporting.upload import check_linked, upload
    from finetune.loading.loaded_model import load_model

    check_folder(run.output)
    check_packages(run.to)
    loaded = load_model(run)
    if run.mlflow:
        check_linked(loaded)
    for line in write_folder(run, loaded):
        print(line)
    if run.mlflow:
        upload(run, loaded)


def main() -> None:
    command = load_command(
        ExportRun,
        script="finetune/export.py",
        description="Export a trained model to a folder that another library loads.",
        needs_config=False,
        options={"--to": "to"},
        words_key="output",
    )
    export(command.run)


if __name__ == "__main__":
    run_script(main)
