"""Start DeepSpeed, and find what it keeps: all that is read and changed of its private parts.

ZeRO 2, ZeRO 3 and fp16 are DeepSpeed's. At ZeRO 0 and 1 it runs the model, counts micro-batches and
steps the optimiser; `layouts` does the rest. A contract test lists every private name used here.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vitscale.config.errors import RankError, UserError
from vitscale.distributed.world import World, gather_objects
from vitscale.engine.layouts import Layout, Part

# DeepSpeed's autotuner imports mlflow where it is installed, which takes a second.
_hidden = sys.modules.setdefault("mlflow", None) is None  # type: ignore[arg-type]  # so Python marks it
# Otherwise it warns of a CPU at every start.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
try:
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.runtime import torch_autocast
    from deepspeed.utils import groups
finally:
    if _hidden:
        del sys.modules["mlflow"]

# Its private parts change between releases; see the contract test of their names. Before this one a
# NaN in one group of gradients gave a finite norm, and all weights became NaN without a word.
DEEPSPEED = "0.19.8"
# The state of DeepSpeed's dynamic loss scale.
LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def initialize_deepspeed(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    device: torch.device,
) -> Any:
    """The DeepSpeed engine, which neither clips nor checks gradients; the guard does both.

    Raises UserError for another release.
    """
    if deepspeed.__version__ != DEEPSPEED:
        raise UserError(
            f"DeepSpeed {deepspeed.__version__} is installed, whose inner parts may differ",
            where="engine",
            allowed=f"deepspeed=={DEEPSPEED}",
            next_step=f"pip install deepspeed=={DEEPSPEED}",
        )

    if device.type == "cpu":
        _compute_on_cpu()

    # DeepSpeed calls these at every ZeRO 3 step; newer versions of torch warn each time.
    deprecated = (
        r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"
    )
    warnings.filterwarnings("ignore", message=deprecated, category=FutureWarning)

    # This replaces a clone of the world, with connections of its own and a time-out of 30 min.
    groups._WORLD_GROUP = dist.group.WORLD

    # A stage 0 with autocast sets it for good; later engines would sum gradients in bf16.
    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False

    with _gpu_as_local_rank(device):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=config | {"gradient_clipping": 0.0},
            dist_init_required=False,
        )
    return engine


def reduces_nothing(engine: Any) -> None:
    """Stop a stage 0 from sending gradients, which it copies into one buffer and back."""
    engine.enable_backward_allreduce = False


def _compute_on_cpu() -> None:
    """Make DeepSpeed use the CPU, on a machine with GPUs too: it takes these where it sees them."""
    if get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())

    # DeepSpeed's CPU collectives through shared memory are compiled at first use, spin on the cores
    # that train, and collide with leftovers of a killed run of the same name. gloo does not. No
    # other kernel of DeepSpeed is used, and to ask which could be compiled would start compilers.
    deepspeed.ops.__compatible_ops__ = {}


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


class WrappedLayout(Layout):
    """A layout that DeepSpeed's optimiser wrapper keeps, with the gradients it reduces itself.

    It reduces a gradient when it arrives, so the ranks must have gradients of the same parameters
    in the same micro-batch: another set would be added to other parameters, or hang.
    """

    def __init__(self, engine: Any, world: World) -> None:
        super().__init__(engine, world)
        self._wrapper = engine.optimizer
        self.base_optimizer = engine.optimizer.optimizer
        named = engine.module.named_parameters()
        self._names = {id(p): name for name, p in named if p.requires_grad}
        self._unused: frozenset[str] | None = None
        """Names of the parameters that no loss reaches; None before the first micro-batch."""
        self._norm_of_group = self._wrapper.get_grad_norm_direct
        self._wrapper.get_grad_norm_direct = self._counted_norm

    def _counted_norm(self, gradients: Any, *parameters: Any) -> Any:
        """DeepSpeed's norm of the gradients of a group, if it counts; -1 for one with NaN."""
        norm = self._norm_of_group(gradients, *parameters)
        for number, of_group in self._wrapper.averaged_gradients.items():
            if of_group is gradients:
                share = self.shares()[self._group_of(number)]
                norm = torch.where(norm < 0, norm, norm * share)
        return norm

    def _group_of(self, number: int) -> int:
        """The optimiser's group of one of DeepSpeed's."""
        return number

    def backward(self, loss: torch.Tensor) -> None:
        """Raises UserError on all ranks, or RankError on one, when the ranks' graphs differ."""
        if self._world.world_size > 1:
            self._check_graph(loss)
        self._engine.backward(loss)

    def _check_graph(self, loss: torch.Tensor) -> None:
        # Reached are parameters to which the backward pass of this loss would add gradients.
        reached = _tensors_with_gradients(loss)
        unused = frozenset(
            name for key, name in self._names.items() if key not in reached
        )

        # Compared once: later only a rank whose own graph changes can differ from the others.
        if self._unused is None:
            self._unused = unused
            for rank, others in enumerate(gather_objects(unused)):
                if others != unused:
                    name = min(others ^ unused)
                    raise UserError(
                        f"the loss of some ranks does not use {name}: rank {self._world.rank} has "
                        f"{len(unused)} such parameters, rank {rank} {len(others)}",
                        where="objective",
                        next_step="set engine.zero_stage to 0 or 1, or let every loss use them all",
                    )

        elif unused != self._unused:
            name = min(unused ^ self._unused)
            verb = "does not use" if name in unused else "uses"
            raise RankError(
                f"the loss {verb} {name}, unlike the losses before it",
                where="objective",
                next_step="set engine.zero_stage to 0 or 1, or use the same parameters every time",
            )

    def update(self) -> None:
        self._engine.step()

    def norm(self) -> Any:
        # DeepSpeed's engine copies the norm from the wrapper only after the update.
        return self._wrapper._global_grad_norm

    def loss_scale(self) -> float:
        """Factor on losses in fp16."""
        return float(self._wrapper.loss_scale)

    def loss_scaler(self) -> dict[str, Any]:
        """The state of fp16's loss scale."""
        return {name: getattr(self._wrapper.loss_scaler, name) for name in LOSS_SCALER}

    def set_loss_scaler(self, state: Mapping[str, Any]) -> None:
        for name in LOSS_SCALER:
            setattr(self._wrapper.loss_scaler, name, state[name])


