"""Configure DeepSpeed and train a model with it; its private parts are in `deepspeed_parts`.

Names of whole tensors make a checkpoint independent of its layout: each rank saves the parts it
owns, named after the whole tensor, and restores its own parts from wherever they were saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from vitscale.checkpoint.store import slice_name
from vitscale.config.errors import UserError
from vitscale.distributed.world import World, broadcast_tensor, errors_on_all_ranks
from vitscale.engine.deepspeed_parts import (
    PartitionedLayout,
    SlicedLayout,
    WrappedLayout,
    initialize_deepspeed,
    reduces_nothing,
)
from vitscale.engine.device_batches import Normalization
from vitscale.engine.gradients import Health, UpdateGuard
from vitscale.engine.layouts import (
    FlatLayout,
    Layout,
    Part,
    PlainLayout,
    WholeModel,
)
from vitscale.engine.settings import BUCKET_ELEMENTS, MAX_RANKS_IN_HALF, EngineSettings
from vitscale.optim.settings import OPTIMIZERS, EmaSettings

AVERAGE = "ema"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Takes a name, a first element and a number of elements of the flattened tensor. May raise OSError.
ReadPart = Callable[[str, int, int], torch.Tensor]


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
        total_steps: int = 0,
        teacher: nn.Module | None = None,
        compile_input: bool = False,
    ) -> None:
        """config: of `deepspeed_config`; the engine itself clips, at every stage alike.

        ema: keep an exponential average of the weights, in fp32, sharded like the optimiser
        states; None: none. total_steps: of the run, for an average whose decay changes. teacher: a
        copy of the model, which gets the average of the weights after each update. compile_input:
        normalise pixels in one compiled kernel.
        """
        self.world = world
        self.dtype = dtype
        self._ema = ema
        self._num_averaged = 0
        self._start_share = 1.0
        """How much of the average is the weights before the first step."""
        self._total_steps = total_steps
        self._state_names = OPTIMIZERS[optimizer_name].state_names
        if ema is not None:
            self._state_names += (AVERAGE,)

        parameters = dict(model.named_parameters())
        # Persistent buffers are saved and restored as well, but not trained.
        self._buffer_names = sorted(set(model.state_dict()) - parameters.keys())
        # DeepSpeed rounds the parameters before it copies them; these stay as they are.
        initial = {name: parameter.data for name, parameter in parameters.items()}
        trained = [(name, p) for name, p in parameters.items() if p.requires_grad]
        self._frozen = {
            name: (parameter, parameter.shape)
            for name, parameter in parameters.items()
            if not parameter.requires_grad
        }
        self._frozen_values: dict[str, torch.Tensor] = {}
        """In fp32, in the memory of the first rank's CPU; other ranks: none."""
        # One copy is enough: other ranks get the values from the first one when they resume.
        if world.is_first:
            for name in self._frozen:
                self._frozen_values[name] = initial[name].float().cpu().clone()

        # At stage 0 autocast takes fp32 and rounds where it multiplies.
        stage = int(config["zero_optimization"]["stage"])
        self._forward_dtype = torch.float32 if stage == 0 else dtype
        self._remainders = self._give_remainders(model)
        self._layout, self._engine = _start(
            model, optimizer=optimizer, config=config, world=world, dtype=dtype
        )
        _cast_fixed_tables(model)
        self.base_optimizer = self._layout.base_optimizer
        # Groups of `optimizer_groups` say all this, those of another caller only what torch asks.
        for group in self.base_optimizer.param_groups:
            group.setdefault("lr_scale", 1.0)
            group.setdefault("part", "")
            group.setdefault("is_backbone", False)
            group.setdefault("full_decay", group.get("weight_decay", 0.0))

        # Training starts from the weights as they were before DeepSpeed rounded them.
        self._parts = list(self._layout.parts(trained))
        for part in self._parts:
            unrounded = initial[part.name].flatten()
            values = unrounded.narrow(0, part.start, part.num_values)
            part.of(part.updated).copy_(values)
        self._renew_remainders()

        self._guard = UpdateGuard(
            self.base_optimizer,
            clip_norm=config["gradient_clipping"] or None,
            norm=self._layout.norm,
            accumulation=config["gradient_accumulation_steps"],
            device=world.device,
        )
        # Before the first step: it may be skipped, but a checkpoint needs the states.
        self._create_optimizer_state(0)
        self._teacher = None
        if teacher is not None:
            self._teacher = WholeModel(teacher, dtype=dtype, device=world.device)
            self._renew_teacher()
        self._is_compiled = compile_input
        self.normalized = Normalization(mean=mean, std=std, device=world.device)
        """Pixels in fp32, whatever the model's precision: for targets made of pixels."""
        self._normalize_input: Callable[..., torch.Tensor] = self.normalized
        if compile_input:
            self._normalize_input = torch.compile(self.normalized)

    def logits(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, S, S] on the device, uint8 or mixed float 0..255 -> logits [B, classes]."""
        logits_BC: torch.Tensor = self._engine(self._model_input(images_B3SS))
        return logits_BC

    def forward(self, images_B3SS: torch.Tensor, output: str, **inputs: Any) -> Any:
        """The same images -> another output of the model, with further inputs if it takes them."""
        return self._engine(self._model_input(images_B3SS), output=output, **inputs)

    @torch.no_grad()
    def teacher(self, images_B3SS: torch.Tensor, output: str, **inputs: Any) -> Any:
        """The output of the averaged weights, as `forward` gives that of the trained ones.

        The teacher is whole on every rank, in the precision of the forward pass, and in evaluation
        mode. It is computed from the average, so it adds no state to a checkpoint.
        """
        assert self._teacher is not None
        pixels = self._normalize_input(images_B3SS, dtype=self.dtype)
        return self._teacher.model(pixels, output=output, **inputs)

    def _model_input(self, images_B3SS: torch.Tensor) -> torch.Tensor:
        return self._normalize_input(images_B3SS, dtype=self._forward_dtype)

    @property
    def known_outputs(self) -> tuple[str, ...]:
        """Names of the model's outputs besides that of an objective."""
        names: tuple[str, ...] = self._engine.module.known_outputs
        return names

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients; DeepSpeed divides by the number of accumulated micro-batches."""
        self._layout.backward(self._guard.checked(loss))

    def step(self) -> None:
        """Update at the end of an accumulation; does nothing in its middle.

        All ranks skip the update when a loss or gradient of any rank is not finite.
        """
        if not self._engine.is_gradient_accumulation_boundary():
            # DeepSpeed counts the micro-steps.
            self._engine.step()
            return

        self._layout.update()
        self._renew_remainders()
        self._guard.finish()
        self._average_weights()

    def health(self) -> Health:
        """Updates skipped so far. Waits for the device: for log intervals."""
        return self._guard.health()

    @property
    def loss_scale(self) -> float | None:
        """Factor on losses in fp16; None in other precisions."""
        if not isinstance(self._layout, WrappedLayout) or self.dtype != torch.float16:
            return None
        return self._layout.loss_scale()

    @torch.no_grad()
    def _average_weights(self) -> None:
        """One step of the average, skipped updates included: a function of the step."""
        if self._ema is None:
            return
        self._num_averaged += 1
        decay = self._ema.decay_at(self._num_averaged, self._total_steps)
        self._start_share *= decay
        weights = self._layout.updated_tensors()
        averages = [self.base_optimizer.state[tensor][AVERAGE] for tensor in weights]

        # avg + (w - avg) * (1 - decay) = decay * avg + (1 - decay) * w, in one kernel per group.
        torch._foreach_lerp_(averages, weights, 1.0 - decay)
        self._renew_teacher()

    @torch.no_grad()
    def _renew_teacher(self) -> None:
        """Give the teacher the average of the weights, on all ranks."""
        if self._teacher is None:
            return
        self._teacher.flat.zero_()
        self._write_parts(self._teacher.values, kind=AVERAGE)
        if self.world.world_size > 1:
            dist.all_reduce(self._teacher.flat)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the average of the weights inside the block, which must not train. Exact.

        An error that leaves the block leaves the average in place: swapping is collective, and the
        other ranks may be elsewhere.
        """
        assert self._ema is not None
        self._swap_average()
        yield
        self._swap_average()

    @torch.no_grad()
    def _swap_average(self) -> None:
        for weights in self._layout.updated_tensors():
            average = self.base_optimizer.state[weights][AVERAGE]
            # Values change places, not tensors, which the optimiser and DeepSpeed refer to.
            copied_weights = weights.detach().clone()
            weights.copy_(average)
            average.copy_(copied_weights)
        self._layout.publish_weights()
        self._renew_remainders()

    def _give_remainders(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Give the last layer of a classifier, which adds them to its rounded weights, remainders.

        They are what rounding took from the fp32 weights, in the dtype of these: both together have
        twice its digits. Returned by the names of the parameters; in fp32 there are none.
        """
        remainders: dict[str, torch.Tensor] = {}
        if self._forward_dtype == torch.float32:
            return remainders

        for prefix, module in model.named_modules():
            if hasattr(module, "remainders"):
                module.remainders = {}
                for name, parameter in module.named_parameters(recurse=False):
                    zeros = torch.zeros_like(parameter, dtype=self._forward_dtype)
                    module.remainders[name] = zeros
                    remainders[f"{prefix}.{name}"] = zeros
        return remainders

    @torch.no_grad()
    def _renew_remainders(self) -> None:
        """Compute the remainders on all ranks, after any change of weights."""
        # Other ranks renew their own parts; zeros here let the sum below put all parts together.
        for remainder in self._remainders.values():
            remainder.zero_()

        self._write_parts(
            self._remainders,
            kind="model",
            change=lambda values: values - values.to(self._forward_dtype),
        )

        # One rank has each value and all others have zero, so the sum is exact.
        if self.world.world_size > 1:
            for remainder in self._remainders.values():
                dist.all_reduce(remainder)

    def _write_parts(
        self,
        targets: Mapping[str, torch.Tensor],
        *,
        kind: str,
        change: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
    ) -> None:
        """Write this rank's parts of some whole tensors: of weights ("model") or their average.

        The other parts stay as they are. All ranks together write each value once: the first one
        has all of what is not trained.
        """
        sources = []
        for part in self._parts:
            if part.name in targets:
                tensor = part.updated
                if kind != "model":
                    tensor = self.base_optimizer.state[tensor][kind]
                sources.append((part.name, part.start, part.of(tensor)))
        for name in self._frozen_values.keys() & targets.keys():
            sources.append((name, 0, self._frozen_values[name].flatten()))

        for name, start, values in sources:
            target = targets[name].view(-1).narrow(0, start, values.numel())
            target.copy_(change(values))

    def set_positions(self, positions: np.ndarray) -> None:
        """The positions in training of the images of the next micro-batch, int64 [B].

        Drop path draws its masks from them.
        """
        on_device = torch.from_numpy(positions).to(self.world.device)
        for module in self._engine.module.modules():
            if hasattr(module, "positions"):
                module.positions = on_device

    def train(self) -> None:
        self._engine.train()

    def eval(self) -> None:
        self._engine.eval()

    def set_learning_rate(
        self,
        lr: float,
        *,
        rate_factor: Callable[[str], float] = lambda part: 1.0,
        decay_factor: float = 1.0,
        backbone_factor: float = 1.0,
    ) -> None:
        """The rate of the head; a group's `lr_scale` gives that of the layers below.

        rate_factor: of a part of the model (`Objective.part_of`). decay_factor: of weight decay.
        backbone_factor: of all but the heads. What has a rate of 0 stays as it is, since decay goes
        with the rate, and its gradients count in no norm.
        """
        for group in self.base_optimizer.param_groups:
            factor = rate_factor(group["part"])
            if group["is_backbone"]:
                factor *= backbone_factor
            group["lr"] = lr * group["lr_scale"] * factor
            group["is_frozen"] = factor == 0
            group["weight_decay"] = group["full_decay"] * decay_factor

    def gradient_norm(self) -> float:
        """Global norm before clipping, of the last update."""
        return float(self._layout.norm())

    def close(self) -> None:
        """Remove all hooks, so that another engine can be built."""
        self._layout.close()
        # ZeRO 3 replaces it in the whole process; compiled blocks lose gradients then (torch 2.11).
        nn.functional.linear = torch._C._nn.linear
        if self._is_compiled:
            torch.compiler.reset()

    # --- state as tensors by name ----------------------------------------------------------------

    def export_state(self) -> dict[str, torch.Tensor]:
        """This rank's part of the state, not copied: `model.NAME`, `exp_avg.NAME`, ...

        All in fp32 except a first moment kept in bf16. `ema.NAME` is the average of the weights.
        Under ZeRO a part is the slice that this rank owns, named by `slice_name`; without, rank r
        gives every tensor i with i mod ranks = r. Buffers come from the first rank. Needs no
        communication. Valid until the next step.
        """
        owned: dict[str, torch.Tensor] = {}
        for name, part, values in self._own_values():
            # A part that is a whole parameter needs no slice in its name.
            if part.num_values == part.shape.numel():
                owned[name] = values.view(part.shape)
            else:
                owned[slice_name(name, start=part.start, shape=part.shape)] = values

        if self.world.is_first:
            for name, buffer in self._buffers():
                owned[f"model.{name}"] = buffer.float()
        for name, values in self._frozen_values.items():
            owned[f"model.{name}"] = values
            # A value that never changes is its own average.
            if self._ema is not None:
                owned[f"{AVERAGE}.{name}"] = values
        return owned

    def _own_values(self) -> Iterator[tuple[str, Part, torch.Tensor]]:
        """Name, place and values of what this rank saves of weights and optimiser states."""
        for part in self._parts:
            yield f"model.{part.name}", part, part.of(part.updated)
            for kind in self._state_names:
                state = self.base_optimizer.state[part.updated][kind]
                yield f"{kind}.{part.name}", part, part.of(state)

    def optimizer_steps(self) -> int:
        """Updates the optimiser has counted for its bias correction."""
        return max(int(state["step"]) for state in self.base_optimizer.state.values())

    def export_counters(self) -> dict[str, Any]:
        """State that is not a tensor, as JSON values; the same on every rank."""
        counters: dict[str, Any] = {
            "guard": self._guard.state(),
            "num_averaged": self._num_averaged,
            "start_share": self._start_share,
        }
        # Only fp16 under ZeRO scales its loss, and only a wrapper of DeepSpeed has the scale.
        if isinstance(self._layout, WrappedLayout) and self.dtype == torch.float16:
            counters["loss_scaler"] = self._layout.loss_scaler()
        return counters

    def import_counters(self, counters: Mapping[str, Any]) -> None:
        """Restore what `export_counters` of any layout gave."""
        self._guard.load_state(counters["guard"])
        self._num_averaged = counters["num_averaged"]
        self._start_share = counters.get("start_share", 0.0)
        # A checkpoint of another precision has no loss scale; fp16 then starts with its own.
        if isinstance(self._layout, WrappedLayout) and "loss_scaler" in counters:
            self._layout.set_loss_scaler(counters["loss_scaler"])

    @torch.no_grad()
    def import_state(self, read: ReadPart, *, optimizer_steps: int) -> None:
        """Restore what `export_state` of any layout gave.

        read: of the whole tensors by name. Each rank reads the parts that it saves, one at a time;
        what other ranks need of them goes through the network.
        Raises StorageError, on all ranks, when one cannot read.
        """
        self._create_optimizer_state(optimizer_steps)
        with errors_on_all_ranks("cannot be read", "the state"):
            for name, part, values in self._own_values():
                values.copy_(read(name, part.start, part.num_values))

            # The first rank alone saves buffers and frozen parameters, and so it alone reads them.
            whole_tensors = list(self._frozen_values.items())
            if self.world.is_first:
                whole_tensors += self._buffers()
            for name, values in whole_tensors:
                flat = read(f"model.{name}", 0, values.numel())
                values.copy_(flat.view(values.shape))

        # Each rank has what it saves; the rest of its state belongs to others.
        self._layout.share_parts(self._state_names)
        self._share_frozen()
        self._renew_remainders()
        self._renew_teacher()
        for _, buffer in self._buffers():
            broadcast_tensor(buffer, source=0)

    @torch.no_grad()
    def _share_frozen(self) -> None:
        """Give all ranks what the first one keeps of parameters that are not trained."""
        for name, (parameter, shape) in self._frozen.items():
            values = torch.empty(shape, dtype=torch.float32, device=self.world.device)
            if self.world.is_first:
                values.copy_(self._frozen_values[name])
            broadcast_tensor(values, source=0)
            self._layout.set_frozen(parameter, values)

    def _buffers(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (name, self._engine.module.get_buffer(name)) for name in self._buffer_names
        ]

    def _create_optimizer_state(self, steps: int) -> None:
        """Optimisers create their state at the first step; a resumed one needs it before."""
        optimizer = self.base_optimizer
        # An optimiser may keep a state in bf16, which must then be created in bf16.
        dtypes = getattr(optimizer, "state_dtypes", {})
        for weights in self._layout.updated_tensors():
            state: dict[str, torch.Tensor] = {
                name: torch.zeros_like(weights, dtype=dtypes.get(name))
                for name in self._state_names
            }
            # The average starts as a copy of the weights: from zero it would be too small.
            if AVERAGE in state:
                state[AVERAGE].copy_(weights.detach())
            state["step"] = torch.tensor(float(steps), device=weights.device)
            optimizer.state[weights] = state


def _start(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    world: World,
    dtype: torch.dtype,
) -> tuple[Layout, Any]:
    """The layout of a configuration's ZeRO stage, and DeepSpeed's engine."""
    zero = config["zero_optimization"]
    stage = int(zero["stage"])
    if stage >= 2 or (stage == 1 and dtype == torch.float16):
        engine = initialize_deepspeed(
            model, optimizer=optimizer, config=config, device=world.device
        )
        layout = PartitionedLayout if stage == 3 else SlicedLayout
        return layout(engine, world), engine

    # For DeepSpeed the others are trainings of an fp32 model without ZeRO.
    without_zero = config | {"zero_optimization": zero | {"stage": 0}}
    engine = initialize_deepspeed(
        model, optimizer=optimizer, config=without_zero, device=world.device
    )
    reduces_nothing(engine)
    sums: dict[str, Any] = {
        "bucket_elements": zero["reduce_bucket_size"],
        "sent_as": DTYPES[config.get("communication_data_type", "fp32")],
    }
    if stage == 0:
        return PlainLayout(engine, world, **sums), engine
    return FlatLayout(engine, world, dtype=dtype, **sums), engine


def _cast_fixed_tables(model: nn.Module) -> None:
    """Give fixed position embeddings the dtype of the parameters, which were cast alone.

    A table in fp32 would promote all activations after it, which bf16 weights do not take.
    """
    for module in model.modules():
        dtypes = [p.dtype for p in module.parameters() if p.is_floating_point()]
        if not dtypes:
            continue
        for name in module._non_persistent_buffers_set:
            table = module._buffers[name]
            # Tables of integers, such as indices, stay as they are.
            if table is not None and table.is_floating_point():
                module._buffers[name] = table.to(dtypes[0])


# ---- DeepSpeed's configuration -------------------------------------------------------------------


def resolve_precision(settings: EngineSettings, device: torch.device) -> torch.dtype:
    """The dtype of the forward pass."""
    wanted = settings.precision
    # Most CPUs compute more slowly in bf16 than in fp32.
    if wanted == "auto":
        wanted = "bf16" if device.type == "cuda" else "fp32"
    if wanted == "fp16" and device.type != "cuda":
        raise UserError(
            f"fp16 needs a GPU, and this rank runs on {device.type}",
            where="engine.precision",
            allowed="auto, fp32",
            next_step="set engine.precision=auto",
        )
    return DTYPES[wanted]


def is_compiled(engine: EngineSettings, device: torch.device) -> bool:
    """Whether the blocks of models are compiled."""
    if engine.compile == "auto":
        return device.type == "cuda" and engine.zero_stage < 3
    return engine.compile


def deepspeed_config(
    settings: EngineSettings,
    *,
    micro_batch: int,
    accumulation: int,
    world_size: int,
    largest_parameter: int,
    clip_norm: float | None,
    dtype: torch.dtype,
    raw: Mapping[str, Any],
) -> dict[str, Any]:
    """The DeepSpeed dict of a run, with raw keys (see `raw_problems`) merged over it.

    largest_parameter: its elements.

    Settings whose defaults changed between releases (clipping, overflow check) or defeat overlap
    (bucket, overlap_comm) are always given.
    """
    zero = raw.get("zero_optimization")
    stage: int = settings.zero_stage

    # Nothing to shard, but DeepSpeed would copy all weights and gradients at every step.
    if world_size == 1 and dtype == torch.float32 and stage in (1, 2) and not zero:
        stage = 0
    config: dict[str, Any] = {
        "train_batch_size": micro_batch * accumulation * world_size,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip_norm or 0.0,
        "steps_per_print": 10**9,
        # Waits for the device twice in every micro-step; the loop measures throughput itself.
        "timers": {"throughput": {"enabled": False}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": torch.cuda.is_available() and world_size > 1,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            # Release weights after use. By default they stay until 10^9 others are used: all of
            # them, from the forward to the end of the backward pass.
            "stage3_max_reuse_distance": 0,
        },
    }
    config |= _precision(settings, dtype)
    if dtype != torch.float32 and stage > 0:
        # The error of a sum in half precision grows with the number of ranks.
        config["communication_data_type"] = "fp32"
        if world_size <= MAX_RANKS_IN_HALF:
            config["communication_data_type"] = DTYPE_NAMES[dtype]

    # Raw keys of a group replace single keys of ours, not the group.
    for key, value in raw.items():
        group = config.get(key)
        if isinstance(value, Mapping) and isinstance(group, Mapping):
            value = {**group, **value}
        config[key] = value

    if stage in (1, 2):
        # DeepSpeed frees a gradient larger than the bucket while its reduction still reads it (ZeRO
        # 2 with overlap_comm: reduce_ipg_grads records no stream for what other ranks own).
        zero = config["zero_optimization"]
        zero["reduce_bucket_size"] = max(zero["reduce_bucket_size"], largest_parameter)
    return config


def _precision(settings: EngineSettings, dtype: torch.dtype) -> dict[str, Any]:
    """What DeepSpeed is told of the precision. Gradients are summed in fp32 at every stage."""
    if dtype == torch.float32:
        return {}
    sums = {"data_types": {"grad_accum_dtype": "fp32"}}
    if dtype == torch.float16:
        # With a loss scale from 2^16 on, doubled after 1000 updates without overflow, halved at the
        # second overflow in a row.
        return {"fp16": {"enabled": True}, **sums}
    if settings.zero_stage == 0:
        # DeepSpeed has no stage 0 with fp32 accumulation beside bf16 weights. Autocast over fp32
        # weights is that: bf16 products, fp32 master weights.
        return {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    if settings.zero_stage == 1:
        return {}  # `FlatLayout` casts the weights
    return {"bf16": {"enabled": True, "check_grad_overflow": False}, **sums}
