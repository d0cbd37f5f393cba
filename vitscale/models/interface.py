"""Parts shared by all families: the fp32 classifier, rounding, compiled blocks, misfits."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitscale.config.errors import UserError, not_written
from vitscale.distributed.random_numbers import GOLDEN, stream_key

# timm imports wandb where it is installed, which takes a third of a second at every start.
_hidden = sys.modules.setdefault("wandb", None) is None  # type: ignore[arg-type]  # so Python marks it
try:
    from timm.layers import Attention, DropPath
finally:
    if _hidden:
        del sys.modules["wandb"]

# Compiled variants of one function: training, evaluation, recomputation, each output that is asked
# for; with and without drop path; blocks of an objective's own width.
MAX_VARIANTS = 32
RATE_UNITS = 2**24
MAX_ROWS = 12


class InFp32:
    """A last layer that multiplies in fp32, outside of autocast.

    Logits near a bias of -10, where the sigmoid over 21,843 classes starts, are 0.06 apart in bf16.
    An engine that rounds parameters sets `remainders`: for each parameter by name what rounding
    took from it. The layer adds it, so it uses the weights that the optimiser updates.
    """

    weight: Any
    bias: Any
    remainders: Mapping[str, torch.Tensor] = {}

    def forward(self, features_BX: torch.Tensor) -> torch.Tensor:
        # Autocast would round the factors to bf16, so it is switched off here.
        device = features_BX.device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self.forward(features_BX)
        dtype = torch.promote_types(features_BX.dtype, torch.float32)
        weight = self.weight.to(dtype)
        bias = self.bias.to(dtype)
        if self.remainders:
            weight = weight + self.remainders["weight"]
            bias = bias + self.remainders["bias"]
        if weight.ndim == 2:
            return nn.functional.linear(features_BX.to(dtype), weight, bias)

        # GPUs may round the inputs of convolutions to TF32.
        features_BD = features_BX.flatten(1).to(dtype)
        logits_BC = nn.functional.linear(features_BD, weight.flatten(1), bias)
        return logits_BC[..., None, None]


class Classifier(InFp32, nn.Linear):
    """Features [B, width] -> logits [B, classes]."""


class ConvClassifier(InFp32, nn.Conv2d):
    """Features [B, width, 1, 1] -> logits [B, classes, 1, 1]."""


def classify_in_fp32(*lasts: nn.Module) -> None:
    """Make last layers fp32 ones in place; leaves what stands for no layer, such as Identity."""
    kinds = {nn.Linear: Classifier, nn.Conv2d: ConvClassifier}
    # The class changes and the tensors stay, so that names in checkpoints do too.
    for last in lasts:
        last.__class__ = kinds.get(type(last), type(last))


def tokens_of(
    model: Any,
    images_B3SS: torch.Tensor,
    *,
    masked_BL: torch.Tensor | None = None,
    mask_token_D: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pooled features [B, width], and the patches after the last norm [B, L, width].

    masked_BL, bool: the patches whose embedding the mask token replaces, before positions are
    added, for models with a `patch_embed`.
    """
    hooks = []
    if masked_BL is not None:

        def replace(_: Any, __: Any, patches: torch.Tensor) -> torch.Tensor:
            # Some models of timm keep rows and columns apart.
            is_masked = masked_BL.view(*patches.shape[:-1], 1)
            return torch.where(is_masked, mask_token_D, patches)

        hooks.append(model.patch_embed.register_forward_hook(replace))
    try:
        tokens_BLD = model.forward_features(images_B3SS)
    finally:
        for hook in hooks:
            hook.remove()
    features_BD = model.forward_head(tokens_BLD, pre_logits=True)
    return features_BD, tokens_BLD[:, model.num_prefix_tokens :]


