"""The losses of the objectives, written out from their papers: what `reference_training` minimises.

Each returns a function of the model's forward pass, normalised pixels in fp32 and a micro-batch.
B: images, C: classes, L: patches, K: some patches, P: values of a patch.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.reference_training import Loss


def supervised(kind: str = "softmax", smoothing: float = 0.0, share_of=None) -> Loss:
    """share_of: of a pair of neighbours, what each keeps of itself (Mixup, Zhang et al. 2018)."""

    def loss_of(run, pixels, sample):
        shares_B = torch.ones(len(pixels))
        if share_of is not None:
            # A pair has one share, drawn by its number.
            drawn = [share_of(int(position) // 2) for position in sample.positions]
            shares_B = torch.tensor(drawn).float()
            mixed = shares_B[:, None, None, None]
            pixels = mixed * pixels + (1 - mixed) * _partner(pixels)
        logits_BC = run(pixels).float()
        num_classes = logits_BC.shape[1]

        # Mixed as the pixels are; without mixing the share is 1.
        label_BC = F.one_hot(sample.labels, num_classes).float()
        share_B1 = shares_B[:, None]
        target_BC = share_B1 * label_BC + (1 - share_B1) * _partner(label_BC)
        if kind == "bce":  # DeiT-III: each label counts in full, mean over classes
            target_BC = (target_BC > 0).float()
            return F.binary_cross_entropy_with_logits(logits_BC, target_BC)

        target_BC = (1 - smoothing) * target_BC + smoothing / num_classes
        if kind == "softmax":
            wrong_BC = -target_BC * logits_BC.log_softmax(dim=1)
            return wrong_BC.sum(dim=1).mean()
        # ViT on ImageNet-21k: summed over classes, where torch's own mean would divide by them.
        wrong_BC = F.binary_cross_entropy_with_logits(
            logits_BC, target_BC, reduction="none"
        )
        return wrong_BC.sum(dim=1).mean()

    return loss_of


def _partner(values: torch.Tensor) -> torch.Tensor:
    """The other one of each pair of neighbours; a batch that has no pairs is not mixed."""
    if len(values) % 2:
        return values
    return values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def distillation(teacher: nn.Module, *, kind: str, alpha: float, tau: float) -> Loss:
    """Touvron et al. 2021, equations 2 and 3."""

    def loss_of(run, pixels, sample):
        logits_BC = run(pixels).float()
        with torch.no_grad():
            teacher_BC = teacher(pixels).float()
        labelled = F.cross_entropy(logits_BC, sample.labels)
        if kind == "hard":
            taught = F.cross_entropy(logits_BC, teacher_BC.argmax(1))
        else:
            # The divergence of both, written out; tau^2 keeps its gradients as large as without.
            p_BC = (teacher_BC / tau).softmax(dim=1)
            log_q_BC = (logits_BC / tau).log_softmax(dim=1)
            divergence_B = (p_BC * (p_BC.log() - log_q_BC)).sum(dim=1)
            taught = tau**2 * divergence_B.mean()
        return (1 - alpha) * labelled + alpha * taught

    return loss_of


def features(
    teachers: list[nn.Module],
    *,
    shares: tuple[float, ...],
    weights: tuple[float, float],
) -> Loss:
    """Ranzinger et al. 2024, section 3, vector by vector, in float64.

    weights: of class token and patches. The grid of each teacher is a multiple of the student's.
    """

    def loss_of(run, pixels, sample):
        total = 0.0
        predicted = run(pixels, output="objective", patch_grid=None)
        for teacher, share, (class_BD, patches_BLD) in zip(
            teachers, shares, predicted, strict=True
        ):
            with torch.no_grad():
                tokens_BTD = teacher.forward_features(pixels).double()
            side = math.isqrt(patches_BLD.shape[1])
            step = math.isqrt(tokens_BTD.shape[1] - 1) // side
            class_terms = []
            patch_terms = []
            for image, right_TD in enumerate(tokens_BTD):
                class_terms.append(_angle(class_BD[image].double(), right_TD[0]))
                grid_RSD = right_TD[1:].view(side * step, side * step, -1)
                for number in range(side * side):
                    top = number // side * step
                    left = number % side * step
                    block = grid_RSD[top : top + step, left : left + step]
                    right_D = block.mean(dim=(0, 1))
                    given_D = patches_BLD[image, number].double()
                    gaps_D = (given_D - right_D).abs()
                    near_D = gaps_D.square() / 2
                    distance = torch.where(gaps_D < 1, near_D, gaps_D - 0.5).mean()
                    patch_terms.append(0.9 * _angle(given_D, right_D) + 0.1 * distance)
            parts = torch.stack(
                [torch.stack(class_terms).mean(), torch.stack(patch_terms).mean()]
            )
            total = total + share * (parts * torch.tensor(weights)).sum()
        return total

    return loss_of


def _angle(one_D: torch.Tensor, other_D: torch.Tensor) -> torch.Tensor:
    return 1 - (one_D * other_D).sum() / one_D.norm() / other_D.norm()


def contrastive(temperature: float) -> Loss:
    """Chen et al. 2020, equation 1, of each image and its mirror image."""

    def loss_of(run, pixels, sample):
        # All first views, then all second ones, as the paper does not order them.
        views = torch.cat([pixels, pixels.flip(-1)])
        projected_NE = run(views, output="objective").float()
        unit_NE = projected_NE / projected_NE.norm(dim=1, keepdim=True)
        similarity_NN = unit_NE @ unit_NE.T / temperature

        num_views = len(views)
        losses = []
        for number, row_N in enumerate(similarity_NN):
            partner = (number + len(pixels)) % num_views
            others = torch.arange(num_views) != number
            losses.append(row_N[others].logsumexp(0) - row_N[partner])
        return torch.stack(losses).mean()

    return loss_of


def _local(pixels: torch.Tensor) -> torch.Tensor:
    """A smaller view: the upper left quarter."""
    side = pixels.shape[-1] // 2
    return pixels[..., :side, :side]


def lejepa(weight: float, directions_of: Callable[[int], torch.Tensor]) -> Loss:
    """Balestriero & LeCun 2025, algorithm 1, of each image, its mirror image and a smaller view.

    directions_of: a step, unit vectors [E, D].
    """

    def loss_of(run, pixels, sample):
        views = torch.cat([pixels, pixels.flip(-1)])
        embedded = [*run(views, output="objective").double().chunk(2)]
        embedded.append(run(_local(pixels), output="objective").double())
        center_BE = (embedded[0] + embedded[1]) / 2
        gaps = [(view_BE - center_BE).square().mean() for view_BE in embedded]

        # The integral by the rule of trapezoids: the ends count half.
        statistics = []
        knots = [-5 + 10 * number / 16 for number in range(17)]
        directions_ED = directions_of(sample.step).double()
        for view_BE in embedded:
            projected_BD = view_BE @ directions_ED
            integral_D = torch.zeros(directions_ED.shape[1])
            for knot in knots:
                gauss = math.exp(-(knot**2) / 2)
                found_D = torch.exp(1j * knot * projected_BD).mean(dim=0)
                share = 0.5 if abs(knot) == 5 else 1.0
                gap_D = (found_D - gauss).abs().square()
                integral_D = integral_D + share * 10 / 16 * gauss * gap_D
            statistics.append(len(pixels) * integral_D.mean())

        sigreg = sum(statistics) / len(statistics)
        invariance = sum(gaps) / len(gaps)
        sample.metrics["train/invariance"] = invariance
        sample.metrics["train/sigreg"] = sigreg
        # Of zeros the mean of all exponentials is 1.
        zero = 0.0
        for knot in knots:
            gauss = math.exp(-(knot**2) / 2)
            share = 0.5 if abs(knot) == 5 else 1.0
            zero += share * 10 / 16 * gauss * (1 - gauss) ** 2
        sample.metrics["train/sigreg_share"] = sigreg / (len(pixels) * zero)
        sample.metrics["train/spread"] = _spread(embedded[0])
        return (1 - weight) * invariance + weight * sigreg

    return loss_of


def dino(
    *,
    temperatures: Callable[[int], float],
    masks_of: Callable[[np.ndarray], np.ndarray] | None = None,
    koleo: float = 0.0,
    is_balanced: bool = False,
) -> Loss:
    """Caron et al. 2021, with iBOT's patches and KoLeo as in DINOv2 where they are asked for.

    The views are those of `lejepa`. temperatures: of the teacher, by step. masks_of: the positions
    of B images, masks of both global views, [2 B, L], those of an image side by side. is_balanced:
    answers by Sinkhorn-Knopp, not by a moving centre.
    """
    centers = {"views": 0.0, "patches": 0.0}

    def answers(scores_NK, kind, temperature):
        if is_balanced:
            return _balanced(scores_NK.double() / temperature)
        shifted_NK = (scores_NK - centers[kind]) / temperature
        # The centre is used before it moves.
        centers[kind] = 0.9 * centers[kind] + 0.1 * scores_NK.mean(dim=0)
        return shifted_NK.softmax(dim=1)

    def loss_of(run, pixels, sample):
        temperature = temperatures(sample.step)
        views = torch.stack([pixels, pixels.flip(-1)], dim=1).flatten(0, 1)
        inputs = {}
        chosen = {}
        if masks_of is not None:
            masks_NL = torch.from_numpy(masks_of(sample.positions))
            chosen["chosen_M"] = torch.arange(masks_NL.numel())[masks_NL.flatten()]
            inputs["masked_NL"] = masks_NL
        features_ND, scores_NK, patches_MK = run(
            views, output="objective", **inputs, **chosen
        )
        small_BK = run(_local(pixels), output="objective")[1]
        _, teacher_NK, teacher_MK = sample.teacher(views, output="objective", **chosen)
        answer_NK = answers(teacher_NK, "views", temperature)

        # Each student view with each answer to another view.
        terms = []
        for number in range(len(pixels)):
            first, second = 2 * number, 2 * number + 1
            pairs = [(scores_NK[first], second), (scores_NK[second], first)]
            pairs += [(small_BK[number], first), (small_BK[number], second)]
            for scores_K, other in pairs:
                log_K = (scores_K / 0.5).log_softmax(dim=0)
                terms.append(-(answer_NK[other] * log_K).sum())
        loss = torch.stack(terms).mean()
        sample.metrics["train/view_loss"] = loss
        sample.metrics["train/spread"] = _spread(features_ND[0::2])
        # Of each answer, and of the mean of all.
        entropies = [_entropy(answer_K) for answer_K in answer_NK]
        sample.metrics["train/teacher_entropy"] = torch.stack(entropies).mean()
        sample.metrics["train/mean_entropy"] = _entropy(answer_NK.mean(dim=0))

        if masks_of is not None:
            answer_MK = answers(teacher_MK, "patches", temperature)
            log_MK = (patches_MK / 0.5).log_softmax(dim=1)
            terms_M = -(answer_MK * log_MK).sum(dim=1)
            counts = masks_NL.sum(dim=1).tolist()
            parts = [part.mean() for part in terms_M.split(counts) if len(part)]
            sample.metrics["train/patch_loss"] = sum(parts) / len(views)
            loss = loss + sum(parts) / len(views)
        spreads = []
        for view_BD in (features_ND[0::2], features_ND[1::2]):
            unit_BD = view_BD.float() / view_BD.float().norm(dim=1, keepdim=True)
            far_BB = torch.eye(len(unit_BD)) * 9
            distances_B = (torch.cdist(unit_BD, unit_BD) + far_BB).min(dim=1).values
            spreads.append(-torch.log(distances_B + 1e-8).mean())
        if koleo:
            sample.metrics["train/koleo"] = sum(spreads) / 2
        return loss + koleo * sum(spreads)

    return loss_of


def _spread(features_BD: torch.Tensor) -> torch.Tensor:
    """1 less the mean cosine of all pairs, those of an image with itself as well."""
    unit_BD = features_BD.double() / features_BD.double().norm(dim=1, keepdim=True)
    return 1 - (unit_BD @ unit_BD.T).mean()


def _entropy(shares_K: torch.Tensor) -> torch.Tensor:
    """Over the largest that is possible."""
    wide_K = shares_K.double()
    return -(wide_K * wide_K.log()).sum() / math.log(len(wide_K))


def _balanced(logits_NK: torch.Tensor) -> torch.Tensor:
    """Caron et al. 2020 (SwAV), appendix A.1: K rows and N columns, each normalised in turn."""
    q_KN = logits_NK.exp().T
    q_KN = q_KN / q_KN.sum()
    for _ in range(3):
        q_KN = q_KN / q_KN.sum(dim=1, keepdim=True) / q_KN.shape[0]
        q_KN = q_KN / q_KN.sum(dim=0, keepdim=True) / q_KN.shape[1]
    return (q_KN * q_KN.shape[1]).T.float()


def masked_autoencoder(
    order_of: Callable[[np.ndarray], np.ndarray], *, kept: int, normalized: bool = True
) -> Loss:
    """He et al. 2022, section 4.1. order_of: patches, the kept ones first."""

    def loss_of(run, pixels, sample):
        order_BL = torch.from_numpy(order_of(sample.positions))
        predicted_BLP = run(
            pixels,
            output="objective",
            kept_BK=order_BL[:, :kept],
            restore_BL=order_BL.argsort(dim=1),
        ).float()

        num_patches = order_BL.shape[1]
        patch = pixels.shape[-1] // math.isqrt(num_patches)
        target_BPL = F.unfold(pixels, patch, stride=patch)  # channel, row, column
        # The authors' patchify: row, column, channel.
        target_B3PL = target_BPL.unflatten(1, (3, -1))
        target_BLP = target_B3PL.permute(0, 3, 2, 1).flatten(2)
        if normalized:
            mean = target_BLP.mean(dim=2, keepdim=True)
            # Of a sample: torch's var divides by P - 1, as the authors' code does.
            variance = target_BLP.var(dim=2, keepdim=True)
            target_BLP = (target_BLP - mean) / (variance + 1e-6).sqrt()
        error_BL = (predicted_BLP - target_BLP).square().mean(dim=2)
        # Of the patches that the encoder did not see.
        hidden_BK = order_BL[:, kept:]
        return error_BL.gather(1, hidden_BK).mean()

    return loss_of


def masked_patches(
    corruption_of: Callable[[np.ndarray], dict[str, torch.Tensor]],
) -> Loss:
    """Dosovitskiy et al. 2021, appendix B.1.2: the 3-bit mean colour of each corrupted patch."""

    def loss_of(run, pixels, sample):
        inputs = corruption_of(sample.positions)
        logits_BKC = run(pixels, output="objective", **inputs).float()
        num_patches = inputs["sources_BN"].shape[1]
        patch = sample.images.shape[-1] // math.isqrt(num_patches)

        images = sample.images.double() / 255
        mean_B3L = F.avg_pool2d(images, patch).flatten(2)
        # A mean that is exactly on a border belongs to the upper level, however it was rounded.
        level_B3L = (mean_B3L * 8 + 1e-9).floor()
        red_BL, green_BL, blue_BL = level_B3L.clamp(max=7).long().unbind(dim=1)
        color_BL = red_BL * 64 + green_BL * 8 + blue_BL
        color_BK = color_BL.gather(1, inputs["predicted_BK"])
        return F.cross_entropy(logits_BKC.flatten(0, 1), color_BK.flatten())

    return loss_of
