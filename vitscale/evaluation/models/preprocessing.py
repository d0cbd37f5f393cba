"""How images become the input of a trained model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vitscale.data.settings import DataSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """The evaluation's resize, crop and normalisation; fields are named as in `DataSettings`."""

    image_size: int
    """Pixels a side of the model's input, or (rows, columns)."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    eval_resize: str = "squash"
    eval_crop_fraction: float = 0.875
    """center_crop only: image size / resized short side."""
    eval_interpolation: str = "bilinear"
    eval_antialias: bool = True

    @classmethod
    def of_run(cls, data: Mapping[str, Any], *, image_size: int) -> Preprocessing:
        """From the values of a run's section `data`, defaults for those it leaves out.

        Raises ValueError and TypeError for values of a wrong type.
        """
        default = {name: field.default for name, field in DataSettings.model_fields.items()}
        chosen = {name: data.get(name, default[name]) for name in VALUES}
        return cls(
            image_size=image_size,
            mean=_three(chosen["mean"]),
            std=_three(chosen["std"]),
            eval_resize=str(chosen["eval_resize"]),
            eval_crop_fraction=float(chosen["eval_crop_fraction"]),
            eval_interpolation=str(
                chosen["eval_interpolation"] or data.get("interpolation", default["interpolation"])
            ),
            eval_antialias=bool(chosen["eval_antialias"]),
        )

    def data_values(self) -> dict[str, Any]:
        """The same as values of `DataSettings`, which leaves the image size to the model."""
        values = asdict(self)
        del values["image_size"]
        return values


VALUES = (
    "mean",
    "std",
    "eval_resize",
    "eval_crop_fraction",
    "eval_interpolation",
    "eval_antialias",
)


def _three(values: Any) -> tuple[float, float, float]:
    red, green, blue = map(float, values)
    return (red, green, blue)


class Normalization:
    """Pixels 0..255 to (x / 255 - mean) / std, as one multiply-add on the device."""

    def __init__(
        self, *, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
    ) -> None:
        scale = [1 / (255 * s) for s in std]
        shift = [-m / s for m, s in zip(mean, std, strict=True)]
        self._scale_3HW = torch.tensor(scale, device=device).view(3, 1, 1)
        self._shift_3HW = torch.tensor(shift, device=device).view(3, 1, 1)

    def __call__(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        """uint8 or float 0..255 -> fp32."""
        return torch.addcmul(self._shift_3HW, images_B3SS.float(), self._scale_3HW)
