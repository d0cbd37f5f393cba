"""Losses of logits against labels, mixed or not, and against a teacher, as recipes define them.

Each is a mean over the batch in fp32. B: batch, C: classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def label_loss(
    logits_BC: torch.Tensor,
    labels_B: torch.Tensor,
    *,
    kind: str = "softmax",
    smoothing: float = 0.0,
    mixed_labels_B: torch.Tensor | None = None,
    mix_lambda_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Loss against labels; with mixing against lambda * label + (1 - lambda) * mixed label.

    softmax: cross-entropy, label smoothing as in Szegedy et al. 2016, sec. 7.

    sigmoid: binary cross-entropy SUMMED over classes. PyTorch's mean over classes would divide
    gradients by their number: at 21,843 classes a gradient clip at norm 1 would never act. Source:
    big_vision's `sigmoid_xent`. Written as softplus(x) - x at the label: torch's own form subtracts
    numbers near 10 to get 4.5e-5 per class, in fp32 0.8 % off at a head bias of -10. Smoothing
    spreads its share evenly over all classes, so the targets of an image still sum to 1.

    bce: averaged over classes too, mixed labels both count as 1. Source: DeiT-III on ImageNet-1k,
    `--bce-loss`: every target above 0 is set to 1.
    """
    logits_BC = logits_BC.float()
    if kind == "softmax" and mixed_labels_B is None:
        return F.cross_entropy(logits_BC, labels_B, label_smoothing=smoothing)

    # A target multiplies log probabilities in cross-entropy, and logits in the other two.
    values_BC = logits_BC
    if kind == "softmax":
        values_BC = F.log_softmax(logits_BC, dim=1)
    labelled_B = values_BC.gather(1, labels_B[:, None])[:, 0]

    if mixed_labels_B is not None:
        assert mix_lambda_B is not None
        first_B = mix_lambda_B
        second_B = 1 - mix_lambda_B
        if kind == "bce":
            # Both labels count in full, but two images of the same class count once.
            is_same_B = mixed_labels_B == labels_B
            first_B = ((mix_lambda_B > 0) | is_same_B).float()
            second_B = ((mix_lambda_B < 1) & ~is_same_B).float()
        mixed_B = values_BC.gather(1, mixed_labels_B[:, None])[:, 0]
        labelled_B = first_B * labelled_B + second_B * mixed_B

    # The mean is the loss of a target that is spread evenly over all classes.
    if smoothing:
        labelled_B = (1 - smoothing) * labelled_B + smoothing * values_BC.mean(dim=1)
    if kind == "softmax":
        return -labelled_B.mean()

    # softplus(x) is the loss of a class that no label names; a label takes x off.
    loss = (F.softplus(logits_BC).sum(dim=1) - labelled_B).mean()
    if kind == "bce":
        loss = loss / logits_BC.shape[1]
    return loss


def hard_loss(student_BC: torch.Tensor, teacher_BC: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the teacher's most likely class, not smoothed.

    Source: Touvron et al. 2021, eq. 3.
    """
    return F.cross_entropy(student_BC.float(), teacher_BC.argmax(dim=1))


def soft_loss(
    student_BC: torch.Tensor, teacher_BC: torch.Tensor, *, tau: float
) -> torch.Tensor:
    """tau^2 KL(teacher, student) at temperature tau.

    Source: Touvron et al. 2021, eq. 2; DeiT's `losses.py` divides by the number of logits, B * C.
    """
    student_BC = F.log_softmax(student_BC.float() / tau, dim=1)
    teacher_BC = F.log_softmax(teacher_BC.float() / tau, dim=1)
    # Gradients of softened targets shrink by tau^2, which the factor makes up for.
    divergence = F.kl_div(
        student_BC, teacher_BC, reduction="batchmean", log_target=True
    )
    return tau**2 * divergence
