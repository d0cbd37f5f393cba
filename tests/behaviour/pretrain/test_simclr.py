"""SimCLR: its costs, refusals and loss. Trainings with it: test_reference."""

import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from pretrain.objectives import contrast
from pretrain.objectives.simclr import Simclr, SimclrSettings
from pretrain.run import PretrainRun
from tests.support.ranks.thread_ranks import run_ranks
from tests.support.tables import rows
from vitscale.objectives.objective import Supervised, SupervisedSettings
from vitscale.training.session import build_model

RUN = yaml.safe_load("""
name: x
data: {path: s, global_batch: 8, views: [{name: global, count: 2}]}
model: {width: 16, depth: 1, num_heads: 2, mlp_width: 24, patch_size: 4, image_size: 16}
optim: {lr: 0.001}
schedule: {steps: 10}
objective: {name: simclr, projection_width: 10}
""")


def test_costs_are_those_of_both_views():
    run = PretrainRun.model_validate(RUN)
    objective = run.make_objective()
    arch = run.model.resolved(num_classes=0)
    model = build_model(run, objective, arch)
    counts = [parameter.numel() for parameter in model.parameters()]
    assert objective.num_parameters(arch) == sum(counts)

    # Dense layers of 16 x 16 and 16 x 10, forward once and backward twice, two operations each.
    plain = Supervised(SupervisedSettings(), seed=0)
    head = 3 * 2 * (16 * 16 + 16 * 10)
    encoder = plain.train_flops_per_image(arch)
    assert objective.train_flops_per_image(arch) == 2 * (encoder + head)

    options = {"precision": "bf16", "activation_checkpointing": False}
    kept = plain.activation_bytes_per_image(arch, **options)
    assert objective.activation_bytes_per_image(arch, **options) == 2 * kept


# Two single views are two views; what only one objective reads is refused for the others.
@rows("""
- [section, changed, problem]
- [data, {views: [{name: a}, {name: b}]}, null]
- [data, {views: [{name: a, image_size: 16}, {name: b}]}, null]
- [data, {views: []}, data.views]
- [data, {views: [{name: a}]}, data.views]
- [data, {views: [{name: a, count: 3}]}, data.views]
- [data, {views: [{name: a}, {name: b, image_size: 8}]}, data.views]
- [data, {mixing: {mixup_alpha: 0.8}}, data.mixing]
- [objective, {name: mae}, data.views]
- [objective, {name: supervised}, data.views]
""")
def test_views_that_do_not_fit_are_refused(section, changed, problem):
    values = changed if section == "objective" else RUN[section] | changed
    run = PretrainRun.model_validate(RUN | {section: values})
    expected = [] if problem is None else [problem]
    # MAE has conflicts of its own with this model.
    keys = [key for key, _ in run.problems() if not key.startswith("model.")]
    assert keys == expected


def test_an_unknown_model_is_refused():
    run = PretrainRun.model_validate(
        RUN | {"model": {"name": "timm", "model": "test_vit", "image_size": 16}}
    )
    keys = [key for key, _ in run.problems()]
    assert "model.name" in keys


# ---- loss ----------------------------------------------------------------------------------------


