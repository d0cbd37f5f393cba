"""Raw DeepSpeed keys: what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from vitscale.engine.settings import raw_problems

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"train_batch_size": 64}, "train_batch_size", "set data.global_batch"),
    ({"zero_optimization": {"stage": 7}}, "zero_optimization.stage", "set engine.zero_stage"),
    ({"zero_optimization": 3}, "zero_optimization", "3 is not a group"),
    ({"bf16": True}, "bf16", "set keys of it, as deepspeed.bf16.KEY=VALUE"),
    ({"fp61": {}}, "fp61", "did you mean 'fp16'?"),
    (
        {"zero_optimization": {"compute_grad_norm": False}},
        "zero_optimization.compute_grad_norm",
        "remove the key",
    ),
    ({"compile": {"deepcompile": True}}, "compile.deepcompile", "is never used"),
]


@pytest.mark.parametrize("raw, key, why", REFUSED)
def test_raw_key_is_refused(raw: dict[str, Any], key: str, why: str) -> None:
    ((where, what),) = raw_problems(raw)
    assert where == f"deepspeed.{key}" and why in what


def test_raw_key_is_allowed() -> None:
    raw = {"zero_optimization": {"contiguous_gradients": False}, "wall_clock_breakdown": True}
    assert list(raw_problems(raw)) == []
