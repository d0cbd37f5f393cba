"""The run type of an evaluation. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from finetune.loading.settings import ModelRun
from vitscale.checkpoint.folders import resolve_weights
from vitscale.config.section import Section
from vitscale.config.source import read_yaml
from vitscale.data.settings import RemoteSettings
from vitscale.evaluation.registry import EvaluationSettings
from vitscale.runs.launching import LaunchSettings, launch_problems
from vitscale.tracking.settings import TrackingSettings


class EvaluationData(Section):
    """The shards that a model is evaluated on. Its preprocessing comes with the model."""

    path: str
    """Shard folder or its URL, as `data.path` of a training."""
    train_split: str = "train"
    """Split that kNN, few-shot and linear probes learn from; not read without them."""
    val_split: str = "test"
    """Split that the metrics are of."""
    num_workers: int = Field(default=2, ge=0)
    """Loader processes per rank."""
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
    launch: LaunchSettings = LaunchSettings()

    @property
    def folder(self) -> str:
        return self.output or f"runs/{self.name}"

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        names = [each.name for each in self.evaluate]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield ("evaluate", f"{name} is listed twice; its metrics would have the same names")
        for each in self.evaluate:
            if each.every_steps is not None:
                yield ("evaluate", f"{each.name}: every_steps is for trainings; remove it")
        yield from launch_problems(self.launch)


def settings_of_run(argv: Sequence[str]) -> list[str]:
    """Overrides that evaluate the run of `init=` on its own data, as it evaluates itself.

    Of weights outside a run folder: a name, and classification. Raises UserError if nothing is
    there.
    """
    init = next((word[5:] for word in reversed(argv) if word.startswith("init=")), None)
    if init is None:
        return []
    if not Path(init).exists():
        resolve_weights(init)
    files = [each / "config.yaml" for each in (Path(init), Path(init).absolute().parent.parent)]
    path = next((each for each in files if each.is_file()), None)
    config: Any = (read_yaml(path.read_text(), name=str(path)) if path is not None else None) or {}
    evaluations = [
        {key: value for key, value in each.items() if key != "every_steps"}
        for each in config.get("evaluate") or [{"name": "classification"}]
    ]
    name = f"{config.get('name', Path(init).stem)}-evaluation"
    data = {key: config.get("data", {}).get(key) for key in ("path", "train_split", "val_split")}
    values = {"name": name, "evaluate": evaluations}
    values |= {f"data.{key}": value for key, value in data.items() if value is not None}
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]
