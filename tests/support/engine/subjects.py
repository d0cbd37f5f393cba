"""Subjects of evaluations in one process, whose model's output is given, in padded batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from vitscale.data.index import SplitIndex
from vitscale.data.settings import DataSettings, RemoteSettings
from vitscale.distributed.world import World
from vitscale.evaluation.evaluation import Outputs, Subject

WORLD = World(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    device=torch.device("cpu"),
)
# No test has a multiple of 3 by chance alone: most last batches are padded.
BATCH = 3


def index_of(
    labels: Sequence[int], classes: Sequence[str], *, folder: Path = Path("shards")
) -> SplitIndex:
    """A split without tars."""
    index = SplitIndex(
        folder=folder,
        split="val",
        root=folder,
        classes=tuple(classes),
        fingerprint="",
        label_map_sha256="",
        # Files that are not there: an evaluation of given outputs must read no image.
        entry=None,
        tars_path=folder / "tars-val.arrow",
        positions=folder / "positions-val.bin",
        keys=folder / "index.parquet",
        remote=RemoteSettings(),
        stored=range(len(labels)),
    )
    index.__dict__["label"] = np.array(labels, np.int32)
    return index


def split_of(values_ND: torch.Tensor, labels: list[int]):
    """A split with the model's output, for `array_subject`."""
    return SimpleNamespace(
        num_samples=len(labels),
        label=np.array(labels, dtype=np.int32),
        classes=tuple(map(str, range(max(labels) + 1))),
        values=values_ND,
    )


@dataclass(frozen=True, kw_only=True)
class GivenOutputs(Subject):
    """The model's output for sample i is row i of `values`, or of those of the split."""

    values: torch.Tensor | None = None
    extracted: list[np.ndarray] = field(default_factory=list)
    """Samples of each call of `outputs`."""

    def outputs(
        self, index, output: str, *, samples: np.ndarray | None = None
    ) -> Iterator[Outputs]:
        assert output in self.model.known_outputs
        values = self.values
        if values is None:
            values = index.values
        if samples is None:
            samples = np.arange(index.num_samples)
        self.extracted.append(samples)
        for first in range(0, len(samples), BATCH):
            chosen = samples[first : first + BATCH]
            # As the loader pads: samples again, with weight 0. Who counts them is wrong.
            padded = np.resize(chosen, BATCH)
            labels = torch.from_numpy(index.label[padded].astype(np.int64))
            weights = (torch.arange(BATCH) < len(chosen)).float()
            yield Outputs(values[torch.from_numpy(padded)], labels, weights, padded)


def _subject(*outputs: str, train=(), **values) -> GivenOutputs:
    """outputs: that the model knows. values: fields of the subject."""
    return GivenOutputs(
        model=SimpleNamespace(world=WORLD, known_outputs=outputs),
        data=DataSettings(path="shards", global_batch=BATCH),
        train=train,
        image_size=8,
        micro_batch=BATCH,
        **values,
    )


def array_subject(train, val) -> GivenOutputs:
    """train: one part, or several as a tuple."""
    if not isinstance(train, tuple):
        train = (train,)
    return _subject("logits", "features", "blocks", train=train, val=val)


def given_outputs(
    values: torch.Tensor,
    labels: Sequence[int],
    *,
    classes: Sequence[str] | None = None,
    model_classes: Sequence[str] | None = None,
    folder: Path | None = None,
    val: SplitIndex | None = None,
) -> GivenOutputs:
    """values: [N, outputs]. The last batch of three is padded if N is no multiple of 3."""
    num_outputs = values.shape[1]
    # Without names of its own the split has a class for each output.
    if val is None:
        val = index_of(labels, classes or [str(i) for i in range(num_outputs)])
    if model_classes is not None:
        model_classes = tuple(model_classes)
    return _subject(
        "logits",
        values=values,
        val=val,
        num_outputs=num_outputs,
        classes=model_classes,
        folder=folder,
    )
