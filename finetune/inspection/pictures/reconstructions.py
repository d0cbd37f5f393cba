"""What a masked autoencoder, or a model of masked patch prediction, predicts of hidden patches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from finetune.inspection.subject import Inspected
from vitscale.config.errors import UserError
from vitscale.evaluation.models.trained_model import starting_weights
from vitscale.images.sheet import sheet
from vitscale.models.objectives.reconstructions import RECONSTRUCTIONS, reconstruction_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PREFIX = "objective."


def missing(subject: Inspected) -> str | None:
    trained = subject.loaded.trained
    if trained is None:
        return "a weight file has no module that predicts patches"
    name = _objective(subject).get("name", "supervised")
    if name not in RECONSTRUCTIONS:
        return f"the objective {name} predicts no patches"
    return None


def _objective(subject: Inspected) -> dict[str, Any]:
    """The section `objective` of the run's configuration."""
    trained = subject.loaded.trained
    section = {} if trained is None else trained.config.get("objective")
    return section if isinstance(section, dict) else {}


def draw(subject: Inspected) -> Figure:
    loaded = subject.loaded
    assert loaded.trained is not None and loaded.checkpoint is not None
    values = _objective(subject)
    kind = RECONSTRUCTIONS[values["name"]]
    where = str(loaded.checkpoint.folder)
    arch: Any = loaded.arch
    try:
        settings = kind.Settings.model_validate(values)
        module = kind.build(settings, arch)
        weights = starting_weights(loaded.checkpoint, subject.run.init_weights)
        module.load_state_dict(
            {
                name.removeprefix(PREFIX): value
                for name, value in weights.items()
                if name.startswith(PREFIX)
            }
        )
    except (ValidationError, RuntimeError) as error:
        raise UserError(
            f"does not hold the module of objective {values['name']} ({type(error).__name__})",
            where=where,
            next_step="choose other pictures, or another checkpoint of the run",
        ) from None
    network: Any = loaded.network
    network.objective = module.eval().requires_grad_(False).to(subject.device)
    images = subject.images.sheet(subject.run.num_images)
    rows = reconstruction_rows(
        subject.model,
        images.pixels_B3SS.to(subject.device),
        settings=settings,
        arch=arch,
        seed=int(loaded.trained.config.get("seed", 0)),
        mean=loaded.preprocessing.mean,
        std=loaded.preprocessing.std,
    )
    figure = sheet(rows)
    figure.suptitle(
        f"{subject.name}\nPatches predicted by {values['name']}", fontsize=9, parse_math=False
    )
    return figure
