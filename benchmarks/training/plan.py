"""What the calls of gpu_training run, for how long, and what is expected of them.

Owns: the sections of each call and their seconds, goals, predictions. Needs no torch.
Leaves out: what a section does, sizes (`scale`), and printing (`report`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_CALL_S = 540
# Of a section's time, beyond which its process is killed; taken from the sections after it.
GRACE_S = 20


@dataclass(frozen=True, kw_only=True)
class Section:
    name: str
    seconds: int
    """With the start of its process and compiling. What earlier sections leave is added."""


def _sections(**seconds: int) -> tuple[Section, ...]:
    return tuple(Section(name=name, seconds=each) for name, each in seconds.items())


CALLS = {
    1: _sections(smoke=100, losses=80, rates=80, compile_L16=120, L16=140),
    2: _sections(compile_H14=170, H14=120, profile=60, tax=170),
    3: _sections(data=150, checkpoint=80, start=130, recipes=160),
    4: _sections(compile_B16=110, B16=80, timm=110, attention=40, variants=180),
}
SECTIONS = {section.name: section for sections in CALLS.values() for section in sections}


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A ratio that a section measures."""

    what: str
    section: str
    path: tuple[str, ...]
    """Where it is in the section's values."""
    least: float | None = None
    most: float | None = None
    expected: tuple[float, float] | None = None
    """By arithmetic, for the code before any of the `GAINS`; None: no estimate."""

    def needed(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g}"
        return f">= {self.least:g}" if self.least is not None else f"<= {self.most:g}"

    def reached(self, value: float) -> bool:
        above = self.least is None or value >= self.least
        return above and (self.most is None or value <= self.most)


def _model(name: str, least: float, expected: tuple[float, float]) -> Goal:
    what = f"{name[0]}/{name[1:]} / bf16 matrix rate"
    return Goal(what=what, section=name, path=("of_matmul",), least=least, expected=expected)


def _tax(stage: int, least: float, expected: tuple[float, float] | None = None) -> Goal:
    return Goal(
        what=f"ZeRO {stage} / bare compiled loop",
        section="tax",
        path=("speed_over_bare", f"zero {stage}", "median"),
        least=least,
        expected=expected,
    )


def _memory(name: str) -> Goal:
    return Goal(
        what=f"peak memory of {name[0]}/{name[1:]} / --dry-run",
        section=name,
        path=("memory", "peak_over_estimate"),
        least=0.9,
        most=1.1,
    )


GOALS = (
    _model("L16", 0.70, (0.56, 0.64)),
    _model("H14", 0.72, (0.55, 0.63)),
    _model("B16", 0.62, (0.48, 0.56)),
    Goal(
        what="L/16 / timm's compiled step",
        section="timm",
        path=("speed_over_timm", "timm compiled", "median"),
        least=1.08,
    ),
    _tax(1, 0.97, (0.93, 0.96)),
    _tax(2, 0.95),
    _tax(3, 0.85),
    Goal(
        what="real tars / synthetic batches",
        section="data",
        path=("real_over_synthetic",),
        least=0.97,
        expected=(0.97, 1.0),
    ),
    *map(_memory, ("L16", "H14", "B16")),
    Goal(
        what="stall of a save / torch.save",
        section="checkpoint",
        path=("stall_over_torch_save",),
        most=0.1,
    ),
    Goal(
        what="stall of a save / copy to the host",
        section="checkpoint",
        path=("stall_over_copy",),
        most=1.5,
    ),
    Goal(
        what="first step, warm by block / cold whole",
        section="start",
        path=("warm_over_whole",),
        most=0.2,
    ),
    Goal(
        what="waits in 100 steps", section="smoke", path=("waits",), most=0.0, expected=(0.0, 0.0)
    ),
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A change of one model, measured beside it."""

    what: str
    model: str
    overrides: tuple[str, ...] = ()
    """Settings, as on the command line. One that does not exist leaves the variant out."""
    base: tuple[str, ...] = ()
    """Settings of what it is compared with, beyond the model's own."""
    waits: bool = False
    """Wait for the device twice in every step, as DeepSpeed's timer does."""
    batch_share: float = 1.0
    predicted: tuple[float, float] | None = None
    """Speed over the model as it is; None: no estimate."""


BF16_SUM = "deepspeed.data_types.grad_accum_dtype=bf16"
FP32_SUM = "deepspeed.data_types.grad_accum_dtype=fp32"
# The most important first: time may run out.
VARIANTS = (
    Variant(
        what="gradients summed in bf16, over fp32",
        model="L16",
        base=(FP32_SUM,),
        overrides=(BF16_SUM,),
        predicted=(1.03, 1.05),
    ),
    Variant(
        what="256 tokens (mean of the patches)",
        model="H14",
        overrides=("model.pool=gap",),
        predicted=(1.04, 1.05),
    ),
    Variant(what="two waits a step", model="L16", waits=True, predicted=(0.97, 0.98)),
    Variant(
        what="whole forward pass compiled",
        model="L16",
        overrides=("engine.compile=model",),
        predicted=(1.01, 1.02),
    ),
    Variant(
        what="patches by a matrix product",
        model="L16",
        overrides=("engine.patch_embedding=matmul",),
        predicted=(1.01, 1.02),
    ),
    Variant(what="uncompiled", model="L16", overrides=("engine.compile=false",)),
    Variant(what="half the batch", model="L16", batch_share=0.5),
    Variant(
        what="activations recomputed",
        model="L16",
        overrides=("engine.activation_checkpointing=true",),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A shipped recipe on synthetic batches, with its own options and micro-batch."""

    config: str
    overrides: tuple[str, ...] = ()


RECIPES = (
    Recipe(config="vit_l16"),
    Recipe(config="vit_h14"),
    Recipe(config="vit_b16"),
    Recipe(config="vit_l16", overrides=("data.mixing.mixup_alpha=0.2",)),
    Recipe(config="vit_l16", overrides=("model.dropout=0.0",)),
    Recipe(config="vit_l16", overrides=("model.num_classes=1000",)),
)


def value_at(values: dict[str, Any], path: tuple[str, ...]) -> float | None:
    """The number at a path of nested dicts; None where there is none."""
    found: Any = values
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return float(found) if isinstance(found, int | float) else None
