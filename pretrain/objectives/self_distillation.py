"""The head of DINO, iBOT and DINOv2, how answers of the teacher are centred, and the losses.

Source: Caron et al. 2021 (DINO), section 3.1; Zhou et al. 2022 (iBOT), equation 2; Oquab et al.
2024 (DINOv2), section 4. Shapes: N views of this rank, those of an image side by side; B images, G
global and S student views of each, K prototypes, D width, L patches of a view, M masked patches.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from vitscale.config.errors import UserError
from vitscale.distributed.world import (
    gather_with_gradients,
    max_over_ranks,
    sum_over_ranks,
)

WEIGHT_STD = 0.02
CENTER_RATE = 0.1
SINKHORN_ROUNDS = 3
SMALLEST_DISTANCE = 1e-8


class Prototypes(nn.Linear):
    """Cosines with prototypes: DINO's last layer, whose rows keep the length 1."""

    def forward(self, bottleneck_NE: torch.Tensor) -> torch.Tensor:
        return F.linear(bottleneck_NE, F.normalize(self.weight, dim=1))


class Head(nn.Module):
    """Features [N, D] to scores of prototypes [N, K], in fp32. settings: `DinoSettings`."""

    def __init__(self, width: int, settings: Any) -> None:
        super().__init__()
        hidden = settings.hidden_width

        # Three layers, as in DINO; the norm and the prototypes follow in `forward`.
        self.layers = nn.Sequential(
            nn.Linear(width, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, settings.bottleneck_width),
        )
        self.prototypes = Prototypes(
            settings.bottleneck_width, settings.num_prototypes, bias=False
        )

        # The paper's code begins all layers of the head alike.
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=WEIGHT_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, features_ND: torch.Tensor) -> torch.Tensor:
        bottleneck_NE = F.normalize(self.layers(features_ND), dim=-1)
        scores_NK: torch.Tensor = self.prototypes(bottleneck_NE)
        return scores_NK.float()


class Scores(NamedTuple):
    """What the student or the teacher says of some views."""

    features_ND: torch.Tensor
    views_NK: torch.Tensor
    patches_MK: torch.Tensor
    """Of the patches that are masked for the student; empty where none are."""


class SelfDistillation(nn.Module):
    """The heads, the mask token, and the centres that the teacher's scores are compared with."""

    view_center: torch.Tensor
    patch_center: torch.Tensor

    def __init__(self, settings: Any, *, width: int, model: Any) -> None:
        """width: of the pooled features of `model`.

        Raises UserError for masks on a model without an embedding of patches.
        """
        super().__init__()
        self.centering = settings.centering
        self.head = Head(width, settings)
        self.patch_head: Head | None = None
        self.register_buffer("view_center", torch.zeros(settings.num_prototypes))
        if not settings.patch_weight:
            return

        has_patches = hasattr(model, "patch_embed")
        if not (has_patches and hasattr(model, "num_prefix_tokens")):
            raise UserError(
                "the model has no patches to mask",
                where="objective.patch_weight",
                next_step="set it to 0, or take a Vision Transformer",
            )
        self.grid: tuple[int, int] = model.patch_embed.grid_size
        self.mask_token = nn.Parameter(torch.zeros(model.num_features))
        self.register_buffer("patch_center", torch.zeros(settings.num_prototypes))
        if settings.has_patch_head:
            self.patch_head = Head(model.num_features, settings)

    def forward(
        self,
        model: Any,
        images_N3SS: torch.Tensor,
        *,
        masked_NL: torch.Tensor | None = None,
        chosen_M: torch.Tensor | None = None,
    ) -> Scores:
        """masked_NL: patches that the mask token replaces. chosen_M: numbers of the patches, of all
        views one after another, whose scores are returned."""
        if chosen_M is None:
            features_ND = model(images_N3SS, output="features")
            return Scores(features_ND, self.head(features_ND), features_ND[:0])

        masks = {}
        if masked_NL is not None:
            masks = {"masked_BL": masked_NL, "mask_token_D": self.mask_token}
        features_ND, patches_NLD = model(images_N3SS, output="tokens", **masks)
        patch_head = self.head
        if self.patch_head is not None:
            patch_head = self.patch_head
        patches_MK = patch_head(patches_NLD.flatten(0, 1)[chosen_M])
        return Scores(features_ND, self.head(features_ND), patches_MK)

    @torch.no_grad()
    def answers(self, scores: Scores, *, temperature: float) -> Scores:
        """The teacher's distributions over prototypes, from its scores. Collective.

        Of softmax centring the centres move after they were used.
        """
        views_NK = self._answers(scores.views_NK, "view_center", temperature)
        patches_MK = scores.patches_MK
        if hasattr(self, "mask_token"):
            patches_MK = self._answers(patches_MK, "patch_center", temperature)
        return Scores(scores.features_ND, views_NK, patches_MK)

    def _answers(
        self, scores_NK: torch.Tensor, name: str, temperature: float
    ) -> torch.Tensor:
        if self.centering == "sinkhorn":
            return sinkhorn(scores_NK, temperature=temperature)
        center_K = self.get_buffer(name)
        answers_NK = F.softmax((scores_NK - center_K) / temperature, dim=1)

        # Ranks may have different numbers of masked patches.
        num_rows = scores_NK.new_full((1,), len(scores_NK))
        sums = sum_over_ranks(torch.cat([scores_NK.sum(dim=0), num_rows]))
        moved_K = center_K.lerp(sums[:-1] / sums[-1].clamp(min=1), CENTER_RATE)
        # An update whose loss is not finite is skipped, and so the centre stays, too.
        center_K.copy_(torch.where(sums.isfinite().all(), moved_K, center_K))
        return answers_NK


