"""The interface of an evaluation, and the model and splits it is given.

Needs no torch when imported, and neither may a file with an evaluation: settings are validated on
machines without torch. Import torch inside the methods.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import PositiveInt

from vitscale.config.errors import UserError
from vitscale.config.outside import csv_cell
from vitscale.config.section import NamedSection
from vitscale.data.settings import DataSettings
from vitscale.distributed.atomic_files import make_folders, write_text
from vitscale.evaluation.classes import ClassMap, column_of_each_class
from vitscale.tracking.journal import item_progress

if TYPE_CHECKING:
    import torch

    from vitscale.data.index import SplitIndex
    from vitscale.distributed.world import World
    from vitscale.engine.engine import Engine
    from vitscale.evaluation.trained_model import InferenceModel

# Folder of the evaluations' files in that of a run or of results.
FILES = "evaluation"
NORMAL_QUANTILE_975 = 1.959963984540054
Output = Literal["logits", "features", "representation", "blocks"]
"""representation: what the last layer sees, after a representation layer."""


class SettingsBase(NamedSection):
    every_steps: PositiveInt | None = None
    """Steps between two evaluations; null: after the last step only."""


class NonFiniteOutputs(UserError):
    """The model computes NaN or infinity, of which every metric would be a number without sense."""


class Outputs(NamedTuple):
    """Outputs of a model for one batch of this rank."""

    values_BX: torch.Tensor
    """fp32: logits [B, classes], or features [B, width]."""
    labels_B: torch.Tensor
    weights_B: torch.Tensor
    """0 for padding, else 1."""
    samples_B: np.ndarray
    """int64: number of each image in its split."""
    heads_2BC: torch.Tensor | None = None
    """Beside logits: those of the class and of the distillation head, if the model has both."""

    def of(self, columns_C: torch.Tensor) -> Outputs:
        """The logits of these columns, such as those of the classes of the shards."""
        heads_2BC = self.heads_2BC
        if heads_2BC is not None:
            heads_2BC = heads_2BC[:, :, columns_C]
        return self._replace(
            values_BX=self.values_BX[:, columns_C], heads_2BC=heads_2BC
        )


@dataclass(frozen=True, kw_only=True)
class Features:
    """This rank's rows; each sample is on exactly one rank. N may be 0."""

    samples: np.ndarray
    """int64 [N]: numbers in the split, counted over all parts of a training set."""
    values_ND: torch.Tensor
    """fp32, on the CPU."""
    labels_N: torch.Tensor
    """int64, on the CPU."""

    @staticmethod
    def joined(parts: Sequence[Features]) -> Features:
        import torch

        return Features(
            samples=np.concatenate([part.samples for part in parts]),
            values_ND=torch.cat([part.values_ND for part in parts]),
            labels_N=torch.cat([part.labels_N for part in parts]),
        )

    def rows(self, chosen: np.ndarray) -> Features:
        """The rows that `chosen`, bool [N] or numbers, takes."""
        import torch

        rows = torch.from_numpy(chosen)
        return Features(
            samples=self.samples[chosen],
            values_ND=self.values_ND[rows],
            labels_N=self.labels_N[rows],
        )

    def gathered(self) -> Features:
        """The rows of all ranks, ordered by sample. Collective."""
        from vitscale.distributed.world import gather_objects

        # Which rank computed a row must not decide the order of the bank.
        whole = Features.joined(gather_objects(self))
        return whole.rows(np.argsort(whole.samples))

    def num_correct(
        self,
        scores: Callable[[torch.Tensor], torch.Tensor],
        *,
        world: World,
        size: int = 4096,
    ) -> torch.Tensor:
        """Count this rank's rows that each of H classifiers predicts right: int64 [H].

        scores: at most `size` values [B, D] on the device -> [B, H, classes].
        """
        import torch

        # The scores of all rows and classifiers at once would not fit into memory.
        correct = []
        device = world.device
        total = len(self.labels_N)
        with item_progress("classify", total=total, is_shown=world.is_first) as advance:
            for values_BD, labels_B in zip(
                self.values_ND.split(size), self.labels_N.split(size), strict=True
            ):
                # Equal scores have the same winner everywhere: the first class.
                guesses_BH = scores(values_BD.to(device)).argmax(dim=2)
                correct.append((guesses_BH == labels_B.to(device)[:, None]).sum(dim=0))
                advance(len(labels_B))
        return torch.stack(correct).sum(dim=0)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and the splits it is evaluated on."""

    model: Engine | InferenceModel
    """Its methods are collective where the model is sharded over ranks."""
    train: tuple[SplitIndex, ...]
    """The training set; empty where all evaluations read logits alone."""
    val: SplitIndex
    data: DataSettings
    image_size: int
    micro_batch: int
    num_outputs: int = 0
    """Length of the logits; 0: the model has no head."""
    classes: tuple[str, ...] | None = None
    """Name of each output of the head; None where they are unknown."""
    folder: Path | None = None
    """Folder for the files of the evaluations, written by rank 0; None: no files."""
    draws: bool = False
    """Whether to draw pictures that take seconds: not at each evaluation of a training."""
    kept: dict[tuple[str, str], tuple[np.ndarray, Features]] = field(
        default_factory=dict
    )
    """Computed features, per split and output: samples that some rank has, and this rank's rows.
    Cleared before the weights change."""

    def write(self, name: str, write: Callable[[Path], None]) -> None:
        """Let rank 0 call `write` with the path of a file in `folder`, if there is one. Collective.

        Raises UserError on every rank when that fails.
        """
        from vitscale.distributed.world import errors_on_all_ranks

        if self.folder is None:
            return
        # Without this the other ranks would wait for one that cannot write.
        is_first = self.model.world.is_first
        with errors_on_all_ranks(
            "cannot be written", self.folder / name, tried=is_first
        ):
            if is_first:
                make_folders(self.folder)
                write(self.folder / name)

    def write_table(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        """Write a CSV file, as `write`. Collective."""
        # The whole table in memory, so that the file is written in one piece.
        text = csv_text(rows)
        self.write(name, lambda path: write_text(path, text))

    def outputs(
        self, index: SplitIndex, output: Output, *, samples: np.ndarray | None = None
    ) -> Iterator[Outputs]:
        """The model's output for every sample of `index`, or for those in `samples`, in order.

        Sharded over ranks: every rank gets equally many batches of `micro_batch`, the last ones
        padded. Collective; the caller sets the model to eval.
        """
        import torch

        from vitscale.evaluation.samples import evaluation_batches

        model = self.model
        world = model.world
        # Classification reports each head; the mean alone would hide a head that learns nothing.
        has_two_heads = output == "logits" and "heads" in model.known_outputs
        batches = evaluation_batches(
            index,
            settings=self.data,
            image_size=self.image_size,
            micro_batch=self.micro_batch,
            world=world,
            samples=samples,
        )
        total = index.num_samples if samples is None else len(samples)
        progress = item_progress(
            f"evaluate {index.split}", total=total, is_shown=world.is_first
        )
        # Closed on errors too: exit would wait for workers that are left.
        with closing(batches), torch.no_grad(), progress as advance:
            for cpu_batch in batches:
                assert cpu_batch.positions is not None
                batch = cpu_batch.to(world.device)
                heads_2BC = None
                if has_two_heads:
                    # The mean of both heads, as the model computes its logits itself.
                    heads = model.forward(batch.images, "heads")
                    heads_2BC = torch.stack(heads).float()
                    values_BX = heads_2BC.mean(dim=0)
                else:
                    values_BX = model.forward(batch.images, output).float()
                yield Outputs(
                    values_BX=values_BX,
                    labels_B=batch.labels,
                    weights_B=batch.weights,
                    samples_B=cpu_batch.positions,
                    heads_2BC=heads_2BC,
                )
                advance(self.micro_batch * world.world_size)

    @property
    def num_train(self) -> int:
        return sum(part.num_samples for part in self.train)

    def features(
        self,
        split: Literal["train", "val"],
        *,
        output: Output = "features",
        samples: np.ndarray | None = None,
    ) -> Features:
        """Features of the images of a split, each on the rank that computed it. Collective.

        samples: increasing numbers of the images to take, counted over all parts; None: all.
        An image is computed once, whichever evaluation asks first.
        """
        parts = self.train if split == "train" else (self.val,)
        if samples is None:
            samples = np.arange(sum(part.num_samples for part in parts))

        # Only what no evaluation has asked for yet is computed.
        rows: list[Features] = []
        computed = np.empty(0, np.int64)
        if (split, output) in self.kept:
            computed, kept = self.kept[split, output]
            rows.append(kept)
        missing = np.setdiff1d(samples, computed)

        # Samples are counted over all parts, and each part numbers its own from 0.
        offset = 0
        for part in parts:
            numbers = missing[missing >= offset] - offset
            numbers = numbers[numbers < part.num_samples]
            batches: Iterable[Outputs] = ()
            if len(numbers):
                batches = self.outputs(part, output, samples=numbers)
            for batch in _checked(batches, self, expected=len(numbers)):
                is_real = batch.weights_B > 0
                features = Features(
                    samples=batch.samples_B[is_real.cpu().numpy()] + offset,
                    values_ND=batch.values_BX[is_real].cpu(),
                    labels_N=batch.labels_B[is_real].cpu(),
                )
                rows.append(features)
            offset += part.num_samples

        kept = Features.joined(rows)
        self.kept[split, output] = (np.union1d(computed, missing), kept)
        return kept.rows(np.isin(kept.samples, samples))


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """The rows as CSV."""
    text = io.StringIO()
    # A spreadsheet would run the name of a class that looks like a formula.
    safe = (map(csv_cell, row) for row in rows)
    csv.writer(text, lineterminator="\n").writerows(safe)
    return text.getvalue()


class Share(float):
    """A share of `images`, such as top-1 accuracy. Tables add its confidence interval."""

    images: int

    def __new__(cls, count: float, images: float) -> Share:
        """NaN without images."""
        # A number, so that journals and tables need not know of shares.
        share = super().__new__(cls, count / images if images else math.nan)
        share.images = round(images)
        return share

    def interval(self) -> tuple[float, float]:
        """Return the 95 % confidence interval of the share.

        Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
        """
        z = NORMAL_QUANTILE_975
        n = self.images
        if not n:
            return math.nan, math.nan
        scale = 1 + z**2 / n
        middle = (self + z**2 / (2 * n)) / scale
        half = z / scale * math.sqrt(self * (1 - self) / n + z**2 / (4 * n**2))
        # Rounding may put a bound a little outside.
        return max(0.0, middle - half), min(1.0, middle + half)


class Evaluation:
    """Metrics of a model on the validation split. A subclass defines `metrics`."""

    Settings: ClassVar[type[SettingsBase]]
    needs: ClassVar[Output]
    """The output of the model that the evaluation reads."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def check(self, subject: Subject) -> str:
        """Raise UserError where the model and the split do not suit the evaluation.

        Called before any evaluation runs. Returns a sentence on how the model's outputs are matched
        with the classes of the shards, if that is not plain.
        """
        return ""

    def metrics(self, subject: Subject) -> dict[str, float]:
        """Metrics by name, without the prefix `val/`. Collective; equal on every rank."""
        raise NotImplementedError


