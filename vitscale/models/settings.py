"""Settings of a model. They are its architecture, once `resolved` has put in every number.

Needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from vitscale.config.section import NamedSection, Problems

if TYPE_CHECKING:
    Number = int
else:
    Number = Annotated[int | None, Field(gt=0)]
"""A whole number that `resolved` puts in where the file has null."""
NULL: Any = None


class Architecture(NamedSection):
    """A family and its size. Concrete types narrow `name`."""

    image_size: PositiveInt = 224
    """Pixels a side."""
    num_classes: Number = NULL
    """null: as many as the shards' label map holds."""
    head_bias: float = 0.0
    """Initial bias of the head; -10 with the summed sigmoid over 21k classes (AugReg)."""
    head_std: float = Field(default=0.0, ge=0)
    """Spread of the head's initial weights; 0 in the ViT papers, 2e-5 in MAE's fine-tuning."""

    @property
    def is_complete(self) -> bool:
        """Whether the settings say which model it is, but for the number of its classes."""
        return True

    @property
    def title(self) -> str:
        """Family and size in words."""
        raise NotImplementedError

    @property
    def summary(self) -> str:
        """The size of what the model computes on, in words, such as `197 tokens`."""
        raise NotImplementedError

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of the position embedding; (1, 1) where there is none."""
        return (1, 1)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before those of the grid."""
        return 0

    @property
    def feature_width(self) -> int:
        """Channels of the features that the head sees."""
        raise NotImplementedError

    def resolved(self, *, num_classes: int) -> Self:
        """Put in every number; `num_classes` (0: no head) counts only where it is null."""
        return self.model_copy(update={"num_classes": self.num_classes or num_classes})

    def description(self) -> dict[str, Any]:
        """Return what all checkpoints of one model must agree on, as JSON values."""
        raise NotImplementedError


# name: (width, depth, heads, MLP width). Ti, S: Touvron et al. 2021 (DeiT), table 1; B, L, H:
# Dosovitskiy et al. 2021, table 1; g: Zhai et al. 2022, table 2.
SIZES = {
    "Ti": (192, 12, 3, 768),
    "S": (384, 12, 6, 1536),
    "B": (768, 12, 12, 3072),
    "L": (1024, 24, 16, 4096),
    "H": (1280, 32, 16, 5120),
    "g": (1408, 40, 16, 6144),
}
# Pools that do not read the class token.
PATCH_POOLS = ("gap", "map")
NUMBERS = ("width", "depth", "num_heads", "mlp_width", "patch_size")
# Settings that decide the shapes and the order of a checkpoint's tensors, beside those that
# `description` computes.
STRUCTURE = (
    "name",
    "image_size",
    "num_classes",
    *NUMBERS,
    "head_width",
    "mlp",
    "pool",
    "pool_norm",
    "positions",
    "num_registers",
    "distillation_token",
    "representation_layer",
)


