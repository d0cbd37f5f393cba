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
    tags = ["vitscale", model.arch.name]
    # What the Hugging Face Hub reads of a card.
    front = {"library_name": form.hub_library, "pipeline_tag": task, "tags": tags}
    title = (model.run and model.run.config.get("name")) or model.arch.title
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n# {title}",
        "\n".join(_facts(model)),
        f"## Load it\n```python\n{_usage(form, model, repository)}\n```",
        *form.notes(model),
        f"Written by vitscale; {checked}.",
        "## Images\n" + "\n".join(_images(model)),
        *(() if model.run is None else _training(model.run)),
        "## Licence\nNot stated. Name the licence of the weights here before you publish them.",
    ]
    return "\n\n".join(sections) + "\n"


def _usage(form: Format, model: TrainedModel, repository: str | None) -> str:
    usage = form.usage(model)
    for local, scheme in (
        ("local-dir:", "hf-hub:"),
        ('load_model("', f'load_model("{HUB}'),
    ):
        if repository is not None:
            usage = usage.replace(f"{local}FOLDER", f"{scheme}{repository}")
    return usage.replace('"FOLDER"', f'"{repository or "FOLDER"}"')


def _facts(model: TrainedModel) -> Iterator[str]:
    arch, number = model.arch, sum(each.numel() for each in model.network.parameters())
    sizes = arch.summary
    if isinstance(arch, ViTSettings):
        sizes = (
            f"{arch.depth} blocks of width {arch.width:,} with {arch.num_heads} heads, patches of "
            f"{arch.patch_size} px, {sizes}"
        )
    yield f"- model: {arch.title}, {number:,} parameters: {sizes}"
    yield f"- weights from: {model.source}"
    names = model.classes or ()
    shown = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
    yield f"- classes: {model.num_classes or 'no head'}{f' ({shown})' if shown else ''}"


def _images(model: TrainedModel) -> Iterator[str]:
    how = model.preprocessing
    size, kind = f"{how.image_size} x {how.image_size} px", how.eval_interpolation
    if how.eval_resize == "squash":
        yield f"- the whole image is resized to {size} ({kind})"
    else:
        larger = f"{floor(how.image_size / how.eval_crop_fraction)} px"
        side = f"the short side is resized to {larger}"
        if how.eval_resize.startswith("squash_crop"):
            side = f"the whole image is resized to a square of {larger}"
        yield f"- {side} ({kind}), and the centre {size} cut out"
    yield f"- RGB, (x / 255 - mean) / std with mean {list(how.mean)} and std {list(how.std)}"
    if not how.eval_antialias and how.eval_interpolation != "area":
        yield (
            "- the training run evaluated without antialiasing, as tf.image.resize; Pillow always "
            "antialiases, so results on large images differ a little from the run's"
        )


def _training(run: SourceRun) -> Iterator[str]:
    """Yield sections on the training run, with each metric's last value up to the checkpoint."""
    step, described = run.checkpoint.step, run.checkpoint.description
    yield (
        f"## Training\n"
        f"- data: {redact(str(run.config['data']['path']))}\n"
        f"- steps: {step:,}\n"
        f"- fingerprint of the training data: {described.get('data_fingerprint')}\n"
        f"- SHA-256 of the label map: {described.get('label_map_sha256')}"
    )
    results: dict[str, float] = {}
    path = run.folder / JOURNAL_NAME
    for row, _ in read_rows(path) if path.exists() else ():
        if row.step <= step:
            results |= {
                key: value for key, value in row.metrics.items() if key[:4] == "val/"
            }
    if results:
        rows = "\n".join(
            f"| {name} | {value:.4f} |" for name, value in sorted(results.items())
        )
        yield (
            f"## Results\nOf the run, on its validation split at its own image size; `val/ema_` is "
            f"of the average of the weights.\n\n| Metric | Value |\n|---|---|\n{rows}"
        )
    text = shared_yaml(run.config).rstrip()
    yield f"## Configuration\n<details>\n\n```yaml\n{text}\n```\n\n</details>"
