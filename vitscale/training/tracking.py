"""Open the tracker of a training, with what MLflow shows of the run beside its metrics.

Leaves out: metrics (`interval_log`), the stores (`vitscale.tracking`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from vitscale.config.loader import run_to_yaml
from vitscale.config.redaction import redact
from vitscale.data.index import SplitIndex
from vitscale.data.training_set import TrainingSet
from vitscale.distributed.world import World
from vitscale.runs.training import TrainingRun
from vitscale.tracking.console import ProgressLine
from vitscale.tracking.parent_run import origin_tags
from vitscale.tracking.run_facts import DatasetFacts
from vitscale.tracking.system_metrics import node_metrics
from vitscale.tracking.tracker import Tracker

# `What: ...` at the start of a line of a run card.
CARD_KEY = re.compile(r"^(\w+): +", re.MULTILINE)


def open_tracker(
    stack: ExitStack,
    run: TrainingRun,
    world: World,
    progress: ProgressLine,
    start_step: int,
    data: TrainingSet,
    val_index: SplitIndex | None,
    *,
    facts: str,
) -> Tracker:
    """facts: size of the model, data and schedule, in a sentence."""
    tracker = stack.enter_context(
        Tracker.open(
            folder=run.folder,
            settings=run.tracking,
            run_name=run.name,
            stage=run.stage,  # type: ignore[attr-defined]  # every concrete run type has it
            params=run.model_dump(mode="json"),
            tags={"vitscale.model": run.model.title} | _origin(run),
            config_yaml=run_to_yaml(run),
            resume_step=start_step,
            is_writer=world.is_first,
            note=note(run.card, facts),
            datasets=tuple(_datasets(data, val_index)),
            say=progress.message,
        )
    )
    stack.enter_context(
        node_metrics(
            Path(run.folder),
            run.tracking,
            is_first_node=world.is_first,
            is_first_of_node=world.local_rank == 0,
        )
    )
    return tracker


def note(card: str, facts: str) -> str:
    """The run card as Markdown, and the facts."""
    return "\n\n".join(part for part in (CARD_KEY.sub(r"\n**\1:** ", card).strip(), facts) if part)


def _origin(run: TrainingRun) -> dict[str, str]:
    """The run that the weights come from. It is no parent: charts leave children out at first."""
    path = run.starts_from()
    if path is None:
        return {}
    return {"vitscale.init": redact(path)} | origin_tags(path, tag="vitscale.init_run_id")


def _datasets(data: TrainingSet, val_index: SplitIndex | None) -> Iterator[DatasetFacts]:
    for part in data.parts:
        yield _facts(part, context="training")
    if data.streamed is not None:
        source = redact(str(data.streamed.tars[0].parent))
        yield DatasetFacts(
            name=source.rpartition("/")[2] or source,
            digest=data.fingerprint,
            source=source,
            context="training",
            num_samples=data.num_samples,
            num_classes=len(data.classes),
        )
    if val_index is not None:
        yield _facts(val_index, context="validation")


def _facts(index: SplitIndex, *, context: str) -> DatasetFacts:
    folder = redact(str(index.folder))
    return DatasetFacts(
        name="/".join([*folder.rstrip("/").split("/")[-2:], index.split]),
        digest=index.fingerprint,
        source=folder,
        context=context,
        num_samples=index.num_samples,
        num_classes=len(index.classes),
    )