class Probe(Evaluation):
    """An evaluation that learns from features of the training images."""

    needs: ClassVar[Output] = "features"

    def check(self, subject: Subject) -> str:
        """No evaluated image is one that the probe learns from."""
        val = subject.val
        for part in subject.train:
            # Splits are disjoint, so the images can only be the same within one split.
            if (part.folder, part.split) != (val.folder, val.split):
                continue
            shared = np.intersect1d(_rows(part), _rows(val), assume_unique=True)
            if len(shared):
                raise UserError(
                    f"{self.settings.name}: {len(shared):,} of the {val.num_samples:,} evaluated "
                    f"images are among those of {part.split!r} that it learns from",
                    where="data.val_split",
                    next_step="set data.train_split or data.val_split to another split",
                )
        return ""


def _rows(index: SplitIndex) -> np.ndarray:
    """The numbers of the samples in the stored split."""
    return index.rows_of(np.arange(index.num_samples))


class PassEvaluation(Evaluation):
    """An evaluation of logits; all of a run share one pass over the validation images.

    A subclass defines `start`, `add` and `finish`, in this order, and not `metrics`.
    """

    needs: ClassVar[Output] = "logits"

    def check(self, subject: Subject) -> str:
        """The head has one output for each class of the shards, in any order."""
        return check_labels(subject, name=self.settings.name).how

    def start(self, subject: Subject) -> None:
        """Prepare to count."""

    def add(self, outputs: Outputs) -> None:
        """Count one batch of this rank."""

    def finish(self) -> dict[str, float]:
        """Return what `metrics` returns. Collective."""
        raise NotImplementedError

    def metrics(self, subject: Subject) -> dict[str, float]:
        return _in_one_pass([self], subject)[0]


