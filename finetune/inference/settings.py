"""The run type of an evaluation. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from finetune.loading.settings import ModelRun
from vitscale.config.section import Section
from vitscale.data.remote.settings import RemoteSettings
from vitscale.evaluation.registry import EvaluationSettings
from vitscale.tracking.settings import TrackingSettings


class EvaluationData(Section):
    """The shards that a model is evaluated on. Its preprocessing comes with the model."""

    path: str
    """Shard folder or its URL, as `data.path` of a training."""
    train_split: str = "train"
    """Split that kNN, few-shot and linear probes learn from."""
    val_split: str = "test"
    """Split that the metrics are of."""
    num_workers: int = Field(default=2, ge=0)
    """Loader processes per rank."""
    timeout_s: float = Field(default=25.0, gt=0)
    """The command ends with an error if a loader process gives no batch for this long."""
    remote: RemoteSettings = RemoteSettings()


class EvaluateRun(ModelRun):
    """trained model -> one table of results."""

    stage: Literal["evaluate"] = "evaluate"
    """Which script runs this file: finetune/evaluate_model.py."""
    name: str
    """Name in MLflow and of the folder of results."""
    output: str | None = None
    """Folder of results; null: runs/NAME."""
    data: EvaluationData
    evaluate: tuple[EvaluationSettings, ...] = Field(min_length=1, strict=False)
    """The evaluations, in the order of the table."""
    tracking: TrackingSettings = TrackingSettings()

    @property
    def folder(self) -> str:
        return self.output or f"runs/{self.name}"

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        for each in self.evaluate:
            if each.every_steps is not None:
                yield ("evaluate", f"{each.name}: every_steps is for trainings; remove it")
