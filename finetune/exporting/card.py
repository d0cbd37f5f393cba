"""The model card of an exported folder: what it is, how to load it, results, configuration."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

import yaml

from finetune.exporting.format import Format
from vitscale.config.redaction import redact, shared_yaml
from vitscale.evaluation.trained_model import SourceRun, TrainedModel
from vitscale.models.settings import ViTSettings
from vitscale.models.weights.hub import HUB
from vitscale.tracking.journal import JOURNAL_NAME, read_rows

MAX_NAMES = 20


def model_card(
    form: Format, model: TrainedModel, *, checked: str, repository: str | None
) -> str:
    """Return the card as Markdown. repository: OWNER/NAME to load the model from, if any."""
    task = "image-classification" if model.num_classes else "image-feature-extraction"
    title = model.arch.title
    if model.run is not None:
        title = model.run.config.get("name") or title

    # The Hugging Face Hub chooses the code and the widget of the page by these keys.
    front = {
        "library_name": form.hub_library,
        "pipeline_tag": task,
        "tags": ["vitscale", model.arch.name],
    }
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n# {title}",
        "\n".join(_facts(model)),
        f"## Load it\n```python\n{_usage(form, model, repository)}\n```",
        *form.notes(model),
        f"Written by vitscale; {checked}.",
        "## Images\n" + "\n".join(_images(model)),
    ]
    if model.run is not None:
        sections += _training(model.run)

    # Only the owner of the weights can state one.
    sections.append(
        "## Licence\nNot stated. Name the licence of the weights here before you publish them."
    )
    return "\n\n".join(sections) + "\n"


def _usage(form: Format, model: TrainedModel, repository: str | None) -> str:
    usage = form.usage(model)
    if repository is None:
        return usage
    # A folder here and a repository have other schemes in timm and in `load_model`.
    usage = usage.replace("local-dir:FOLDER", f"hf-hub:{repository}")
    usage = usage.replace('load_model("FOLDER', f'load_model("{HUB}{repository}')
    return usage.replace('"FOLDER"', f'"{repository}"')


def _facts(model: TrainedModel) -> Iterator[str]:
    arch = model.arch
    sizes = arch.summary
    if isinstance(arch, ViTSettings):
        sizes = (
            f"{arch.depth} blocks of width {arch.width:,} with {arch.num_heads} heads, patches of "
            f"{arch.patch_size} px, {sizes}"
        )
    num_values = sum(values.numel() for values in model.network.parameters())
    yield f"- model: {arch.title}, {num_values:,} parameters: {sizes}"
    yield f"- weights from: {model.source}"

    # The names of 21,000 classes would bury the rest of the card.
    classes = str(model.num_classes or "no head")
    if model.classes:
        names = ", ".join(model.classes[:MAX_NAMES])
        if len(model.classes) > MAX_NAMES:
            names += ", ..."
        classes += f" ({names})"
    yield f"- classes: {classes}"


def _images(model: TrainedModel) -> Iterator[str]:
    pixels = model.preprocessing

    # Users of libraries that do not read the preprocessing need it in words.
    size = f"{pixels.image_size} x {pixels.image_size} px"
    if pixels.eval_resize == "squash":
        yield f"- the whole image is resized to {size} ({pixels.eval_interpolation})"
    else:
        # The crop is a fraction of the resized side, and libraries round that side down.
        larger = f"{floor(pixels.image_size / pixels.eval_crop_fraction)} px"
        side = f"the short side is resized to {larger}"
        if pixels.eval_resize.startswith("squash_crop"):
            side = f"the whole image is resized to a square of {larger}"
        yield f"- {side} ({pixels.eval_interpolation}), and the centre {size} cut out"
    yield (
        f"- RGB, (x / 255 - mean) / std with mean {list(pixels.mean)} and std {list(pixels.std)}"
    )

    # Nobody would suspect the resize of a small difference in accuracy.
    if not pixels.eval_antialias and pixels.eval_interpolation != "area":
        yield (
            "- the training run evaluated without antialiasing, as tf.image.resize; Pillow always "
            "antialiases, so results on large images differ a little from the run's"
        )


def _training(run: SourceRun) -> Iterator[str]:
    """Yield sections on the training run, with each metric's last value up to the checkpoint."""
    step = run.checkpoint.step
    description = run.checkpoint.description
    yield (
        f"## Training\n"
        f"- data: {redact(str(run.config['data']['path']))}\n"
        f"- steps: {step:,}\n"
        f"- fingerprint of the training data: {description.get('data_fingerprint')}\n"
        f"- SHA-256 of the label map: {description.get('label_map_sha256')}"
    )

    # Later rows are of weights that this folder does not have.
    results: dict[str, float] = {}
    path = run.folder / JOURNAL_NAME
    if path.exists():
        for row, _ in read_rows(path):
            if row.step > step:
                continue
            for name, value in row.metrics.items():
                if name.startswith("val/"):
                    results[name] = value
    if results:
        rows = "\n".join(
            f"| {name} | {value:.4f} |" for name, value in sorted(results.items())
        )
        yield (
            f"## Results\nOf the run, on its validation split at its own image size; `val/ema_` is "
            f"of the average of the weights.\n\n| Metric | Value |\n|---|---|\n{rows}"
        )

    # The card is for strangers: passwords and tokens are taken out of it.
    text = shared_yaml(run.config).rstrip()
    yield f"## Configuration\n<details>\n\n```yaml\n{text}\n```\n\n</details>"
