"""Read and write weights and optimiser states where DeepSpeed keeps them.

Owns: the state in private parts of DeepSpeed, one class per layout. `PlainLayout`: no ZeRO, whole
tensors on every rank. `FlatLayout`: ZeRO 1 and 2, one flat fp32 tensor per parameter group, of
which each rank holds a slice. `PartitionedLayout`: ZeRO 3, each parameter in equal slices.
Leaves out: what is trained, averaged, saved or compared (`engine`).

Written for DeepSpeed 0.19.8.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vitscale.distributed.world import World, broadcast_tensor


@contextmanager
def _kept_out(module: str) -> Iterator[None]:
    """Let imports of a module fail, unless it is imported."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # so Python marks it
    try:
        yield
    finally:
        del sys.modules[module]


# DeepSpeed's autotuner imports mlflow where it is installed, which takes a second.
with _kept_out("mlflow"):
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import engine as deepspeed_engine
    from deepspeed.runtime import torch_autocast
    from deepspeed.utils import (
        groups,
        safe_get_local_fp32_param,
        safe_get_local_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )
    from deepspeed.utils import logger as deepspeed_logger

# The state of DeepSpeed's dynamic loss scale.
LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
# DeepSpeed adds attributes to parameters, hence Any.
Named = Iterable[tuple[str, Any]]


def initialize_deepspeed(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    device: torch.device,
) -> Any:
    """The DeepSpeed engine, which neither clips nor checks gradients; the guard does both."""
    deepspeed_logger.setLevel(logging.WARNING)
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed's CPU collectives through shared memory are compiled at first use, spin on the
        # cores that train, and collide with leftovers of a killed run of the same name. gloo does
        # not. On a GPU reading this dict would probe every compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed calls these at every ZeRO 3 step; newer versions of torch warn each time.
    deprecated = (
        r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    )
    warnings.filterwarnings("ignore", message=deprecated, category=FutureWarning)
    # Instead of a clone of the world, which would have its own connections, and 30 min of time-out.
    groups._WORLD_GROUP = dist.group.WORLD
    # In bf16 with sums of gradients in fp32 DeepSpeed would take another wrapper at stage 1: no
    # overlap, one all-reduce of everything, fp32 gradients never freed (`BF16_Optimizer`).
    deepspeed_engine.BFLOAT16 = deepspeed_engine.ZERO_OPTIMIZATION
    # A stage 0 with autocast sets it for good; later engines would sum gradients in bf16.
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    with _gpu_as_local_rank(device):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=config | {"gradient_clipping": 0.0},
            dist_init_required=False,
        )
    _cast_fixed_tables(engine.module)
    return engine


@contextmanager
def _gpu_as_local_rank(device: torch.device) -> Iterator[None]:
    """DeepSpeed takes LOCAL_RANK for the number of the GPU: 0 for a task that sees one GPU."""
    own = os.environ["LOCAL_RANK"]
    if device.index is not None:
        os.environ["LOCAL_RANK"] = str(device.index)
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = own


def _cast_fixed_tables(model: nn.Module) -> None:
    """Give fixed position embeddings the dtype of the parameters, which DeepSpeed casts alone.

    A table in fp32 would promote all activations after it, which bf16 weights do not take.
    """
    for module in model.modules():
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
        for name in module._non_persistent_buffers_set:
            table = module._buffers[name]
            if dtype is not None and table is not None and table.is_floating_point():
                module._buffers[name] = table.to(dtype)


def layout_of(engine: Any, world: World, *, zero_stage: int) -> Layout:
    """The layout of a DeepSpeed engine."""
    if not hasattr(engine.optimizer, "optimizer"):  # DeepSpeed wrapped nothing around it
        return PlainLayout(engine, world)
    return (PartitionedLayout if zero_stage == 3 else FlatLayout)(engine, world)


class Layout(ABC):
    """Weights and optimiser states of one DeepSpeed engine.

    `kind` is None for the weights, else the name of an optimiser state.
    """

    def __init__(self, engine: Any, world: World) -> None:
        self._engine, self._world = engine, world
        self._wrapper = engine.optimizer

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimiser that updates `updated_tensors`."""
        return self._wrapper.optimizer

    @abstractmethod
    def updated_tensors(self) -> list[torch.Tensor]:
        """The tensors that the base optimiser updates and keeps its state for."""

    @abstractmethod
    def own_part(self, parameter: Any, kind: str | None, number: int) -> tuple[int, torch.Tensor]:
        """The flat part of the `number`-th parameter that this rank saves, and its start."""

    @torch.no_grad()
    def set_own_part(
        self, parameter: Any, part: torch.Tensor, value: torch.Tensor, kind: str | None
    ) -> None:
        """Overwrite a part that `own_part` gave. Needs no communication."""
        part.copy_(value)

    @abstractmethod
    def share_parts(self, named: Named, kinds: Iterable[str]) -> None:
        """Give every rank what it needs of the parts that others have set. Collective."""

    def shape(self, parameter: Any) -> torch.Size:
        """The shape of the whole parameter."""
        return parameter.shape

    def measure_norm(self) -> None:  # noqa: B027  # does nothing here
        """Called before an update. ZeRO's optimisers measure the norm themselves."""

    def norm(self) -> Any:
        """Global norm of the unclipped gradients of the update; None before the first."""
        # The wrapper's: DeepSpeed's engine copies it only after the update.
        return self._wrapper._global_grad_norm

    @abstractmethod
    def publish_weights(self) -> None:
        """Copy the updated tensors to the weights of the forward pass, as after an update."""

    def link_states(self) -> None:  # noqa: B027  # does nothing here
        """Let DeepSpeed find the optimiser states of each parameter."""

    def loss_scaler(self) -> dict[str, Any]:
        """The state of fp16's loss scale."""
        return {name: getattr(self._wrapper.loss_scaler, name) for name in LOSS_SCALER}

    def set_loss_scaler(self, state: Mapping[str, Any]) -> None:
        for name in LOSS_SCALER:
            setattr(self._wrapper.loss_scaler, name, state[name])


