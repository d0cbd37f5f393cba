"""Costs against published figures and against a model built by timm."""

from __future__ import annotations

import pytest

from vitscale.models import costs
from vitscale.models.settings import ViTSettings


def arch_of(preset: str, num_classes: int = 1000, **settings: object) -> ViTSettings:
    model = ViTSettings.model_validate({"preset": preset, **settings})
    return model.resolved(num_classes=num_classes)


@pytest.mark.parametrize(
    ("preset", "options", "expected"),
    [
        ("B/16", {}, 86_567_656),
        ("L/16", {}, 304_326_632),
        ("H/14", {}, 632_045_800),
        ("Ti/16", {"distillation_token": True}, 5_910_800),
        ("S/16", {"distillation_token": True}, 22_436_432),
        ("B/16", {"distillation_token": True, "image_size": 384}, 87_630_032),
    ],
)
def test_sizes_have_the_published_number_of_parameters(
    preset: str, options: dict[str, object], expected: int
) -> None:
    assert costs.num_parameters(arch_of(preset, **options)) == expected


# Forward GMACs as timm's benchmark tables list them.
@pytest.mark.parametrize(
    ("preset", "gmacs"), [("B/16", 17.58), ("L/16", 61.6), ("L/14", 81.08), ("H/14", 167.4)]
)
def test_flops_match_published_multiply_adds(preset: str, gmacs: float) -> None:
    assert costs.train_flops_per_image(arch_of(preset)) / 6e9 == pytest.approx(gmacs, rel=2e-3)


def test_activations_match_34_bytes_per_token_channel_and_block() -> None:
    arch = arch_of("L/16")
    kept = costs.activation_bytes_per_image(arch, precision="bf16", activation_checkpointing=False)
    assert kept == 34 * 197 * 1024 * 24
    less = costs.activation_bytes_per_image(arch, precision="bf16", activation_checkpointing=True)
    assert less < kept / 6


@pytest.mark.parametrize(
    ("precision", "stage", "accumulation", "bytes_per_parameter"),
    [
        ("fp32", 0, 2, 4 + 4 + 8),
        ("bf16", 0, 2, 4 + 2 + 4 + 8),  # autocast: fp32 weights and gradients, a copy of weights
        ("bf16", 1, 1, 2 + 2 + 12 / 8),
        ("bf16", 1, 3, 2 + 2 + 4 + 12 / 8),  # several micro-batches are summed in fp32
        ("bf16", 2, 3, 2 + 16 / 8),
        ("bf16", 3, 3, 18 / 8),
    ],
)
def test_zero_stages_shard_what_the_paper_says(
    precision: str, stage: int, accumulation: int, bytes_per_parameter: float
) -> None:
    arch = arch_of("L/16")
    memory = costs.memory_estimate(
        arch, costs=costs, zero_stage=stage, world_size=8, precision=precision, micro_batch=64,
        activation_checkpointing=False, optimizer_bytes=8, accumulation=accumulation,
        bucket_elements=25_000_000,
    )  # fmt: skip
    states = memory.total - memory.activations
    states -= 25_000_000 * (4 if stage == 0 or accumulation > 2 else 2)  # a bucket
    states -= 2 * 50_000_000 if stage == 3 else 0  # what is gathered ahead
    assert states == pytest.approx(bytes_per_parameter * costs.num_parameters(arch), rel=4e-3)
