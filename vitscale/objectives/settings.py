"""The settings of a teacher, for objectives that have one and for what opens it. Needs no torch."""

from __future__ import annotations

from pydantic import PositiveInt

from vitscale.config.section import Section


class TeacherSettings(Section):
    """A model that the student learns from. It is never trained."""

    model: str | None = None
    """timm's name, for example regnety_160 (DeiT's teacher); null: `weights` is a run of ours."""
    weights: str
    """Weights of `model`: .safetensors, .npz, or a torch file of tensors alone (.pth, .pt; also
    below the key `model`, as DeiT's teacher); or a folder of timm or transformers, also hf://NAME.
    With model=null a run folder or checkpoint folder, too."""
    image_size: PositiveInt | None = None
    """Pixels a side that the teacher sees; images are resized to it. null: its own."""
