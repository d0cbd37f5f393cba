"""The model card of an exported folder: what it is, how to load it, results, configuration."""

from __future__ import annotations

from collections.abc import Iterator
from math import floor

import yaml

from finetune.exporting.format import Format
from finetune.loading.loaded_model import LoadedModel
from vitscale.evaluation.models.trained_model import TrainedModel
from vitscale.models.vit.architecture import ViTArchitecture
from vitscale.tracking.journal import JOURNAL_NAME, read_rows
from vitscale.tracking.run_facts import redact_yaml, shared_config

CARD_NAME = "README.md"
RESULTS = "val/"
MAX_NAMES = 20


def model_card(form: Format, loaded: LoadedModel, *, checked: str) -> str:
    """Markdown. The licence is left to whoever publishes the model."""
    sections = [
        _front_matter(form, loaded) + f"# {_title(loaded)}",
        "\n".join(_facts(loaded)),
        f"## Load it\n```python\n{form.usage(loaded)}\n```",
        *form.notes(loaded),
        f"Written by vitscale; {checked}.",
        "## Images\n" + "\n".join(_images(loaded)),
    ]
    if loaded.trained is not None:
        sections += _training(loaded.trained, step=loaded.step or 0)
    sections.append(
        "## Licence\nNot stated. Name the licence of the weights here before you publish them."
    )
    return "\n\n".join(sections) + "\n"


def _front_matter(form: Format, loaded: LoadedModel) -> str:
    """What the Hugging Face Hub reads of a card."""
    task = "image-classification" if loaded.num_classes else "image-feature-extraction"
    facts = {
        "library_name": form.hub_library,
        "pipeline_tag": task,
        "tags": ["vitscale", loaded.arch.name],
    }
    return f"---\n{yaml.safe_dump(facts, sort_keys=False)}---\n"


def _title(loaded: LoadedModel) -> str:
    named = loaded.trained.config.get("name") if loaded.trained is not None else None
    return str(named or loaded.settings.title)


def _facts(loaded: LoadedModel) -> Iterator[str]:
    number = sum(parameter.numel() for parameter in loaded.network.parameters())
    yield f"- model: {loaded.settings.title}, {number:,} parameters: {_architecture(loaded)}"
    of = ", their average over training" if loaded.averaged else ""
    yield f"- weights from: {loaded.source}{of}"
    names = loaded.classes or ()
    shown = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
    yield f"- classes: {loaded.num_classes or 'no head'}{f' ({shown})' if shown else ''}"


def _architecture(loaded: LoadedModel) -> str:
    arch = loaded.arch
    if not isinstance(arch, ViTArchitecture):
        return arch.summary
    return (
        f"{arch.depth} blocks of width {arch.width:,} with {arch.num_heads} heads, patches of "
        f"{arch.patch_size} px, {arch.summary}"
    )


def _images(loaded: LoadedModel) -> Iterator[str]:
    how = loaded.preprocessing
    shown = f"{how.image_size} x {how.image_size} px"
    if how.eval_resize == "squash":
        yield f"- the whole image is resized to {shown} ({how.eval_interpolation})"
    else:
        larger = floor(how.image_size / how.eval_crop_fraction)
        what = f"the short side is resized to {larger} px ({how.eval_interpolation})"
        yield f"- {what}, and the centre {shown} are cut out"
    yield f"- RGB, (x / 255 - mean) / std with mean {list(how.mean)} and std {list(how.std)}"
    if not how.eval_antialias and how.eval_interpolation != "area":
        yield (
            "- the training run evaluated without antialiasing, as tf.image.resize; Pillow always "
            "antialiases, so results on large images differ a little from the run's"
        )


def _training(trained: TrainedModel, *, step: int) -> Iterator[str]:
    described = trained.description
    yield (
        f"## Training\n"
        f"- steps: {step:,}\n"
        f"- fingerprint of the training data: {described.get('data_fingerprint')}\n"
        f"- SHA-256 of the label map: {described.get('label_map_sha256')}"
    )
    results = _results(trained, step=step)
    if results:
        rows = "\n".join(f"| {name} | {value:.4f} |" for name, value in sorted(results.items()))
        yield (
            f"## Results\nOf the run, on its validation split at its own image size; `val/ema_` is "
            f"of the average of the weights.\n\n| Metric | Value |\n|---|---|\n{rows}"
        )
    text = redact_yaml(yaml.safe_dump(shared_config(trained.config), sort_keys=False)).rstrip()
    yield f"## Configuration\n<details>\n\n```yaml\n{text}\n```\n\n</details>"


def _results(trained: TrainedModel, *, step: int) -> dict[str, float]:
    """The last value of each metric of an evaluation, at or before the step."""
    found: dict[str, float] = {}
    try:
        for row, _ in read_rows(trained.run_folder / JOURNAL_NAME):
            if row.step <= step:
                found |= {k: v for k, v in row.metrics.items() if k.startswith(RESULTS)}
    except OSError:
        return {}
    return found
