"""Settings of the `optim` group, and which of them go together; the table of optimisers.

Needs no torch. A new optimiser is an entry of `OPTIMIZERS` and a branch of `build_optimizer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from vitscale.config.section import Section


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerKind:
    """What an optimiser reads of the settings, and what it keeps from step to step."""

    settings: tuple[str, ...]
    """Keys of `optim` that not every optimiser has; another optimiser refuses them."""
    state_names: tuple[str, ...]
    """Tensors it keeps for each parameter, of its shape, in fp32; `step` may lie beside them."""
    needs_whole_tensors: bool = False
    """Whether it needs norms of whole tensors: ZeRO 1 to 3 give it slices of many together."""


MOMENTS = ("exp_avg", "exp_avg_sq")
OPTIMIZERS = {
    "adamw": OptimizerKind(
        settings=("betas", "eps", "momentum_dtype", "weight_decay_mode"), state_names=MOMENTS
    ),
    "sgd": OptimizerKind(settings=("momentum",), state_names=("momentum_buffer",)),
    "lamb": OptimizerKind(settings=("betas", "eps"), state_names=MOMENTS, needs_whole_tensors=True),
}

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]


class EmaSettings(Section):
    """Exponential moving average of the weights."""

    decay: float = Field(default=0.9999, ge=0, lt=1)
    """What the average keeps of itself at every step. Dosovitskiy et al. 2021, table 2: 0.9999
    (there called Polyak averaging)."""
    warmup: bool = True
    """Keep at most (1 + n) / (10 + n) at step n, so that a short run's average is not its start.
    Published recipes do without."""

    def decay_at(self, step: int) -> float:
        """What is kept at the `step`-th step, the first being 1."""
        return min(self.decay, (1 + step) / (10 + step)) if self.warmup else self.decay


class OptimSettings(Section):
    """The optimiser."""

    name: OptimizerName = "adamw"
    """lamb needs full-tensor norms, which ZeRO 1 to 3 shard: set engine.zero_stage=0."""
    lr: float = Field(gt=0)
    """Peak learning rate at the configured global batch; never rescaled automatically."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW scale (times the learning rate). On kernels only: no bias, norm, token, position."""
    weight_decay_mode: Literal["coupled", "independent"] = "coupled"
    """coupled: a step decays by its learning rate times `weight_decay` (torch). independent: by
    (its learning rate / the peak) times `weight_decay` (big_vision), whatever the peak and the
    layer: 1e-4 there is 0.1 coupled at a peak of 1e-3. adamw only."""
    layer_decay: float = Field(default=1.0, gt=0, le=1)
    """Learning rate of a layer over that of the layer above it; head 1, patch embedding
    layer_decay ** (depth + 1). For fine-tuning (BEiT, MAE); 1: the same rate everywhere."""
    betas: tuple[float, float] = Field(default=(0.9, 0.999), strict=False)
    """Decay per step of the first and second moment; adamw and lamb."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment; adamw and lamb."""
    momentum_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of adamw's first moment. bf16 saves 2 bytes a parameter (big_vision, AugReg)."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """sgd only."""
    clip_norm: float | None = Field(default=None, gt=0)
    """Global gradient norm above which gradients are scaled down; null: never."""
    ema: EmaSettings | None = None
    """Keep an average of the weights, evaluate it, and start transfers from it; null: none."""

    @property
    def state_bytes_per_parameter(self) -> int:
        """Memory of the optimiser states, without the average of the weights."""
        saved = 2 if self.momentum_dtype == "bf16" else 0
        return 4 * len(OPTIMIZERS[self.name].state_names) - saved


def optim_problems(optim: OptimSettings, *, zero_stage: int) -> Iterator[tuple[str, str]]:
    """Combinations that would be ignored or wrong."""
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield ("optim.betas", f"{optim.betas} must both be at least 0 and below 1")
    fields = type(optim).model_fields
    for key in fields:
        users = [name for name, kind in OPTIMIZERS.items() if key in kind.settings]
        is_set = getattr(optim, key) != fields[key].default
        if users and optim.name not in users and is_set:
            what = f"{optim.name} does not use it; remove the key"
            yield (f"optim.{key}", f"{what}, or set optim.name={' or '.join(users)}")
    if OPTIMIZERS[optim.name].needs_whole_tensors and zero_stage != 0:
        what = f"{optim.name} needs full-tensor norms; ZeRO {zero_stage} shards them"
        yield ("engine.zero_stage", f"{what}; set engine.zero_stage=0, or optim.name=adamw")
