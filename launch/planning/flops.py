"""Print parameters, FLOPs per training image and images per second of models.

    python -m launch.planning.flops                     all sizes at 224 px
    python -m launch.planning.flops B/16 L/16 --image-size 224 384 --peak-tflops 989 --mfu 0.5
    python -m launch.planning.flops B/16 R50+B/16 R50x1

Computed by formula (`vitscale.models.costs`). Needs no torch.
"""

from __future__ import annotations

import argparse

from vitscale.config.errors import UserError, UserErrors, run_script
from vitscale.models.costs import num_parameters, train_flops_per_image
from vitscale.models.interface.settings import ModelSettingsBase
from vitscale.models.registry import MODELS

PRESETS = ("Ti/16", "S/32", "S/16", "B/32", "B/16", "L/32", "L/16", "L/14", "H/14", "g/14")
HEADINGS = ("model", "px", "tokens", "M parameters", "GFLOPs/image", "images/s")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Parameters and FLOPs per training image of models, by formula."
    )
    parser.add_argument(
        "presets",
        nargs="*",
        metavar="PRESET",
        help=f"such as L/16, R50+B/16, R50x1; default: {PRESETS}",
    )
    parser.add_argument("--image-size", nargs="+", type=int, default=[224], metavar="PX")
    parser.add_argument("--num-classes", type=int, default=1000, metavar="N")
    parser.add_argument("--pool", choices=("cls", "gap"), default="cls")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        default=989.0,
        metavar="T",
        help="peak rate; default 989: H100 and H200, dense bf16, datasheet",
    )
    parser.add_argument("--mfu", type=float, default=0.5, metavar="SHARE", help="default 0.5")
    return parser.parse_args()


def settings_of(preset: str, *, image_size: int, pool: str) -> ModelSettingsBase:
    """Of the first family that has the preset; a ViT's, with its problems, if none has."""
    values = {"preset": preset, "image_size": image_size}
    candidates = [family.Settings.model_validate(values) for family in MODELS.values()]
    known = (each for each in candidates if "model.preset" not in dict(each.problems()))
    model = next(known, candidates[0])
    has_pool = "pool" in type(model).model_fields
    return model.model_copy(update={"pool": pool}) if has_pool else model


def models(arguments: argparse.Namespace) -> list[ModelSettingsBase]:
    """The requested models. Raises UserErrors that name all invalid ones."""
    requested = [
        settings_of(preset, image_size=size, pool=arguments.pool)
        for preset in arguments.presets or PRESETS
        for size in arguments.image_size
        # Presets of the default list are left out if the size does not fit.
        if arguments.presets or size % int(preset.split("/")[1]) == 0
    ]
    errors = [
        UserError(text, where=f"{model.preset} at {model.image_size} px ({key})")
        for model in requested
        for key, text in model.problems()
    ]
    if errors:
        raise UserErrors(errors)
    return requested


def row(model: ModelSettingsBase, arguments: argparse.Namespace) -> tuple[str, ...]:
    arch = model.architecture(num_classes=arguments.num_classes)
    flops = train_flops_per_image(arch)
    speed = arguments.peak_tflops * 1e12 * arguments.mfu / flops
    numbers = (f"{num_parameters(arch) / 1e6:,.1f}", f"{flops / 1e9:,.1f}", f"{speed:,.0f}")
    tokens = str(getattr(arch, "num_tokens", "-"))  # a ResNet has none
    return (str(model.preset), str(model.image_size), tokens, *numbers)


def main() -> None:
    arguments = parse_arguments()
    if min(*arguments.image_size, arguments.num_classes, arguments.peak_tflops, arguments.mfu) <= 0:
        raise UserError("sizes, classes, --peak-tflops and --mfu must be above 0")
    rows = [HEADINGS, *(row(model, arguments) for model in models(arguments))]
    widths = [max(len(line[column]) for line in rows) for column in range(len(HEADINGS))]
    for line in rows:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))
    print(
        f"\nForward and backward pass; two FLOPs per multiply-add; without norms, softmax, GELU. "
        f"images/s: one device at {arguments.mfu:g} of {arguments.peak_tflops:g} TFLOP/s."
    )


if __name__ == "__main__":
    run_script(main)