def results(
    evaluations: Sequence[Evaluation], subject: Subject
) -> Iterator[dict[str, float]]:
    """Metrics of each evaluation, in their order. Collective; equal on every rank."""

    # Reading the images costs far more than what is counted of the logits.
    in_pass = [
        evaluation
        for evaluation in evaluations
        if isinstance(evaluation, PassEvaluation)
    ]
    pass_metrics: list[dict[str, float]] = []

    try:
        for evaluation in evaluations:
            if not isinstance(evaluation, PassEvaluation):
                yield evaluation.metrics(subject)
                continue
            # The first of them runs the pass for all.
            if not pass_metrics:
                pass_metrics = _in_one_pass(in_pass, subject)
            yield pass_metrics[in_pass.index(evaluation)]
    finally:
        # The next results may be of other weights.
        subject.kept.clear()


def _in_one_pass(
    evaluations: Sequence[PassEvaluation], subject: Subject
) -> list[dict[str, float]]:
    for evaluation in evaluations:
        evaluation.start(subject)
    val = subject.val
    batches = subject.outputs(val, "logits")
    for outputs in _checked(batches, subject, expected=val.num_samples):
        for evaluation in evaluations:
            evaluation.add(outputs)
    return [evaluation.finish() for evaluation in evaluations]


def _checked(
    batches: Iterable[Outputs], subject: Subject, *, expected: int
) -> Iterator[Outputs]:
    """Pass batches on. After the last one raise NonFiniteOutputs, on every rank, if an image has an
    output that is not finite. Collective.

    expected: how many images all ranks together have.
    """
    import torch

    from vitscale.distributed.world import sum_over_ranks

    # Counted on the device: a batch must not wait for the one before.
    counts = torch.zeros(2, dtype=torch.float64, device=subject.model.world.device)
    for batch in batches:
        is_finite_B = batch.values_BX.isfinite().flatten(1).all(dim=1)
        is_image_B = batch.weights_B > 0
        counts += torch.stack([(is_image_B & ~is_finite_B).sum(), is_image_B.sum()])
        yield batch

    # A rank that raised in the middle would leave the others in their next collective.
    num_bad, num_images = map(int, sum_over_ranks(counts).tolist())
    # A sample that is lost or counted twice would only move the digits of a metric.
    assert num_images == expected, f"evaluated {num_images} of {expected} samples"
    if num_bad:
        raise NonFiniteOutputs(
            f"outputs of the model are not finite (NaN or infinity): {num_bad:,} of "
            f"{num_images:,} images",
            where="init",
            next_step="evaluate an earlier checkpoint, or other weights",
        )