def sinkhorn(scores_NK: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Distributions over prototypes that use all of them alike over the rows of all ranks.

    Rows and columns are normalised in turn. Collective. Source: Caron et al. 2020 (SwAV), appendix
    A.1. The numbers of rows and prototypes that other codes divide by cancel.
    """
    # In logarithms: exp() of a score over a small temperature is beyond what fp32 holds.
    log_NK = scores_NK / temperature
    for _ in range(SINKHORN_ROUNDS):
        log_NK -= _log_sum(log_NK)
        log_NK -= log_NK.logsumexp(dim=1, keepdim=True)
    return log_NK.exp()


def _log_sum(log_NK: torch.Tensor) -> torch.Tensor:
    """Logarithm of the sum of exp() over the rows of all ranks, [K]. Collective."""
    own_K = log_NK.logsumexp(dim=0)
    largest_K = max_over_ranks(own_K)
    return largest_K + sum_over_ranks((own_K - largest_K).exp()).log()


def view_loss(
    students_BSK: torch.Tensor, answers_BGK: torch.Tensor, *, temperature: float
) -> torch.Tensor:
    """Mean cross-entropy of each student view with the teacher's answer to each other global view.

    students: scores, of the global views first. DINO, equation 3.
    """
    log_BSK = F.log_softmax(students_BSK / temperature, dim=2)
    num_images, num_global, _ = answers_BGK.shape
    # All pairs, less those of a view with itself.
    all_pairs = (answers_BGK.sum(dim=1) * log_BSK.sum(dim=1)).sum()
    same_views = (answers_BGK * log_BSK[:, :num_global]).sum()
    num_pairs = num_global * (log_BSK.shape[1] - 1)
    return (same_views - all_pairs) / (num_images * num_pairs)


def patch_loss(
    students_MK: torch.Tensor,
    answers_MK: torch.Tensor,
    masked_NL: torch.Tensor,
    *,
    temperature: float,
) -> torch.Tensor:
    """Cross-entropy over the masked patches: mean over those of a view, then over all views.

    A view without masks counts 0, as in DINOv2's code.
    """
    log_MK = F.log_softmax(students_MK / temperature, dim=1)
    num_masked_N1 = masked_NL.sum(dim=1, keepdim=True).clamp(min=1)
    shares_NL = (1.0 / num_masked_N1).expand_as(masked_NL)
    # In the order of the masked patches, as `nonzero` has them.
    shares_M = shares_NL[masked_NL]
    return -(answers_MK * log_MK).sum(dim=1).mul(shares_M).sum() / len(masked_NL)


def koleo(features_BD: torch.Tensor) -> torch.Tensor:
    """Minus the mean logarithm of the distance to the nearest other image, of all ranks.

    Features are scaled to length 1. Collective, and so is its backward pass. Source: Sablayrolles
    et al. 2019 (Spreading vectors for similarity search), as in DINOv2; there within one rank.
    """
    own_BD = F.normalize(features_BD.float(), dim=1)
    all_AD = gather_with_gradients(own_BD)
    with torch.no_grad():
        cosines_BA = own_BD @ all_AD.T
        first = dist.get_rank() * len(own_BD)
        cosines_BA[:, first : first + len(own_BD)].fill_diagonal_(-1)
        nearest_B = cosines_BA.argmax(dim=1)
    distances_B = (own_BD - all_AD[nearest_B]).norm(dim=1)
    return -torch.log(distances_B + SMALLEST_DISTANCE).mean()


@torch.no_grad()
def entropies(answers_NK: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of an answer, and of the mean answer of all ranks, over ln K. Collective.

    Answers that are all one have a low entropy of the mean; answers that say nothing a high one of
    each. Source: DINO, section 5.3.
    """
    most = math.log(answers_NK.shape[1])
    means = torch.stack([_entropy(answers_NK).mean()])
    num_ranks = dist.get_world_size()
    mean_K = sum_over_ranks(answers_NK.mean(dim=0)) / num_ranks
    return {
        "train/teacher_entropy": sum_over_ranks(means)[0] / num_ranks / most,
        "train/mean_entropy": _entropy(mean_K) / most,
    }


def _entropy(answers: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(answers).sum(dim=-1)
