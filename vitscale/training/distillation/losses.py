"""Losses of a student's logits against those of a teacher."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# B batch, C classes


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
