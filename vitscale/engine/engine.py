"""The training engine. The only owner of deepspeed.

Owns: forward/backward/step, learning rates, the average of the weights, and the state of model and
optimiser as tensors by name, whatever the ZeRO stage and number of ranks.
Leaves out: the generated configuration (`configuration`), which gradients reach the optimiser
(`guard`), files (`checkpoint`), schedules, losses.

Names of whole tensors are what makes a checkpoint independent of its layout: each rank saves the
pieces it owns, named by what they are pieces of, and restores its own from the whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.utils import is_invalid_grad_norm
from deepspeed.runtime.zero import stage3, stage_1_and_2
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
from vitscale.distributed.world import World, gather_objects
from vitscale.engine.agreement import checksum, disagreement, num_unequal
from vitscale.engine.configuration import deepspeed_config as deepspeed_config
from vitscale.engine.configuration import resolve_compile as resolve_compile
from vitscale.engine.configuration import resolve_precision as resolve_precision
from vitscale.engine.guard import Health, UpdateGuard
from vitscale.optim.optimizer import STATE_NAMES
from vitscale.optim.settings import EmaSettings

AVERAGE = "ema"
# The state of DeepSpeed's dynamic loss scale.
LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _trust_guard(*, own_check: bool) -> None:
    """Let DeepSpeed's optimisers ask the host whether a norm is finite only where they must.

    They ask at every step and in every parameter group, which stops a GPU each time; the guard
    decides on the device instead. fp16 needs the answer on the host, for the loss scale.
    """
    for module in (bf16_optimizer, stage_1_and_2, stage3):
        module.is_invalid_grad_norm = is_invalid_grad_norm if own_check else lambda norm: False


def _normalize(
    images_B3SS: torch.Tensor,
    shift_3HW: torch.Tensor,
    scale_3HW: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    return torch.addcmul(shift_3HW, images_B3SS.float(), scale_3HW).to(dtype)


class Engine:
    """A model with its optimiser, sharded by ZeRO. Every method is collective."""

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        optimizer_name: str,
        config: dict[str, Any],
        world: World,
        dtype: torch.dtype,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        ema: EmaSettings | None = None,
        compile_input: bool = False,
    ) -> None:
        """config: of `deepspeed_config`; its clipping is done here, at every stage alike.

        ema: keep an exponential average of the weights, in fp32, sharded like the optimiser's
        states; None: none. compile_input: normalise pixels in one compiled kernel.
        """
        deepspeed_logger.setLevel(logging.WARNING)
        # DeepSpeed's CPU collectives through shared memory are compiled at first use, spin on the
        # cores that train, and meet leftovers of a killed run under the same name. gloo does not.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.world, self.dtype = world, dtype
        self._state_names = STATE_NAMES[optimizer_name] + ((AVERAGE,) if ema else ())
        self._stage = int(config["zero_optimization"]["stage"])
        self._accumulation = int(config["gradient_accumulation_steps"])
        self._ema, self._num_averaged, self._micro_step = ema, 0, 0
        self._plain_norm: torch.Tensor | None = None
        self._names = [name for name, _ in model.named_parameters()]
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=config | {"gradient_clipping": 0.0},
            dist_init_required=False,
        )
        if world.world_size == 1 and self._is_plain():
            # DeepSpeed would copy all gradients into one buffer and back, for nobody to add to.
            self._engine.enable_backward_allreduce = False
        _trust_guard(own_check=dtype == torch.float16)
        self._guard = UpdateGuard(
            self.base_optimizer,
            clip_norm=config["gradient_clipping"] or None,
            norm=self._norm,
            device=world.device,
        )
        # Before the first step: it may be left out, and a checkpoint needs the states all the same.
        self._create_optimizer_state(0)
        # Pixels 0..255 to (x / 255 - mean) / std, as one multiply-add on the device.
        scale = torch.tensor([1 / (255 * s) for s in std], device=world.device)
        shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=world.device)
        self._scale_3HW, self._shift_3HW = scale.view(3, 1, 1), shift.view(3, 1, 1)
        self._normalize = torch.compile(_normalize) if compile_input else _normalize

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimiser inside DeepSpeed's wrapper; stage 0 in fp32 has no wrapper."""
        return getattr(self._engine.optimizer, "optimizer", self._engine.optimizer)

    def logits(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, S, S] on the device, uint8 or mixed float 0..255 -> logits [B, classes]."""
        return self._engine(self._normalized(images_B3SS))

    def features(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        """The same images -> what the model's head sees [B, width]."""
        return self._engine(self._normalized(images_B3SS), features=True)

    def _normalized(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        # At stage 0 autocast takes fp32 and rounds where it multiplies.
        dtype = torch.float32 if self._stage == 0 else self.dtype
        return self._normalize(images_B3SS, self._shift_3HW, self._scale_3HW, dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients; DeepSpeed divides by the number of accumulated micro-batches."""
        self._engine.backward(self._guard.checked(loss, micro_step=self._micro_step))
        self._micro_step += 1

    def step(self) -> None:
        """Update at the end of an accumulation; does nothing in its middle.

        Nothing is updated, on any rank, when a loss or gradient of any rank was not finite.
        """
        is_update = self._engine.is_gradient_accumulation_boundary()
        if is_update and self._is_plain():
            # DeepSpeed's wrappers measure the norm; without one nobody does. Gradients are already
            # averaged over ranks here, and not yet clipped.
            gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
            self._plain_norm = torch.nn.utils.get_total_norm(gradients)
        self._engine.step()
        if is_update:
            self._guard.finish()
            self._average_weights()

    def health(self) -> Health:
        """Updates left out so far. Waits for the device: for log intervals."""
        return self._guard.health(accumulation=self._accumulation)

    @property
    def loss_scale(self) -> float | None:
        """What fp16 multiplies losses with; None in other precisions."""
        return float(self._engine.optimizer.loss_scale) if self.dtype == torch.float16 else None

    @torch.no_grad()
    def _average_weights(self) -> None:
        """One step of the average, also where the update was left out: a function of the step."""
        if self._ema is None:
            return
        self._num_averaged += 1
        decay = self._ema.decay_at(self._num_averaged)
        flats = self._flat_parameters()
        averages = [self.base_optimizer.state[flat][AVERAGE] for flat in flats]
        torch._foreach_lerp_(averages, flats, 1.0 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Weights are their average for the length of the block, which must not train. Exact."""
        assert self._ema is not None
        self._swap_average()
        try:
            yield
        finally:
            self._swap_average()

    @torch.no_grad()
    def _swap_average(self) -> None:
        for flat in self._flat_parameters():
            average = self.base_optimizer.state[flat][AVERAGE]
            weights = flat.detach().clone()
            flat.copy_(average)
            average.copy_(weights)
        self._publish_weights()

    def _publish_weights(self) -> None:
        """From the tensors that are updated to those of the forward pass, as after an update."""
        wrapper = self._engine.optimizer
        if self._stage == 3:
            wrapper._partition_all_parameters()
            for number in range(len(wrapper.fp32_partitioned_groups_flat)):
                wrapper._reassign_or_swap_out_partitioned_parameters(number)
            if wrapper.persistent_parameters:
                wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
        elif not self._is_plain():
            wrapper.update_lp_params()

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
        norm = self._norm()
        return math.nan if norm is None else float(norm)

    def _norm(self) -> Any:
        if self._is_plain():
            return self._plain_norm
        # The wrapper's: DeepSpeed's engine copies it only after the update.
        return self._engine.optimizer._global_grad_norm

    # --- agreement of the ranks -----------------------------------------------------------------

    @torch.no_grad()
    def disagreement(self) -> str | None:
        """Which ranks hold other weights than the rest, in words; None when all agree.

        Compared are the weights of the forward pass, without ZeRO the optimiser's states too. Under
        ZeRO each rank also compares the weights it is responsible for with their fp32 originals.
        A wrong original at its only owner is spread by the next update and stays unseen.
        """
        names, sums, own = [], [], []
        parameter: Any  # DeepSpeed adds attributes
        for name, parameter in self._parameters():
            if self._is_plain():
                for kind in ("model", *self._state_names):
                    whole = parameter
                    if kind != "model":
                        whole = self.base_optimizer.state[parameter][kind]
                    names.append(f"{kind}.{name}")
                    sums.append(checksum(whole))
                continue
            if self._stage == 3:
                own.append(num_unequal(parameter.ds_tensor, safe_get_local_fp32_param(parameter)))
                continue
            names.append(name)
            sums.append(checksum(parameter))
            mapping = parameter._hp_mapping
            if mapping is not None:
                own.append(num_unequal(mapping.lp_fragment, mapping.hp_fragment))
        none = torch.zeros((), dtype=torch.int64, device=self.world.device)
        numbers = torch.stack([*sums, torch.stack([none, *own]).sum()])
        rows = gather_objects(numbers.tolist())
        wrong = [str(rank) for rank, row in enumerate(rows) if own and row[-1]]
        if wrong:
            return f"rank {', '.join(wrong)} uses weights that differ from their fp32 originals"
        return disagreement(names, [row[:-1] for row in rows])

    # --- state as tensors by name ----------------------------------------------------------------

    def export_state(self) -> dict[str, torch.Tensor]:
        """This rank's part of the state, not copied: `model.NAME`, `exp_avg.NAME`, ...

        In fp32, but for a first moment that is kept in bf16. `ema.NAME` is the average of the
        weights. Under ZeRO a part is the slice that this rank owns, named by `slice_name`;
        without, rank r gives every tensor i with i mod ranks = r.
        Nothing travels between ranks. Valid until the next step.
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

    def export_counters(self) -> dict[str, Any]:
        """What is not a tensor, as JSON values; the same on every rank."""
        counters: dict[str, Any] = {
            "guard": self._guard.state(),
            "num_averaged": self._num_averaged,
        }
        if self.dtype == torch.float16:
            scaler = self._engine.optimizer.loss_scaler
            counters["loss_scaler"] = {name: getattr(scaler, name) for name in LOSS_SCALER}
        return counters

    def import_counters(self, counters: Mapping[str, Any]) -> None:
        """Restore what `export_counters` of any layout gave."""
        self._guard.load_state(counters["guard"])
        self._num_averaged = counters["num_averaged"]
        if self.dtype == torch.float16 and "loss_scaler" in counters:
            for name in LOSS_SCALER:
                setattr(self._engine.optimizer.loss_scaler, name, counters["loss_scaler"][name])
        self._micro_step = counters["guard"]["steps"] * self._accumulation

    def import_state(self, tensors: Mapping[str, torch.Tensor], *, optimizer_steps: int) -> None:
        """Restore what `export_state` of any layout gave; `tensors` holds all of them, whole."""
        self._create_optimizer_state(optimizer_steps)
        self._link_optimizer_state()
        for name, parameter in self._parameters():
            for kind in ("model", *self._state_names):
                value = tensors[f"{kind}.{name}"].to(self.world.device)
                self._set_full(parameter, value, None if kind == "model" else kind)

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self._names, self._engine.module.parameters(), strict=True))

    def _is_plain(self) -> bool:
        return not hasattr(self._engine.optimizer, "optimizer")

    def _own_part(self, parameter: Any, kind: str | None, number: int) -> tuple[int, torch.Tensor]:
        """The flat piece of a parameter, or of a state of it, that this rank saves; its start."""
        nothing = (0, torch.empty(0))
        if self._is_plain():
            if number % self.world.world_size != self.world.rank:
                return nothing
            whole = parameter if kind is None else self.base_optimizer.state[parameter][kind]
            return 0, whole.view(-1)
        if self._stage == 3:
            size, rank = parameter.ds_tensor.numel(), self.world.rank
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
        padded = torch.zeros(size * self.world.world_size, dtype=flat.dtype, device=flat.device)
        padded[: flat.numel()] = flat
        part = padded.narrow(0, size * self.world.rank, size)
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
            dtypes = getattr(optimizer, "state_dtypes", {})
            state: dict[str, torch.Tensor] = {
                name: torch.zeros_like(flat, dtype=dtypes.get(name)) for name in self._state_names
            }
            if AVERAGE in state:
                state[AVERAGE].copy_(flat.detach())
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
