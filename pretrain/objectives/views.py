"""What objectives that compare views of an image share: which views they take, and their costs.

A view whose name starts with `local` is a local one, smaller or of less of the image; all others
are global ones, of the model's image size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from vitscale.config.errors import UserError
from vitscale.config.section import Problems
from vitscale.models.costs import ACTIVATION_SCALE
from vitscale.objectives.objective import Objective

if TYPE_CHECKING:
    import torch

    from vitscale.data.loader import Batch
    from vitscale.runs.training import TrainingRun

# Of the information in an answer, healthy runs keep three times as much.
COLLAPSED = 0.01
# Healthy runs are below a half after a tenth of their steps.
NOT_NORMAL = 0.9


class ViewObjective(Objective):
    """An objective without labels that compares views of the images of a global batch."""

    needs_labels = False
    trains_classifier = False
    reads_views = True
    couples = True
    takes_local: ClassVar[bool] = True
    """Whether it takes local views, beside two global ones or more; without, it takes two."""

    def problems(self, run: TrainingRun) -> Problems:
        yield from super().problems(run)
        name = self.settings.name
        image_size = run.model.image_size
        num_global = self._count(is_local=False)
        num_local = self._count(is_local=True)
        sizes = {"global": {image_size}, "local": set()}
        for view in self.views:
            sizes[_kind(view)].add(view.image_size or image_size)

        # Two global views at least, of which one is compared with the other.
        example = "set data.views=[{name: global, count: 2}]"
        if num_global < 2 or (not self.takes_local and num_global + num_local > 2):
            yield (
                "data.views",
                f"{name} compares two global views of an image, not {num_global}, "
                f"and {num_local} local ones; {example}",
            )
        if len(sizes["global"]) > 1:
            yield (
                "data.views",
                f"global views have the model's {image_size} px, not {sorted(sizes['global'])}; "
                "remove their image_size",
            )
        if len(sizes["local"]) > 1:
            yield "data.views", "local views have one image_size; make them alike"
        for size in sizes["local"]:
            if size > image_size:
                yield (
                    "data.views",
                    f"a local view of {size} px is larger than the global ones of {image_size} px; "
                    "set its image_size",
                )

        # The model's own report comes first: with its problems there are no patches.
        if any(run.model.problems()):
            return
        arch: Any = run.model.resolved(num_classes=0)
        patch_size = getattr(arch, "patch_size", 1)
        for size in sizes["local"]:
            if size % patch_size:
                yield (
                    "data.views",
                    f"{size} px is no multiple of the patch size {patch_size}; set image_size",
                )

    def extend_model(self, model: Any, arch: Any) -> None:
        """Raises UserError for a model that does not take views of another size."""
        import torch

        # Models of timm have no common word for it, and only the model itself knows.
        own = arch.image_size
        model.eval()
        for side in {view.image_size or own for view in self.views} - {own}:
            try:
                with torch.no_grad():
                    model(torch.zeros(1, 3, side, side), output="features")
            except Exception as error:  # timm's models raise any kind
                raise UserError(
                    f"the model takes no views of {side} px ({error})",
                    where="data.views",
                    next_step="set model.arguments={dynamic_img_size: true} where the model has "
                    "it, or remove the image_size of local views",
                ) from None
        model.train()

    def _count(self, *, is_local: bool) -> int:
        return sum(
            view.count for view in self.views if (_kind(view) == "local") == is_local
        )

    def warning(self, means: Mapping[str, float]) -> str | None:
        # Answers that are the same for all images, or features that are.
        information = means.get("train/mean_entropy", 1.0)
        information -= means.get("train/teacher_entropy", 0.0)
        is_spread = min(information, means.get("train/spread", 1.0)) > COLLAPSED
        if is_spread and means.get("train/sigreg_share", 0.0) < NOT_NORMAL:
            return None
        return "collapsing: all images look alike to the model; docs/methods.md says what helps"

    # ---- costs: all views pass through the model, each at its size, and then through a head

    def head_layers(self, arch: Any) -> list[tuple[int, int, int]]:
        """Inputs and outputs of each dense layer of the head, and its trained values beside."""
        raise NotImplementedError

    def head_weights(self, arch: Any) -> int:
        """Values of the matrices of the head, and so its multiply-adds for each view."""
        return sum(rows * columns for rows, columns, _ in self.head_layers(arch))

    def num_parameters(self, arch: Any) -> int:
        others = sum(others for _, _, others in self.head_layers(arch))
        return super().num_parameters(arch) + self.head_weights(arch) + others

    def _over_views(self, count: Callable[[Any], int], arch: Any) -> int:
        """The sum of `count` over all views, each at its size."""
        total = 0
        for view in self.views:
            size = view.image_size or arch.image_size
            total += view.count * count(arch.model_copy(update={"image_size": size}))
        return total

    def train_flops_per_image(self, arch: Any) -> int:
        # A multiply-add is two operations, and the backward pass costs twice the forward pass.
        head = 3 * 2 * self.head_weights(arch)
        model = super().train_flops_per_image
        return self._over_views(lambda sized: model(sized) + head, arch)

    def activation_bytes_per_image(self, arch: Any, **options: Any) -> int:
        head = self.head_bytes(arch, precision=options["precision"])
        model = super().activation_bytes_per_image
        return self._over_views(lambda sized: model(sized, **options) + head, arch)

    def head_bytes(self, arch: Any, *, precision: str) -> int:
        """Activations that the head keeps of one row."""
        # The input of each layer, and that of the activation function before it.
        inputs = [rows for rows, _, _ in self.head_layers(arch)]
        num_values = inputs[0] + 2 * sum(inputs[1:])
        return 2 * ACTIVATION_SCALE[precision] * num_values


def _kind(view: Any) -> str:
    if view.name.startswith("local"):
        return "local"
    return "global"


def split_by_kind(batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The global views of a batch and its local ones, uint8 [B, count, 3, side, side] each."""
    import torch

    kinds: dict[str, list[torch.Tensor]] = {"global": [], "local": []}
    for name, view in batch.views.items():
        kind = "local" if name.startswith("local") else "global"
        kinds[kind].append(view)
    local = None
    if kinds["local"]:
        local = torch.cat(kinds["local"], dim=1)
    return torch.cat(kinds["global"], dim=1), local
