"""Renew docs/configuration.md below its introduction: every setting with what it may hold, its
default and its meaning.

    python -m launch.planning.configuration
"""

from __future__ import annotations

import argparse

from finetune.settings import ExportRun, PredictRun, VisualizeRun
from launch.chains.settings import ChainRun
from launch.jobs.preparation import RUN_TYPES
from vitscale.config.command_line import as_markdown, settings_reference
from vitscale.config.packaged import PROJECT_ROOT
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


def renewed(page: str) -> str:
    """The page with its introduction, and the settings as they are."""
    # The first heading belongs to the settings, so all before it is the introduction.
    introduction, heading, _ = page.partition("\n## ")
    assert heading, f"{PAGE} has lost its introduction"
    return introduction + as_markdown(settings_reference(ALL_RUN_TYPES))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    write_text(PAGE, renewed(PAGE.read_text()))