class ThreadRanks:
    """The collectives of the loss, between the threads of `run_ranks`."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.own = threading.local()

    def get_rank(self) -> int:
        return self.own.rank

    def get_world_size(self) -> int:
        return self.num_ranks

    def all_gather(self, parts, value) -> None:
        for part, sent in zip(parts, self.own.gather(value), strict=True):
            part.copy_(sent)

    def sum_over_ranks(self, value) -> torch.Tensor:
        return sum(self.own.gather(value))

    def run(self, work) -> list[Any]:
        """The results of `work(rank)` of all ranks."""

        def run_rank(rank, gather):
            self.own.rank = rank
            self.own.gather = gather
            return work(rank)

        return run_ranks(self.num_ranks, run_rank)


@pytest.fixture
def ranks_of(monkeypatch) -> Callable[[int], ThreadRanks]:
    def ranks_of(num_ranks: int) -> ThreadRanks:
        ranks = ThreadRanks(num_ranks)
        monkeypatch.setattr(contrast, "dist", ranks)
        monkeypatch.setattr(contrast, "sum_over_ranks", ranks.sum_over_ranks)
        return ranks

    return ranks_of


def paper(projected_ME: torch.Tensor, temperature: float) -> tuple[torch.Tensor, list]:
    """Loss of each view by equation 1, neighbours being partners; whether each finds its own."""
    unit_ME = projected_ME / projected_ME.norm(dim=1, keepdim=True)
    losses = []
    found = []
    for own in range(len(unit_ME)):
        partner = own + 1 if own % 2 == 0 else own - 1
        others = [other for other in range(len(unit_ME)) if other != own]
        cosines = {other: unit_ME[own] @ unit_ME[other] for other in others}
        total = sum((cosines[other] / temperature).exp() for other in others)
        losses.append(total.log() - cosines[partner] / temperature)
        found.append(max(others, key=cosines.__getitem__) == partner)
    return torch.stack(losses), found


def test_loss_and_accuracy_are_those_of_the_paper_on_each_rank(ranks_of):
    """The accuracy is only logged, so no comparison of weights sees it."""
    ranks = ranks_of(2)
    generator = torch.Generator().manual_seed(5)
    projected_ME = torch.randn(12, 3, generator=generator)
    # Partners are alike, so that some are nearest, and some are not.
    projected_ME[1::2] = projected_ME[::2] + torch.randn(6, 3, generator=generator) / 2
    right_ME = projected_ME.double().requires_grad_()
    losses_M, found = paper(right_ME, 0.5)
    # Each rank has its mean, and the gradient is that of their sum.
    (losses_M.sum() / 6).backward()

    def work(rank):
        own_NE = projected_ME[6 * rank : 6 * rank + 6].clone().requires_grad_()
        loss, accuracy = contrast.contrastive_loss(own_NE, temperature=0.5)
        loss.backward()
        return loss.item(), accuracy.item(), own_NE.grad

    shares = []
    for rank, (loss, accuracy, gradient_NE) in enumerate(ranks.run(work)):
        own = slice(6 * rank, 6 * rank + 6)
        assert loss == pytest.approx(losses_M[own].mean().item(), rel=1e-5)
        assert accuracy == pytest.approx(sum(found[own]) / 6)
        torch.testing.assert_close(gradient_NE, right_ME.grad[own].float())
        shares.append(accuracy)
    # At 0, or with equal shares, numbers of other views might be right by chance.
    assert 0 < shares[0] < 1
    assert 0 < shares[1] < 1
    assert shares[0] != shares[1]


def test_the_loss_of_bf16_projections_is_computed_in_fp32(ranks_of):
    """At a low temperature what bf16 rounds of a cosine is a tenth of the loss."""
    ranks = ranks_of(1)
    projected_NE = torch.randn(32, 16, generator=torch.Generator().manual_seed(5))
    rounded_NE = projected_NE.bfloat16()
    losses_N, _ = paper(rounded_NE.double(), 0.05)
    ((loss, _),) = ranks.run(
        lambda rank: contrast.contrastive_loss(rounded_NE, temperature=0.05)
    )
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(losses_N.mean().item(), rel=1e-5)


@pytest.mark.parametrize("names", ["ab", "a"])
def test_partners_are_of_one_image_whether_in_one_view_or_in_two(ranks_of, names):
    """Two views of count 1 are joined image by image, not one behind the other."""
    ranks = ranks_of(1)
    # Both views of an image are alike, and at right angles to those of the others.
    images_B13SS = torch.eye(4, 12).view(4, 1, 3, 2, 2)
    count = 2 // len(names)
    views = {name: images_B13SS.expand(-1, count, -1, -1, -1) for name in names}
    batch = SimpleNamespace(views=views)
    engine = SimpleNamespace(forward=lambda images, _: images.flatten(1))
    objective = Simclr(SimclrSettings(temperature=0.5), seed=0)
    (loss,) = ranks.run(lambda rank: objective.loss(engine, batch))

    # Seven others: a cosine of 1 with the partner, and of 0 with six.
    assert objective.recorded["train/view_accuracy"].item() == 1.0
    assert loss.item() == pytest.approx(math.log(math.exp(2) + 6) - 2, rel=1e-5)
