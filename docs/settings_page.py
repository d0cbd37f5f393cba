"""Renew docs/configuration.md below its introduction: every setting with what it may hold, its
default and its meaning; and the list of keys that shells complete.

    python docs/settings_page.py
"""

from __future__ import annotations

import argparse
import re

from finetune.settings import ExportRun, PredictRun, VisualizeRun
from launch.chains.settings import ChainRun
from launch.jobs.preparation import RUN_TYPES
from vitscale.config.command_line import as_markdown, settings_reference
from vitscale.config.loader import PATH_KEYS
from vitscale.config.packaged import COMPLETED_KEYS, PROJECT_ROOT
from vitscale.config.section import Run
from vitscale.distributed.atomic_files import write_text

PAGE = PROJECT_ROOT / "docs/configuration.md"
ALL_RUN_TYPES: dict[str, type[Run]] = {
    **RUN_TYPES,
    "predict": PredictRun,
    "export": ExportRun,
    "visualize": VisualizeRun,
    "chain": ChainRun,
}
# The command that takes the settings of a stage, where it has another name.
COMMANDS = {"data_prep": "prepare", "targets": "prepare", "chain": "launch"}
# Around what a key may hold, as in "a list, each item wandb" and "text, or null".
SEPARATORS = re.compile("^names?: |, (?:each item |or )?| or ")


def renewed(page: str) -> str:
    """The page with its introduction, and the settings as they are."""
    # The first heading belongs to the settings, so all before it is the introduction.
    introduction, heading, _ = page.partition("\n## ")
    assert heading, f"{PAGE} has lost its introduction"
    return introduction + as_markdown(settings_reference(ALL_RUN_TYPES))


def completed_keys() -> str:
    """A line for each command and key: both, and what the key may hold.

    Shells complete by this list, as pydantic takes longer to import than people wait.
    """
    lines = []
    for stage, run_type in ALL_RUN_TYPES.items():
        command = COMMANDS.get(stage, stage)
        for entries in settings_reference({stage: run_type}).values():
            for key, facts, _ in entries:
                # The default comes last, if there is one. Values have no blanks.
                held = facts.split("; ")[-2:][0]
                values = [
                    each
                    for each in SEPARATORS.split(held)
                    if each != "text" and re.fullmatch(r"\S+", each)
                ]
                # Keys of a group in a list are no values of the list.
                if "a group with the keys" in held:
                    values = []
                if {key, f"{key}.N"} & PATH_KEYS:
                    values = ["PATH"]
                if ".N." not in key and not held.startswith("a group"):
                    lines.append(f"{command} {key} {','.join(values)}\n")
    return "".join(sorted(lines))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    write_text(PAGE, renewed(PAGE.read_text()))
    write_text(COMPLETED_KEYS, completed_keys())
