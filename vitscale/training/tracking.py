"""Open the tracker of a training, with what MLflow shows of the run beside its metrics.

Leaves out: metrics (`interval_log`), the stores (`vitscale.tracking`).
"""

from __future__ import annotations

import re
from contextlib import ExitStack

from vitscale.config.redaction import redact
from vitscale.data.index import SplitIndex
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.world import World
from vitscale.runs.training import TrainingRun
from vitscale.tracking.console import Console
from vitscale.tracking.run_facts import DATA_TAG
from vitscale.tracking.tracker import Tracker

# `What: ...` at the start of a line of a run card.
CARD_KEY = re.compile(r"^(\w+): +", re.MULTILINE)


def open_tracker(
    stack: ExitStack,
    run: TrainingRun,
    world: World,
    console: Console,
    start_step: int,
    data: TrainingSet,
    val_index: SplitIndex | None,
    *,
    facts: str,
) -> Tracker:
    """facts: size of the model, data and schedule, in a sentence."""
    source = run.starts_from()
    tags = {"vitscale.model": run.model.title, **data_tags(data, val_index)}
    if source is not None:
        tags["vitscale.init"] = redact(source)
    return stack.enter_context(
        Tracker(
            run.folder,
            settings=run.tracking,
            name=run.name,
            stage=run.stage,  # type: ignore[attr-defined]  # every concrete run type has it
            tags=tags,
            resume_step=start_step,
            is_writer=world.is_first,
            note=note(run.card, facts),
            origin=source,
            say=console.message,
        )
    )


def note(card: str, facts: str) -> str:
    """The run card as Markdown, and the facts."""
    return "\n\n".join(part for part in (CARD_KEY.sub(r"\n**\1:** ", card).strip(), facts) if part)


def data_tags(data: TrainingSet, val_index: SplitIndex | None) -> dict[str, str]:
    """Name, size and fingerprint of what a run reads."""
    if data.streamed is not None:
        folder = redact(str(data.streamed.tars[0].parent))
        parts = [f"{folder}, {data.num_samples:,} images"]
    else:
        parts = [_data(part) for part in data.parts]
    tags = {DATA_TAG: "; ".join(parts)}
    return tags if val_index is None else tags | {"vitscale.val_data": _data(val_index)}


def _data(index: SplitIndex) -> str:
    folder = redact(str(index.folder))
    name = "/".join([*folder.rstrip("/").split("/")[-2:], index.split])
    return f"{name}, {index.num_samples:,} images, {index.fingerprint[:12]}"
