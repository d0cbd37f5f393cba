"""Losses of logits against labels, mixed or not, and against a teacher, as recipes define them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

# B batch, C classes


def softmax_loss(
    logits_BC: torch.Tensor,
    labels_B: torch.Tensor,
    smoothing: float,
    *,
    mixed_labels_B: torch.Tensor | None = None,
    mix_lambda_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean cross-entropy, label smoothing as in Szegedy et al. 2016, sec. 7. Scalar, fp32."""
    if mixed_labels_B is None:
        return F.cross_entropy(logits_BC.float(), labels_B, label_smoothing=smoothing)
    log_BC = F.log_softmax(logits_BC.float(), dim=1)
    labelled_B = _at_labels(log_BC, labels_B, mixed_labels_B, mix_lambda_B)
    return -((1 - smoothing) * labelled_B + smoothing * log_BC.mean(dim=1)).mean()


def sigmoid_loss(
    logits_BC: torch.Tensor,
    labels_B: torch.Tensor,
    smoothing: float,
    *,
    mixed_labels_B: torch.Tensor | None = None,
    mix_lambda_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Binary cross-entropy SUMMED over classes, then averaged over the batch. Scalar, fp32.

    PyTorch's mean over classes would divide gradients by their number: at 21,843 classes a
    gradient clip at norm 1 would never act. Source: big_vision's `sigmoid_xent`.

    Written as softplus(x) - x at the label: torch's own form subtracts numbers near 10 to get
    4.5e-5 per class, in fp32 0.8 % off at a head bias of -10.

    Smoothing spreads its share of the target evenly over all classes, as in `softmax_loss`, so the
    targets of an image still sum to 1.
    """
    logits_BC = logits_BC.float()
    labelled_B = _at_labels(logits_BC, labels_B, mixed_labels_B, mix_lambda_B)
    if smoothing:
        labelled_B = (1 - smoothing) * labelled_B + smoothing * logits_BC.mean(dim=1)
    return (F.softplus(logits_BC).sum(dim=1) - labelled_B).mean()


def bce_loss(
    logits_BC: torch.Tensor,
    labels_B: torch.Tensor,
    smoothing: float,
    *,
    mixed_labels_B: torch.Tensor | None = None,
    mix_lambda_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Binary cross-entropy averaged over classes and batch; mixed labels both count as 1.

    Source: DeiT-III on ImageNet-1k, `--bce-loss`: every target above 0 is set to 1.
    """
    assert smoothing == 0.0, "refused by the configuration check"
    logits_BC = logits_BC.float()
    labelled_B = logits_BC.gather(1, labels_B[:, None])[:, 0]
    if mixed_labels_B is not None:
        assert mix_lambda_B is not None
        other_B = logits_BC.gather(1, mixed_labels_B[:, None])[:, 0]
        is_other_B = (mixed_labels_B != labels_B) & (mix_lambda_B < 1)
        is_own_B = (mix_lambda_B > 0) | (mixed_labels_B == labels_B)
        labelled_B = labelled_B * is_own_B + other_B * is_other_B
    return (F.softplus(logits_BC).sum(dim=1) - labelled_B).mean() / logits_BC.shape[1]


def _at_labels(
    values_BC: torch.Tensor,
    labels_B: torch.Tensor,
    mixed_labels_B: torch.Tensor | None,
    mix_lambda_B: torch.Tensor | None,
) -> torch.Tensor:
    """Each row's value at its label; with mixing the mean over both labels, weighted by shares."""
    own_B = values_BC.gather(1, labels_B[:, None])[:, 0]
    if mixed_labels_B is None:
        return own_B
    assert mix_lambda_B is not None
    other_B = values_BC.gather(1, mixed_labels_B[:, None])[:, 0]
    return mix_lambda_B * own_B + (1 - mix_lambda_B) * other_B


# Scalar, fp32. With mixing the target is lambda * label + (1 - lambda) * mixed label.
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": softmax_loss,
    "sigmoid": sigmoid_loss,
    "bce": bce_loss,
}


def hard_loss(student_BC: torch.Tensor, teacher_BC: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy with the teacher's most likely class, not smoothed. Scalar, fp32.

    Source: Touvron et al. 2021, eq. 3.
    """
    return F.cross_entropy(student_BC.float(), teacher_BC.argmax(dim=1))


def soft_loss(student_BC: torch.Tensor, teacher_BC: torch.Tensor, *, tau: float) -> torch.Tensor:
    """tau^2 KL(teacher, student) at temperature tau, mean over the batch. Scalar, fp32.

    Source: Touvron et al. 2021, eq. 2; DeiT's `losses.py` divides by the number of logits, B * C.
    """
    student_BC, teacher_BC = (
        F.log_softmax(logits_BC.float() / tau, dim=1) for logits_BC in (student_BC, teacher_BC)
    )
    divergence = F.kl_div(student_BC, teacher_BC, reduction="batchmean", log_target=True)
    return tau**2 * divergence