class PlainLayout(Layout):
    """Without ZeRO: whole fp32 tensors, the same on every rank."""

    def __init__(self, engine: Any, world: World) -> None:
        super().__init__(engine, world)
        self._norm: torch.Tensor | None = None
        if world.world_size == 1:
            # DeepSpeed would copy all gradients into one buffer and back, to reduce nothing.
            engine.enable_backward_allreduce = False

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        return self._wrapper

    def updated_tensors(self) -> list[torch.Tensor]:
        return [p for group in self._wrapper.param_groups for p in group["params"]]

    def own_part(self, parameter: Any, kind: str | None, number: int) -> tuple[int, torch.Tensor]:
        if number % self._world.world_size != self._world.rank:
            return 0, torch.empty(0)
        return 0, self._whole(parameter, kind).view(-1)

    def share_parts(self, named: Named, kinds: Iterable[str]) -> None:
        for number, (_, parameter) in enumerate(named):
            for kind in (None, *kinds):
                tensor = self._whole(parameter, kind).detach()
                broadcast_tensor(tensor, source=number % self._world.world_size)

    def measure_norm(self) -> None:
        # Gradients are averaged over the ranks by now, and not yet clipped.
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        self._norm = torch.nn.utils.get_total_norm(gradients)

    def norm(self) -> Any:
        return self._norm

    def publish_weights(self) -> None:
        """The updated tensors are those of the forward pass."""

    def _whole(self, parameter: Any, kind: str | None) -> torch.Tensor:
        return parameter if kind is None else self._wrapper.state[parameter][kind]


class FlatLayout(Layout):
    """ZeRO 1 and 2: a slice of each group's flat fp32 tensor."""

    def updated_tensors(self) -> list[torch.Tensor]:
        return list(self._wrapper.single_partition_of_fp32_groups)

    def own_part(self, parameter: Any, kind: str | None, number: int) -> tuple[int, torch.Tensor]:
        mapping = parameter._hp_mapping
        if mapping is None:  # all of it belongs to other ranks
            return 0, torch.empty(0)
        return mapping.lp_fragment_address.start, mapping.get_hp_fragment(kind)

    def share_parts(self, named: Named, kinds: Iterable[str]) -> None:
        self.publish_weights()

    def publish_weights(self) -> None:
        self._wrapper.update_lp_params()

    def link_states(self) -> None:
        # DeepSpeed does so once, inside the first step and after the first parameter group only,
        # when later groups have no state yet: their moments would stay unknown.
        self._wrapper._hp_optimizer_states_linked = False
        self._wrapper._lazy_init_hp_params_optimizer_state()


class PartitionedLayout(Layout):
    """ZeRO 3: each rank holds an equal slice of every parameter; the last ones may hold padding."""

    def updated_tensors(self) -> list[torch.Tensor]:
        return list(self._wrapper.fp32_partitioned_groups_flat)

    def shape(self, parameter: Any) -> torch.Size:
        return parameter.ds_shape

    def own_part(self, parameter: Any, kind: str | None, number: int) -> tuple[int, torch.Tensor]:
        start = parameter.ds_tensor.numel() * self._world.rank
        if kind is None:
            part = safe_get_local_fp32_param(parameter)
        else:
            part = safe_get_local_optimizer_state(parameter, kind)
        return start, part.view(-1)[: max(0, parameter.ds_numel - start)]

    @torch.no_grad()
    def set_own_part(
        self, parameter: Any, part: torch.Tensor, value: torch.Tensor, kind: str | None
    ) -> None:
        # With offloading `part` is a copy.
        padded = torch.zeros(parameter.ds_tensor.numel(), dtype=value.dtype, device=part.device)
        padded[: value.numel()] = value
        if kind is None:
            safe_set_local_fp32_param(parameter, padded)
            parameter.ds_tensor.data.copy_(padded)  # the copy of the forward pass
        else:
            safe_set_local_optimizer_state(parameter, padded, kind)

    def share_parts(self, named: Named, kinds: Iterable[str]) -> None:
        """The weights of the forward pass are gathered when it needs them."""

    def publish_weights(self) -> None:
        wrapper = self._wrapper
        wrapper._partition_all_parameters()
        for number in range(len(wrapper.fp32_partitioned_groups_flat)):
            wrapper._reassign_or_swap_out_partitioned_parameters(number)
        if wrapper.persistent_parameters:
            wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
