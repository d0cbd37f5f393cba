"""Find weights and optimiser states where DeepSpeed 0.19.8 keeps them: its private parts.

Each layout names the `Part` of each parameter that this rank saves; values are read and written
there.
"""

from __future__ import annotations

import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from vitscale.distributed.world import World, broadcast_tensor
from vitscale.engine.gradients import GradientSums

# DeepSpeed's autotuner imports mlflow where it is installed, which takes a second.
_hidden = sys.modules.setdefault("mlflow", None) is None  # type: ignore[arg-type]  # so Python marks it
# Else it warns of a CPU at every start.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
try:
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime import engine as deepspeed_engine
    from deepspeed.runtime import torch_autocast
    from deepspeed.utils import groups
finally:
    if _hidden:
        del sys.modules["mlflow"]

# The state of DeepSpeed's dynamic loss scale.
LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def initialize_deepspeed(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    device: torch.device,
) -> Any:
    """The DeepSpeed engine, which neither clips nor checks gradients; the guard does both."""
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed's CPU collectives through shared memory are compiled at first use, spin on the
        # cores that train, and collide with leftovers of a killed run of the same name. gloo does
        # not. On a GPU reading this dict would probe every compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed calls these at every ZeRO 3 step; newer versions of torch warn each time.
    deprecated = r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The values of one parameter that this rank saves, inside a tensor that its optimiser updates.

    Optimiser states have the same place in tensors of the same size.
    """

    name: str
    shape: torch.Size
    """Shape of the whole parameter."""
    start: int
    """Number of the first value in the flattened parameter."""
    updated: torch.Tensor
    offset: int
    """Number of the first value in `updated`, flattened."""
    num_values: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values in `updated`, or in a state of it: flat, and not copied."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.num_values)


def layout_of(engine: Any, world: World, *, zero_stage: int) -> Layout:
    if not hasattr(engine.optimizer, "optimizer"):  # DeepSpeed wrapped nothing around it
        return PlainLayout(engine, world)
    return (PartitionedLayout if zero_stage == 3 else FlatLayout)(engine, world)


class Layout(ABC):
    """Weights and optimiser states of one DeepSpeed engine."""

    _sums: GradientSums | None = None
    """None: DeepSpeed reduces the gradients."""

    def __init__(self, engine: Any, world: World) -> None:
        self._engine, self._world = engine, world
        self._wrapper = engine.optimizer
        self.base_optimizer = getattr(self._wrapper, "optimizer", self._wrapper)
        """The torch optimiser that updates `updated_tensors`."""

    @abstractmethod
    def updated_tensors(self) -> list[torch.Tensor]:
        """The tensors that the base optimiser updates and keeps its state for."""

    @abstractmethod
    def parts(self, named: Iterable[tuple[str, Any]]) -> Iterator[Part]:
        """The parts that this rank saves; those of all ranks make every parameter once."""

    @abstractmethod
    def publish_weights(self) -> None:
        """Copy the updated tensors to the weights of the forward pass. Collective."""

    def share_parts(self, names: Iterable[str]) -> None:
        """After all ranks changed their parts, give each what it needs of the others'. Collective.

        names: of optimiser states. ZeRO shards these: only weights are needed elsewhere.
        """
        self.publish_weights()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch."""
        self._engine.backward(loss)
        if self._sums is not None:
            self._sums.finish()

    def update(self) -> None:
        """Update the weights at the end of an accumulation."""
        self._engine.step()
        if self._sums is not None:
            self._sums.clear()

    def norm(self) -> Any:
        """Global norm of the unclipped gradients of the update; None before the first."""
        # The wrapper's: DeepSpeed's engine copies it only after the update.
        return self._wrapper._global_grad_norm

    def loss_scaler(self) -> dict[str, Any]:
        """The state of fp16's loss scale."""
        return {name: getattr(self._wrapper.loss_scaler, name) for name in LOSS_SCALER}

    def set_loss_scaler(self, state: Mapping[str, Any]) -> None:
        for name in LOSS_SCALER:
            setattr(self._wrapper.loss_scaler, name, state[name])


class PlainLayout(Layout):
    """Without ZeRO: whole fp32 tensors on every rank; rank r saves each i with i mod ranks = r."""

    def __init__(self, engine: Any, world: World) -> None:
        super().__init__(engine, world)
        self._wrapper._global_grad_norm = None  # as DeepSpeed's wrappers have it
        # DeepSpeed would copy all gradients into one buffer and back, after the backward pass.
        engine.enable_backward_allreduce = False
        if world.world_size > 1:
            parameters = list(engine.module.parameters())
            ends = list(accumulate(each.numel() for each in parameters))
            places = zip(parameters, [0, *ends], strict=False)
            self._sums = GradientSums(engine, places, size=ends[-1])

    def updated_tensors(self) -> list[torch.Tensor]:
        return [p for group in self._wrapper.param_groups for p in group["params"]]

    def parts(self, named: Iterable[tuple[str, Any]]) -> Iterator[Part]:
        for name, p in list(named)[self._world.rank :: self._world.world_size]:
            size = p.numel()
            yield Part(name=name, shape=p.shape, start=0, updated=p, offset=0, num_values=size)

    def publish_weights(self) -> None:
        """The updated tensors are those of the forward pass."""

    def share_parts(self, names: Iterable[str]) -> None:
        for number, parameter in enumerate(self._engine.module.parameters()):
            states = [self._wrapper.state[parameter][name] for name in names]
            for tensor in (parameter.detach(), *states):
                broadcast_tensor(tensor, source=number % self._world.world_size)

    def update(self) -> None:
        # Gradients are averaged over the ranks by now, and not yet clipped.
        gradients = [p.grad for p in self._engine.module.parameters() if p.grad is not None]
        self._wrapper._global_grad_norm = torch.nn.utils.get_total_norm(gradients)
        super().update()