class ViTSettings(Architecture):
    """A Vision Transformer, and how its weights start."""

    patch_size: Number = NULL
    """Pixels a side of a patch."""
    width: Number = NULL
    """Channels of a token."""
    depth: Number = NULL
    """Number of blocks."""
    num_heads: Number = NULL
    """Attention heads of a block; they divide `width` unless `head_width` is given."""
    head_width: PositiveInt | None = None
    """Channels of an attention head; null: `width` / `num_heads`."""
    mlp_width: Number = NULL
    """Hidden channels of a block's MLP."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """swiglu: `mlp_width` gates of SiLU times as many values (DINOv2's g/14); `gelu` has no effect.
    Shazeer 2020."""
    pool: Literal["cls", "gap", "map", "cls_mean"] = "cls"
    """Input of the head: the class token; the mean of the patch tokens; map: what one learned
    query attends to in them (Zhai et al. 2022, sec. 3.3); cls_mean: both of the first (DINOv2)."""
    class_token: bool | None = None
    """null: where the pool reads it. true with pool=gap or map: the class token takes part in
    attention, but no head reads it (MAE's fine-tuning)."""
    pool_norm: bool = False
    """With pool=gap: one norm after the mean instead of before it, named fc_norm (MAE, BEiT)."""
    num_registers: NonNegativeInt = 0
    """Learned tokens after the class token; no head reads them. Darcet et al. 2024."""
    distillation_token: bool = False
    """A second token, with a position and a classifier of its own, for objective.name=distillation.
    At test the logits of both classifiers are averaged. Touvron et al. 2021 (DeiT), sec. 3."""
    positions: Literal["learned", "sincos2d", "sincos2d_mae"] = "learned"
    """sincos2d: fixed, on patches only; Beyer et al. 2022 (Better plain ViT baselines).
    sincos2d_mae: the same with MAE's frequencies; He et al. 2022."""
    weight_init: Literal["vit", "deit", "mae"] = "vit"
    """vit: Flax's, Xavier-uniform. deit: N(0, 0.02), the class token too (DeiT, DeiT-III). mae:
    Xavier-uniform of fused Q, K, V and of the flattened patch kernel, class token N(0, 0.02)."""
    position_init: Literal["vit", "big_vision"] = "vit"
    """Learned positions start at N(0, 0.02) (vit) or N(0, 1 / sqrt(width)) (big_vision)."""
    class_position: bool | None = None
    """Give the class token a position of its own. null: yes with learned positions and no registers
    (ViT, AugReg). DeiT-III, big_vision and DINOv2 with registers: false."""
    representation_layer: bool = False
    """A tanh layer before the head; dropped on transfer. Dosovitskiy et al. 2021, sec. 3.1."""
    gelu: Literal["tanh", "erf"] = "tanh"
    """Flax, hence the papers' weights, use the tanh approximation; timm and PyTorch use erf."""
    layer_norm_eps: PositiveFloat = 1e-6
    """Flax and timm 1e-6, PyTorch 1e-5."""
    layer_scale: PositiveFloat | None = None
    """Start of a learned factor per channel on every branch. Touvron et al. 2022 (DeiT-III)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """After position embeddings and every dense layer except QKV."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """On attention weights; 0 in the papers."""
    drop_path: float = Field(default=0.0, ge=0, lt=1)
    """Stochastic depth of the last block; grows linearly from 0 at the first."""
    drop_path_by_depth: Literal["linear", "constant"] = "linear"
    """constant: every block has the rate of the last, as in DeiT-III."""

    name: Literal["vit"] = "vit"
    """The Vision Transformer of Dosovitskiy et al. 2021 and its later forms."""
    preset: str | None = None
    """SIZE/PATCH as in the papers, for example L/16. `patch_size`, `width`, `depth`, `num_heads`
    and `mlp_width` override it."""

    @property
    def title(self) -> str:
        return f"vit {self.preset}" if self.preset else "vit"

    def preset_numbers(self) -> dict[str, int]:
        """The five numbers of the preset; empty for null and for unreadable names."""
        # The name is validated elsewhere, so a wrong one has no numbers here.
        size, _, patch = (self.preset or "").partition("/")
        if size not in SIZES or not patch.isdigit() or int(patch) == 0:
            return {}
        return dict(zip(NUMBERS, (*SIZES[size], int(patch)), strict=True))

    def numbers(self) -> dict[str, int]:
        """Width, depth, heads, MLP width and patch size, as far as they are known."""
        chosen = {}
        for name in NUMBERS:
            if getattr(self, name) is not None:
                chosen[name] = getattr(self, name)
        return self.preset_numbers() | chosen

    @property
    def is_complete(self) -> bool:
        return len(self.numbers()) == len(NUMBERS)

    def resolved(self, *, num_classes: int) -> Self:
        settings = super().resolved(num_classes=num_classes)
        return settings.model_copy(update=self.numbers())

    def description(self) -> dict[str, Any]:
        # The preset is left out: its name and its numbers mean the same model.
        return {key: getattr(self, key) for key in STRUCTURE} | {
            "class_position": self.has_class_position,
            "layer_scale": self.layer_scale is not None,
            "pooled_class_token": self.pool in PATCH_POOLS and self.has_class_token,
        }

    @property
    def grid(self) -> tuple[int, int]:
        side = self.image_size // self.patch_size
        return (side, side)

    @property
    def patch_values(self) -> int:
        """Values of a patch, from which its token is made."""
        return 3 * self.patch_size**2

    @property
    def attention_width(self) -> int:
        """Channels of all heads together, in each of Q, K and V."""
        return self.num_heads * (self.head_width or self.width // self.num_heads)

    @property
    def mlp_ratio(self) -> float:
        """`mlp_width` / `width`, with which timm's rounding down gives `mlp_width` again."""
        # timm takes a ratio, multiplies and rounds down, which may lose a channel.
        ratio = self.mlp_width / self.width
        if int(self.width * ratio) != self.mlp_width:
            ratio += 0.25 / self.width
        return ratio

    @property
    def has_class_token(self) -> bool:
        # A pool of patches needs no class token, but may have one beside them.
        return self.pool not in PATCH_POOLS or bool(self.class_token)

    @property
    def has_class_position(self) -> bool:
        """True if a class token has a position of its own."""
        if self.class_position is not None:
            return self.class_position
        # Models with registers, and those with fixed positions, are published without one.
        return self.positions == "learned" and self.num_registers == 0

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def num_prefix_tokens(self) -> int:
        """Class token, distillation token and registers, in this order before the patches."""
        num_tokens = self.num_registers
        if self.has_class_token:
            num_tokens += 1
        if self.distillation_token:
            num_tokens += 1
        return num_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_patches + self.num_prefix_tokens

    @property
    def num_position_rows(self) -> int:
        """Rows of the learned position embedding; 0 when positions are fixed."""
        if self.positions != "learned":
            return 0

        # Registers have no positions.
        num_rows = self.num_patches
        if self.has_class_token and self.has_class_position:
            num_rows += 1
        if self.distillation_token:
            num_rows += 1
        return num_rows

    @property
    def num_classifiers(self) -> int:
        return 2 if self.distillation_token else 1

    @property
    def feature_width(self) -> int:
        return 2 * self.width if self.pool == "cls_mean" else self.width

    @property
    def summary(self) -> str:
        return f"{self.num_tokens} tokens"

    def problems(self) -> Problems:
        if self.preset is not None and not self.preset_numbers():
            yield (
                "model.preset",
                f"{self.preset!r} is not SIZE/PATCH with SIZE one of {', '.join(SIZES)}, "
                "for example L/16",
            )
            return

        # The rest needs every number.
        numbers = self.numbers()
        missing = sorted(set(NUMBERS) - set(numbers))
        if missing:
            yield (
                "model",
                f"without a preset these are needed too: {', '.join(missing)}",
            )
            return
        yield from self._width_problems(numbers)
        yield from self._token_problems()
        yield from self._grid_problems(numbers["patch_size"])

    def _width_problems(self, numbers: dict[str, int]) -> Problems:
        """Numbers that do not divide the width."""
        width = numbers["width"]
        heads = numbers["num_heads"]
        if width % heads and self.head_width is None:
            yield (
                "model.num_heads",
                f"{heads} heads do not divide width {width} (remainder {width % heads}); change "
                "one of them, or set model.head_width",
            )

        # A quarter of the channels each: sine and cosine, of x and of y.
        if self.positions != "learned" and (width % 4 or width < 8):
            yield (
                "model.positions",
                f"{self.positions} needs a width of 8 or more that 4 divides, not {width}; "
                "set positions=learned or another width",
            )

    def _grid_problems(self, patch: int) -> Problems:
        """Images that are no whole number of patches."""
        side = self.image_size
        if side < patch:
            yield (
                "model.image_size",
                f"{side} px hold no patch of {patch} px; give at least {patch}",
            )
        elif side % patch:
            below = side // patch * patch
            yield (
                "model.image_size",
                f"{side} px is not a multiple of the {patch} px patch (remainder {side % patch}); "
                f"nearest: {below} or {below + patch}",
            )

    def _token_problems(self) -> Problems:
        """Tokens and pools that do not go together."""
        if self.pool not in PATCH_POOLS and self.class_token is False:
            yield (
                "model.class_token",
                f"false, but pool={self.pool} reads it; set it to null, or pool=gap",
            )
        if self.pool != "gap" and self.pool_norm:
            yield ("model.pool_norm", "is for pool=gap; set it to false, or pool=gap")
        if self.pool == "cls_mean" and self.representation_layer:
            yield (
                "model.representation_layer",
                "is not for pool=cls_mean; set it to false",
            )

        # No published model with registers or fixed positions has one.
        can_have_position = (
            self.has_class_token
            and self.positions == "learned"
            and not self.num_registers
        )
        if self.class_position and not can_have_position:
            yield (
                "model.class_position",
                "is for a class token with learned positions and without registers; set it to "
                "null or false",
            )

        # DeiT has class token, distillation token and patches, all with positions, two heads.
        if not self.distillation_token:
            return
        needed = {
            "pool": "cls",
            "positions": "learned",
            "num_registers": 0,
            "representation_layer": False,
        }
        for key, value in needed.items():
            if getattr(self, key) != value:
                shown = str(value).lower()
                yield (
                    f"model.{key}",
                    f"a distillation token needs {shown}; set it to {shown}",
                )
        if self.class_position is False:
            yield (
                "model.class_position",
                "a distillation token needs true; set it to null",
            )


# Arguments of timm.create_model that have a setting, or that would load or download weights.
SETTINGS = {"num_classes": "model.num_classes", "img_size": "model.image_size"}
LOADING = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
)


class TimmSettings(Architecture):
    """A model of timm. Its costs are known when it is built."""

    name: Literal["timm"] = "timm"
    """Any model of timm without BatchNorm, whose statistics differ between ranks. timm draws its
    initial weights but those of the classifier, and timm's `group_matcher` defines its layers."""
    model: str
    """timm's name, such as vit_base_r50_s16_224; timm.list_models() lists them."""
    arguments: dict[str, Any] = {}
    """Further arguments of timm.create_model, such as {drop_path_rate: 0.1}."""

    def __hash__(self) -> int:
        # The arguments are a dict, which has no hash of its own.
        return hash(str(self.description()))

    @property
    def title(self) -> str:
        return f"timm {self.model}"

    @property
    def summary(self) -> str:
        return f"timm's {self.model}"

    def description(self) -> dict[str, Any]:
        keys = ("name", "image_size", "num_classes", "model", "arguments")
        return {key: getattr(self, key) for key in keys}

    def problems(self) -> Problems:
        # Two places for one setting could contradict each other.
        for name in self.arguments:
            if name in SETTINGS:
                yield (
                    "model.arguments",
                    f"{name} has a key of its own: set {SETTINGS[name]}",
                )
            if name in LOADING:
                yield (
                    "model.arguments",
                    f"{name} loads weights; remove it, and set init",
                )
