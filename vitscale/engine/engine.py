"""The training engine. The only owner of deepspeed.

Owns: the generated DeepSpeed configuration, forward/backward/step, learning rates, and the state
of model and optimiser as fp32 tensors by name, whatever the ZeRO stage and number of ranks.
Leaves out: files (`checkpoint`), schedules, losses.

Names of whole tensors are what makes a checkpoint independent of its layout: each rank saves the
pieces it owns, named by what they are pieces of, and restores its own from the whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    logger as deepspeed_logger,
)
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import nn

from vitscale.checkpoint.tensors import slice_name
from vitscale.distributed import Ranks
from vitscale.engine.settings import EngineSettings
from vitscale.errors import UserError, nearest
from vitscale.optim.optimizer import STATE_NAMES

KNOWN_RAW_KEYS = (
    "bf16 comms_logger communication_data_type compile data_types dump_state flops_profiler fp16 "
    "gradient_clipping memory_breakdown prescale_gradients seq_parallel_communication_data_type "
    "sparse_gradients steps_per_print torch_autocast wall_clock_breakdown zero_optimization "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
).split()
OWNED_RAW_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def resolve_precision(settings: EngineSettings, device: torch.device) -> torch.dtype:
    """The dtype of the forward pass. bf16 only where the device has it."""
    wanted = settings.precision
    if wanted == "auto":
        wanted = "bf16" if device.type == "cuda" else "fp32"
    if wanted == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UserError(
            f"bf16 is not supported by {torch.cuda.get_device_name(device)}",
            where="engine.precision",
            next_step="set engine.precision=fp32",
        )
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[wanted]


def deepspeed_config(
    settings: EngineSettings,
    *,
    micro_batch: int,
    accumulation: int,
    world_size: int,
    clip_norm: float | None,
    dtype: torch.dtype,
    raw: Mapping[str, Any],
) -> dict[str, Any]:
    """The DeepSpeed dict of a run, with raw keys merged over it.

    Settings whose defaults changed between releases (clipping, overflow check) or defeat overlap
    (bucket, overlap_comm) are always given. Raises UserError for unknown raw keys, which DeepSpeed
    itself would ignore, and for those that the plan owns.
    """
    for key in raw:
        if key in OWNED_RAW_KEYS:
            what = "is derived from data.global_batch; it cannot be set here"
            raise UserError(what, where=f"deepspeed.{key}", next_step="set data.global_batch")
        if key not in KNOWN_RAW_KEYS:
            close = nearest(key, KNOWN_RAW_KEYS)
            hint = f"did you mean {close!r}?" if close else "see DeepSpeed's configuration page"
            raise UserError("unknown DeepSpeed key", where=f"deepspeed.{key}", next_step=hint)
    config: dict[str, Any] = {
        "train_batch_size": micro_batch * accumulation * world_size,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip_norm or 0.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": settings.zero_stage,
            "overlap_comm": settings.overlap_comm and torch.cuda.is_available(),
            "reduce_bucket_size": settings.reduce_bucket_elements,
            "allgather_bucket_size": settings.reduce_bucket_elements,
        },
    }
    if dtype == torch.bfloat16 and settings.zero_stage == 0:
        # DeepSpeed has no stage 0 with fp32 accumulation beside bf16 weights. Autocast over fp32
        # weights is that: bf16 products, fp32 master weights.
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True, "check_grad_overflow": False}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merged(config, raw)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


class Engine:
    """A model with its optimiser, sharded by ZeRO. Every method is collective."""

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        optimizer_name: str,
        config: dict[str, Any],
        ranks: Ranks,
        dtype: torch.dtype,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
    ) -> None:
        deepspeed_logger.setLevel(logging.WARNING)
        # DeepSpeed's CPU collectives through shared memory are compiled at first use, spin on the
        # cores that train, and meet leftovers of a killed run under the same name. gloo does not.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.ranks, self.dtype = ranks, dtype
        self._state_names = STATE_NAMES[optimizer_name]
        self._stage = int(config["zero_optimization"]["stage"])
        self._plain_norm: torch.Tensor | None = None
        self._names = [name for name, _ in model.named_parameters()]
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        # Pixels 0..255 to (x / 255 - mean) / std, as one multiply-add on the device.
        scale = torch.tensor([1 / (255 * s) for s in std], device=ranks.device)
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=ranks.device)
        self._scale_3HW, self._shift_3HW = scale.view(3, 1, 1), shift.view(3, 1, 1)

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimiser inside DeepSpeed's wrapper; stage 0 in fp32 has no wrapper."""
        return getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)

    def logits(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, S, S] on the device, uint8 or mixed float 0..255 -> logits [B, classes]."""
        x_B3SS = torch.addcmul(self._shift_3HW, images_B3SS.float(), self._scale_3HW)
        return self._engine(x_B3SS if self._stage == 0 else x_B3SS.to(self.dtype))

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients; DeepSpeed divides by the number of accumulated micro-batches."""
        self._engine.backward(loss)

    def step(self) -> None:
        """Update at the end of an accumulation; does nothing in its middle."""
        if self._is_plain() and self._engine.is_gradient_accumulation_boundary():
            # DeepSpeed's wrappers measure the norm; without one nobody does. Gradients are already
            # averaged over ranks here, and not yet clipped.
            gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            self._plain_norm = torch.nn.utils.get_total_norm(gradients)
        self._engine.step()

    def train(self) -> None:
        self._engine.train()

    def eval(self) -> None:
        self._engine.eval()

    def set_learning_rate(self, lr: float) -> None:
        """The rate of the head; a group's `lr_scale` gives that of the layers below."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)

    def gradient_norm(self) -> float:
        """Global norm before clipping, of the last update."""
        norm = self._plain_norm if self._is_plain() else self._engine.get_global_grad_norm()
        return math.nan if norm is None else float(norm)

    # --- state as whole fp32 tensors -------------------------------------------------------------

    def export_state(self) -> dict[str, torch.Tensor]:
        """This rank's part of the state, not copied: `model.NAME`, `exp_avg.NAME`, ..., in fp32.

        Under ZeRO a part is the slice that this rank owns, named by `slice_name`; without, rank r
        gives every tensor i with i mod ranks = r. Nothing travels between ranks. Valid until the
        next step.
        """
        self._link_optimizer_state()
        owned: dict[str, torch.Tensor] = {}
        for number, (name, parameter) in enumerate(self._parameters()):
            shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
            for kind in ("model", *self._state_names):
                start, part = self._own_part(parameter, None if kind == "model" else kind, number)
                if part.numel() == shape.numel():
                    owned[f"{kind}.{name}"] = part.detach().view(shape)
                elif part.numel():
                    owned[slice_name(f"{kind}.{name}", start=start, shape=shape)] = part.detach()
        return owned

    def optimizer_steps(self) -> int:
        """Updates the optimiser has counted for its bias correction."""
        steps = [
            int(state["step"]) for state in self.base_optimizer.state.values() if "step" in state
        ]
        return max(steps, default=0)

    def import_state(self, tensors: Mapping[str, torch.Tensor], *, optimizer_steps: int) -> None:
        """Restore what `export_state` of any layout gave; `tensors` holds all of them, whole."""
        self._create_optimizer_state(optimizer_steps)
        self._link_optimizer_state()
        for name, parameter in self._parameters():
            for kind in ("model", *self._state_names):
                value = tensors[f"{kind}.{name}"].to(self.ranks.device)
                self._set_full(parameter, value, None if kind == "model" else kind)

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self._names, self._engine.module.parameters(), strict=True))

    def _is_plain(self) -> bool:
        return not hasattr(self._engine.optimizer, "optimizer")

    def _own_part(self, parameter: Any, kind: str | None, number: int) -> tuple[int, torch.Tensor]:
        """The flat piece of a parameter, or of a state of it, that this rank saves; its start."""
        nothing = (0, torch.empty(0))
        if self._is_plain():
            if number % self.ranks.world_size != self.ranks.rank:
                return nothing
            whole = parameter if kind is None else self.base_optimizer.state[parameter][kind]
            return 0, whole.view(-1)
        if self._stage == 3:
            size, rank = parameter.ds_tensor.numel(), self.ranks.rank
            if kind is None:
                part = safe_get_local_fp32_param(parameter)
            else:
                part = safe_get_local_optimizer_state(parameter, kind)
            # The last ranks' slices may reach into padding, or be nothing else.
            return size * rank, part.view(-1)[: max(0, parameter.ds_numel - size * rank)]
        mapping = parameter._hp_mapping
        if mapping is None:  # all of it belongs to other ranks
            return nothing
        return mapping.lp_fragment_address.start, mapping.get_hp_fragment(kind)

    def _set_full(self, parameter: nn.Parameter, value: torch.Tensor, kind: str | None) -> None:
        with torch.no_grad():
            if self._is_plain():
                target = parameter if kind is None else self.base_optimizer.state[parameter][kind]
                target.copy_(value)
            elif self._stage == 3:
                self._set_partition(parameter, value, kind)
            elif kind is None:
                safe_set_full_fp32_param(parameter, value)
                parameter.data.copy_(value)  # the copy the forward pass uses
            else:
                safe_set_full_optimizer_state(parameter, value, kind)

    def _set_partition(self, parameter: Any, value: torch.Tensor, kind: str | None) -> None:
        """ZeRO-3: each rank holds an equal slice; the last ones may reach into padding."""
        size = parameter.ds_tensor.numel()
        flat = value.flatten()
        padded = torch.zeros(size * self.ranks.world_size, dtype=flat.dtype, device=flat.device)
        padded[: flat.numel()] = flat
        part = padded.narrow(0, size * self.ranks.rank, size)
        if kind is None:
            safe_set_local_fp32_param(parameter, part)
            parameter.ds_tensor.data.copy_(part)
        else:
            safe_set_local_optimizer_state(parameter, part, kind)

    def _flat_parameters(self) -> list[torch.Tensor]:
        """The tensors the base optimiser keeps its state for."""
        wrapper = self._engine.optimizer
        for name in (
            "fp32_partitioned_groups_flat",  # stage 3
            "single_partition_of_fp32_groups",  # stages 1 and 2
            "fp32_groups_flat_partition",  # BF16_Optimizer
        ):
            if hasattr(wrapper, name):
                return list(getattr(wrapper, name))
        return [p for group in self.base_optimizer.param_groups for p in group["params"]]

    def _create_optimizer_state(self, steps: int) -> None:
        """Optimisers make their state at the first step; a resumed one needs it before."""
        optimizer = self.base_optimizer
        for flat in self._flat_parameters():
            state: dict[str, torch.Tensor] = {
                name: torch.zeros_like(flat) for name in self._state_names
            }
            if "exp_avg" in state:
                fused = bool(optimizer.defaults.get("fused"))
                device = flat.device if fused else torch.device("cpu")
                state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=device)
            optimizer.state[flat] = state

    def _link_optimizer_state(self) -> None:
        """Let DeepSpeed map parameters to the optimiser's tensors anew.

        It does so once, inside the first step and after the first parameter group only, when later
        groups have no state yet (seen in 0.19.8): their moments would stay unknown.
        """
        wrapper = self._engine.optimizer
        if hasattr(wrapper, "_lazy_init_hp_params_optimizer_state"):
            wrapper._hp_optimizer_states_linked = False
            wrapper._lazy_init_hp_params_optimizer_state()