def attention_modules(model: Any) -> list[Attention]:
    """The attention of each block, first layer first; none where a block has another kind than
    softmax(q k) v, such as one that turns q and k by their positions."""
    modules = [getattr(block, "attn", None) for block in getattr(model, "blocks", ())]
    plain = [module for module in modules if isinstance(module, Attention)]
    return plain if len(plain) == len(modules) else []


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Round a model that is not trained, as ZeRO rounds one in training.

    Last layers stay in fp32, and so does BatchNorm, whose variances bf16 would round by 0.4 %.
    """
    for module in model.modules():
        if isinstance(module, InFp32 | _BatchNorm):
            continue
        # A module's own tensors: those of its parts follow with the parts.
        for tensor in (
            *module.parameters(recurse=False),
            *module.buffers(recurse=False),
        ):
            if tensor.is_floating_point():
                tensor.data = tensor.to(dtype)


def compile_each(blocks: Iterable[nn.Module], *, backend: str) -> None:
    """Compile each block in place, when it is first used; names and weights stay as they are.

    Blocks that differ in their weights and in the rate of drop path alone share what is compiled.
    """
    # Compiled code is executed; the folder that torch would choose may be another user's.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(private_folder() / "compiled"))

    # Beyond the limit torch silently stops compiling.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_VARIANTS)
    for block in blocks:
        block.compile(dynamic=False, backend=backend)


def private_folder() -> Path:
    """Create `vitscale-UID` in the folder for temporary files, with mode 0700.

    Raises UserError if another user owns it or can write to it, or if it cannot be made.
    """
    folder = Path(tempfile.gettempdir()) / f"vitscale-{os.getuid()}"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError as error:
        raise not_written(error, f"TMPDIR: {folder}") from None

    # A folder of another user could hold code that this process then runs.
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or status.st_mode & 0o077
    ):
        raise UserError(
            "is not a folder that only you can use",
            where=folder,
            next_step="remove it, or set TMPDIR to another folder",
        )
    return folder


class DropPathByPosition(nn.Module):
    """timm's drop path, whose masks are a function of the positions of the images in training.

    So they are the same on any number of ranks and micro-batches, and when activations are
    recomputed. Rate and key are tensors: torch would compile numbers into the code.
    """

    rate: torch.Tensor
    key: torch.Tensor
    positions: torch.Tensor
    """int64 [B]: of the images of a micro-batch, whose views lie side by side."""

    def __init__(self, drop_prob: float, key: int) -> None:
        super().__init__()
        self.drop_prob = drop_prob
        # Integers, which are not rounded when a model is cast to bf16.
        units = torch.tensor(round(drop_prob * RATE_UNITS), dtype=torch.int32)
        self.register_buffer("rate", units, persistent=False)
        self.register_buffer("key", torch.tensor(signed(key)), persistent=False)
        self.register_buffer("positions", torch.zeros(1).long(), persistent=False)

    def forward(self, tokens_NTD: torch.Tensor) -> torch.Tensor:
        """Set some samples to 0 and divide the others by the share kept, in training."""
        if not self.training:
            return tokens_NTD
        num_rows = tokens_NTD.shape[0]
        num_views = num_rows // len(self.positions)

        # The same numbers as `uniform_rows` makes on a host. Views of another size have others.
        golden = signed(GOLDEN)
        key = self.key + tokens_NTD.shape[1]
        views_V = torch.arange(1, num_views + 1, device=tokens_NTD.device)
        starts_B = _mixed(key + (self.positions + 1) * golden)
        draws_N = _mixed(starts_B[:, None] + views_V * golden).flatten()

        is_kept_N = _shifted(draws_N, 40) >= self.rate
        mask_N = is_kept_N / (1 - self.rate.float() / RATE_UNITS)
        shape = (num_rows,) + (1,) * (tokens_NTD.ndim - 1)
        return tokens_NTD * mask_N.view(shape).to(tokens_NTD.dtype)


def signed(word: int) -> int:
    """64 bits as torch has them."""
    return word - (1 << 64) if word >> 63 else word


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function, as `random_numbers.mix`, of int64 in place of uint64."""
    words = (words ^ _shifted(words, 30)) * signed(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * signed(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros at the left where torch copies the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def drop_by_position(model: nn.Module, *, seed: int) -> None:
    """Replace timm's drop paths in place; each has masks of its own."""
    for name, module in list(model.named_modules()):
        if isinstance(module, DropPath):
            key = stream_key("drop path", seed, name)
            model.set_submodule(name, DropPathByPosition(module.drop_prob, key))


def refuse_misfits(
    target: Mapping[str, torch.Tensor],
    given: Mapping[str, torch.Tensor],
    *,
    where: str,
    next_step: str,
) -> None:
    """Raise UserError with a table of every missing, unknown or misshapen tensor."""
    rows = []
    for name in sorted(target.keys() | given.keys()):
        ours, theirs = (
            tuple(tensors[name].shape) if name in tensors else "lacks it"
            for tensors in (target, given)
        )
        if ours != theirs:
            rows.append(f"    {name}: model {ours}, checkpoint {theirs}")
    if not rows:
        return

    # Two other models have hundreds of misfits, and the first dozen shows it.
    table = rows[:MAX_ROWS]
    if len(rows) > MAX_ROWS:
        table.append(f"    ... {len(rows) - MAX_ROWS} more")
    lines = "\n".join(table)
    raise UserError(
        f"{len(rows)} tensors do not fit: this is a checkpoint of another model\n{lines}",
        where=where,
        next_step=next_step,
    )