class FlatLayout(Layout):
    """ZeRO 1 and 2: a slice of each group's flat fp32 tensor.

    At stage 1 gradients are one flat tensor, and the update a few calls for all parameters, where
    DeepSpeed makes twenty for each.
    """

    def __init__(self, engine: Any, world: World) -> None:
        super().__init__(engine, world)
        wrapper = self._wrapper
        if wrapper.partition_gradients or wrapper.cpu_offload or wrapper.dtype == torch.float16:
            return
        for hook in wrapper._grad_acc_hooks:
            hook.remove()
        engine.enable_backward_allreduce = False
        wrapper.step = self._step
        flats, members = wrapper.bit16_groups_flat, wrapper.bit16_groups
        starts = [0, *accumulate(each.numel() for each in flats)]
        self._sums = GradientSums(
            engine,
            (
                (each, start + each.storage_offset() - flat.storage_offset())
                for start, flat, group in zip(starts, flats, members, strict=False)
                for each in group
            ),
            size=starts[-1],
            dtype=wrapper.gradient_accumulation_dtype,
            sent_as=wrapper.communication_data_type,
        )
        sizes = wrapper.partition_size
        self._own_sums = [
            self._sums.values.narrow(0, start + world.rank * size, size)
            for start, size in zip(starts, sizes, strict=False)
        ]
        # Lengths in this rank's slices: a gap, a gradient, a gap, ...; gradients of each group.
        ends, rows = [0], list[torch.Tensor]()
        for start, group, size in zip([0, *accumulate(sizes)], members, sizes, strict=False):
            parts = self.parts(("", each) for each in group)
            pieces = sorted((part.offset, part.num_values) for part in parts) or [(0, size)]
            rows.append(torch.arange(len(pieces)) + len(ends) // 2)
            ends += chain(*((start + first, start + first + count) for first, count in pieces))
        self._cuts = [stop - start for start, stop in pairwise([*ends, sum(sizes)])]
        self._of_groups = pad_sequence(rows, batch_first=True, padding_value=-1).to(world.device)

    def _step(self) -> None:
        """Update this rank's slices and give all ranks the weights."""
        assert self._sums is not None
        several, updated = self._world.world_size > 1, self.updated_tensors()
        own = (torch.cat(self._own_sums) if several else self._sums.values).float()
        gradients = own.split([each.numel() for each in updated])
        # DeepSpeed's norm, to the bit: of each gradient, each group, all.
        norms = torch._foreach_norm(own.split(self._cuts)[1::2], dtype=torch.float64)
        squares = nn.functional.pad(torch.stack(norms).pow(2), (0, 1))
        of_groups = squares[self._of_groups].sum(dim=1).float()
        if several:
            dist.all_reduce(of_groups)
        self._wrapper._global_grad_norm = torch.linalg.vector_norm(of_groups.pow(0.5))
        for each, gradient in zip(updated, gradients, strict=True):
            each.grad = gradient
        self.base_optimizer.step()
        for each in updated:
            each.grad = None
        self.publish_weights()

    def updated_tensors(self) -> list[torch.Tensor]:
        return list(self._wrapper.single_partition_of_fp32_groups)

    def parts(self, named: Iterable[tuple[str, Any]]) -> Iterator[Part]:
        updated = self.updated_tensors()
        for name, parameter in named:
            mapping = parameter._hp_mapping
            if mapping is not None:  # else all of it belongs to other ranks
                yield Part(
                    name=name,
                    shape=parameter.shape,
                    start=mapping.lp_fragment_address.start,
                    updated=updated[mapping.param_group_index],
                    offset=mapping.hp_fragment_address.start,
                    num_values=mapping.hp_fragment_address.numel,
                )

    @torch.no_grad()
    def publish_weights(self) -> None:
        wrapper, rank = self._wrapper, self._world.rank
        own = [parts[rank] for parts in wrapper.parallel_partitioned_bit16_groups]
        torch._foreach_copy_(own, self.updated_tensors())
        if self._world.world_size > 1:
            for flat, part in zip(wrapper.bit16_groups_flat, own, strict=True):
                dist.all_gather_into_tensor(flat, part)


class PartitionedLayout(Layout):
    """ZeRO 3: each rank holds an equal slice of every parameter; the last ones may hold padding."""

    def updated_tensors(self) -> list[torch.Tensor]:
        return list(self._wrapper.fp32_partitioned_groups_flat)

    def parts(self, named: Iterable[tuple[str, Any]]) -> Iterator[Part]:
        updated, wrapper = self.updated_tensors(), self._wrapper
        for name, parameter in named:
            number, offset, size = wrapper.grad_position[wrapper.get_param_id(parameter)]
            start = size * self._world.rank
            if start < parameter.ds_numel:
                yield Part(
                    name=name,
                    shape=parameter.ds_shape,
                    start=start,
                    updated=updated[number],
                    offset=offset,
                    num_values=min(size, parameter.ds_numel - start),
                )

    def publish_weights(self) -> None:
        wrapper = self._wrapper
        wrapper._partition_all_parameters()
        for number in range(len(wrapper.fp32_partitioned_groups_flat)):
            wrapper._reassign_or_swap_out_partitioned_parameters(number)
        if wrapper.persistent_parameters:
            wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