def _tensors_with_gradients(loss: torch.Tensor) -> set[int]:
    """The ids of all tensors that a backward pass of `loss` adds gradients to."""
    reached: set[int] = set()
    seen: set[Any] = set()
    # A list instead of recursion: the graph of a deep model is deeper than Python's stack.
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Leaves of the graph, which hold the parameters, have a `variable`.
        if hasattr(node, "variable"):
            reached.add(id(node.variable))
        waiting += [function for function, _ in node.next_functions]
    return reached


class SlicedLayout(WrappedLayout):
    """ZeRO 2, and ZeRO 1 in fp16: a slice of each group's flat fp32 tensor."""

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
        wrapper = self._wrapper
        rank = self._world.rank
        own = [parts[rank] for parts in wrapper.parallel_partitioned_bit16_groups]
        # Each rank rounds its fp32 slice to the dtype of the forward pass, which needs all slices.
        torch._foreach_copy_(own, self.updated_tensors())
        if self._world.world_size > 1:
            for flat, part in zip(wrapper.bit16_groups_flat, own, strict=True):
                dist.all_gather_into_tensor(flat, part)


class PartitionedLayout(WrappedLayout):
    """ZeRO 3: each rank holds an equal slice of every parameter; the last ones may hold padding."""

    def _group_of(self, number: int) -> int:
        # A group of more than 10^9 values is several here.
        return int(self._wrapper.sub_group_to_group_id[number])

    def updated_tensors(self) -> list[torch.Tensor]:
        return list(self._wrapper.fp32_partitioned_groups_flat)

    def parts(self, named: Iterable[tuple[str, Any]]) -> Iterator[Part]:
        updated = self.updated_tensors()
        wrapper = self._wrapper
        for name, parameter in named:
            number, offset, size = wrapper.grad_position[
                wrapper.get_param_id(parameter)
            ]
            # Every slice has the same size, so the last ranks may have nothing but padding.
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

    def set_frozen(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        # Leaving the block sends the first rank's values, and cuts them into slices again.
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if self._world.is_first:
                parameter.data.copy_(values)

    def publish_weights(self) -> None:
        wrapper = self._wrapper
        wrapper._partition_all_parameters()
        for number in range(len(wrapper.fp32_partitioned_groups_flat)):
            wrapper._reassign_or_swap_out_partitioned_parameters(number)
        # Small parameters stay whole on every rank, so their new values are gathered at once.
        if wrapper.persistent_parameters:
            wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