def check_head(subject: Subject, *, name: str) -> None:
    """Raise UserError where the model has no head or the shards have no labels."""
    # Shards without labels have no classes, and every metric of logits compares with them.
    if not subject.val.classes:
        raise UserError(
            f"{name} needs labels, but the shards of {subject.val.folder} have none",
            where="evaluate",
            next_step="set data.path to labelled shards",
        )
    if subject.num_outputs == 0:
        raise UserError(
            f"{name} needs a classifier, but the model has no head",
            where="init",
            next_step="evaluate its features with knn, or a model that was fine-tuned",
        )


def check_labels(subject: Subject, *, name: str) -> ClassMap:
    """Return the output for each class of the shards.

    Raises UserError where they are not the same classes.
    """
    check_head(subject, name=name)
    shards = subject.val.classes
    num_outputs = subject.num_outputs
    where = f"label map of {subject.val.folder}"
    matched = column_of_each_class(subject.classes, shards, num_outputs=num_outputs)
    lacking = matched.lacking(shards)
    if lacking:
        raise UserError(
            f"{name}: {len(lacking)} of {len(shards)} classes are none of the model's "
            f"{num_outputs} (the first is {lacking[0]!r})",
            where=where,
            next_step="use shards with the model's classes; {name: subset, allow_missing: true} "
            "counts images of the others as wrong",
        )

    # Fewer classes make the task easier, so the numbers would not be comparable.
    if len(shards) != num_outputs:
        raise UserError(
            f"{name}: {len(shards)} classes, but the model's head has {num_outputs}",
            where=where,
            next_step="evaluate {name: subset}, in which only the shards' classes compete",
        )
    return matched


def columns_on(subject: Subject, columns: Sequence[int]) -> torch.Tensor:
    """The positions of outputs as a tensor on the model's device."""
    import torch

    return torch.tensor(columns, device=subject.model.world.device)


def rows_of_all_ranks(rows_NX: torch.Tensor) -> torch.Tensor:
    """The rows of every rank, in rank order. Collective; all ranks have equally many."""
    import torch
    import torch.distributed as dist

    shares = [torch.empty_like(rows_NX) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, rows_NX)
    return torch.cat(shares)
