"""Where weights, gradients and optimiser states lie at ZeRO 0 and 1.

Each layout names the `Part` of each parameter that this rank saves; values are read and written
there. Leaves out: the layouts of ZeRO 2 and 3 and of fp16, which are DeepSpeed's
(`deepspeed_parts`).

Shapes are those of the parameters; a flat tensor holds the values of several, one after another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vitscale.distributed.world import World, broadcast_tensor
from vitscale.engine.gradients import GradientSums

# Slices start at a multiple of 4 bytes in bf16 too, as collectives on GPUs want it.
ALIGNED_ELEMENTS = 2


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


class Layout(ABC):
    """Weights, gradients and optimiser states of one DeepSpeed engine. Methods are collective."""

    def __init__(self, engine: Any, world: World) -> None:
        """engine: DeepSpeed's."""
        self._engine = engine
        self._world = world
        self.base_optimizer: torch.optim.Optimizer = engine.optimizer
        """The torch optimiser that updates `updated_tensors`."""

    @abstractmethod
    def updated_tensors(self) -> list[torch.Tensor]:
        """The tensors that the base optimiser updates and keeps its state for."""

    @abstractmethod
    def parts(self, named: Iterable[tuple[str, Any]]) -> Iterator[Part]:
        """The parts that this rank saves; those of all ranks make every parameter once."""

    @abstractmethod
    def publish_weights(self) -> None:
        """Copy the updated tensors to the weights of the forward pass."""

    def share_parts(self, names: Iterable[str]) -> None:
        """After all ranks changed their parts, give each what it needs of the others'.

        names: of optimiser states. ZeRO shards these: only weights are needed elsewhere.
        """
        self.publish_weights()

    def set_frozen(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Give a parameter that is not trained the same values on all ranks, in its own dtype."""
        parameter.data.copy_(values)

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a micro-batch."""

    @abstractmethod
    def update(self) -> None:
        """Update the weights at the end of an accumulation, and forget the gradients."""

    @abstractmethod
    def norm(self) -> Any:
        """Global norm of the unclipped gradients of the update; NaN before the first.

        Those of frozen groups do not count, since they must not shrink the others: DINO clips each
        tensor before it drops the gradient of its last layer, and DINOv2 each module.
        """

    def shares(self) -> list[float]:
        """How much each group counts in the norm: 0 if frozen. NaN times 0 is still NaN."""
        groups = self.base_optimizer.param_groups
        return [float(not group.get("is_frozen")) for group in groups]

    def close(self) -> None:
        """Remove all hooks, so that another engine can be built."""
        self._engine.destroy()


class OwnLayout(Layout):
    """A layout whose gradients `GradientSums` adds up and whose optimiser is torch's alone."""

    _sums: GradientSums | None
    """None: autograd adds up the gradients, and there is no other rank."""
    _norm: Any = math.nan

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss)
        if self._sums is not None:
            self._sums.finish()

    def update(self) -> None:
        # Before the step, which clips by this norm and then forgets the gradients.
        self._norm = self._global_norm()

        # Steps the base optimiser, and sets the gradients of all parameters to None.
        self._engine.step()
        self.publish_weights()

        if self._sums is not None:
            self._sums.clear()

    def norm(self) -> Any:
        return self._norm

    def close(self) -> None:
        super().close()
        if self._sums is not None:
            self._sums.close()

    @abstractmethod
    def _global_norm(self) -> torch.Tensor:
        """Norm of all gradients of the update, averaged over the ranks; fp32 scalar."""


class PlainLayout(OwnLayout):
    """Without ZeRO: whole fp32 tensors on every rank; rank r saves each i with i mod ranks = r."""

    def __init__(
        self, engine: Any, world: World, *, bucket_elements: int, sent_as: torch.dtype
    ) -> None:
        """bucket_elements, sent_as: of `GradientSums`."""
        super().__init__(engine, world)
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]
        self._sums = None

        # One rank has nothing to send, and autograd keeps fp32 gradients without a copy.
        if world.world_size > 1:
            self._sums = GradientSums(
                [self._parameters],
                starts=[0],
                size=sum(parameter.numel() for parameter in self._parameters),
                forward_order=self._parameters,
                bucket_elements=bucket_elements,
                sent_as=sent_as,
                is_last=engine.is_gradient_accumulation_boundary,
            )

    def updated_tensors(self) -> list[torch.Tensor]:
        return [
            p for group in self.base_optimizer.param_groups for p in group["params"]
        ]

    def parts(self, named: Iterable[tuple[str, Any]]) -> Iterator[Part]:
        # Every rank saves every n-th parameter, so that all ranks write about as much.
        for name, parameter in list(named)[self._world.rank :: self._world.world_size]:
            yield Part(
                name=name,
                shape=parameter.shape,
                start=0,
                updated=parameter,
                offset=0,
                num_values=parameter.numel(),
            )

    def publish_weights(self) -> None:
        """The updated tensors are those of the forward pass."""

    def share_parts(self, names: Iterable[str]) -> None:
        for number, parameter in enumerate(self._parameters):
            states = [self.base_optimizer.state[parameter][name] for name in names]
            for tensor in (parameter.detach(), *states):
                # The rank that saves a parameter has read it; see `parts`.
                broadcast_tensor(tensor, source=number % self._world.world_size)

    def _global_norm(self) -> torch.Tensor:
        # A parameter that no loss has used is decayed here as on several ranks and at other stages,
        # where its gradient is zero; torch's optimisers leave out what has none.
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

        share_of: dict[Any, float] = {}
        groups = self.base_optimizer.param_groups
        for group, share in zip(groups, self.shares(), strict=True):
            share_of |= dict.fromkeys(group["params"], share)
        norms = torch._foreach_norm([p.grad for p in self._parameters])
        norms = torch._foreach_mul(norms, [share_of[p] for p in self._parameters])
        return torch.linalg.vector_norm(torch.stack(norms))


class FlatLayout(OwnLayout):
    """ZeRO 1: the fp32 weights and optimiser states of each group are spread over the ranks.

    The parameters of a group lie in one flat tensor of the forward pass's dtype, which is cut into
    as many equal slices as there are ranks. A rank's optimiser updates the fp32 weights of its
    slice, and all ranks then gather the others'. In fp32 these weights are the slice itself.
    An update is a few calls for each group. Source: Rajbhandari et al. 2020 (ZeRO), section 5.1.
    """

    def __init__(
        self,
        engine: Any,
        world: World,
        *,
        dtype: torch.dtype,
        bucket_elements: int,
        sent_as: torch.dtype,
    ) -> None:
        """dtype: of the forward pass; bucket_elements, sent_as: of `GradientSums`."""
        super().__init__(engine, world)
        param_groups = self.base_optimizer.param_groups
        members = [list(group["params"]) for group in param_groups]

        # Every group is padded, so that all ranks have slices of one size.
        alignment = ALIGNED_ELEMENTS * world.world_size
        sizes = [
            alignment * math.ceil(sum(p.numel() for p in group) / alignment)
            for group in members
        ]
        starts = [0, *accumulate(sizes)][:-1]
        device = world.device
        self._flats = [torch.zeros(size, dtype=dtype, device=device) for size in sizes]
        self._group_and_offset = _move_into(self._flats, members)
        # Parameters that are not trained are in no group, but the forward pass needs them, too.
        for parameter in engine.module.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)

        self._sums = GradientSums(
            members,
            starts=starts,
            size=sum(sizes),
            forward_order=list(engine.module.parameters()),
            bucket_elements=bucket_elements,
            sent_as=sent_as,
            is_last=engine.is_gradient_accumulation_boundary,
        )

        # This rank updates its slice of each group, by the gradients of that slice.
        self._slice_sizes = [size // world.world_size for size in sizes]
        self._slices = [
            flat.narrow(0, world.rank * size, size)
            for flat, size in zip(self._flats, self._slice_sizes, strict=True)
        ]
        self._masters = [values.float() for values in self._slices]
        self._gradients = [
            self._sums.values.narrow(0, start + world.rank * size, size)
            for start, size in zip(starts, self._slice_sizes, strict=True)
        ]
        # The optimiser sees one tensor per group: this rank's master weights.
        for group, master, gradient in zip(
            param_groups, self._masters, self._gradients, strict=True
        ):
            master.grad = gradient
            group["params"] = [master]

    def updated_tensors(self) -> list[torch.Tensor]:
        return self._masters

    def parts(self, named: Iterable[tuple[str, Any]]) -> Iterator[Part]:
        for name, parameter in named:
            group, offset = self._group_and_offset[parameter]

            # The parameter and this rank's slice, as ranges of the group's flat tensor.
            slice_start = self._world.rank * self._slice_sizes[group]
            first = max(offset, slice_start)
            stop = min(
                offset + parameter.numel(), slice_start + self._slice_sizes[group]
            )
            if first < stop:
                yield Part(
                    name=name,
                    shape=parameter.shape,
                    start=first - offset,
                    updated=self._masters[group],
                    offset=first - slice_start,
                    num_values=stop - first,
                )

    @torch.no_grad()
    def publish_weights(self) -> None:
        # In fp32 the master weights are the slices themselves.
        if self._masters[0].dtype != self._slices[0].dtype:
            torch._foreach_copy_(self._slices, self._masters)
        if self._world.world_size > 1:
            for flat, values in zip(self._flats, self._slices, strict=True):
                dist.all_gather_into_tensor(flat, values)

    def _global_norm(self) -> torch.Tensor:
        """In fp64 until the root, so that it hardly depends on how many ranks have slices."""
        norms = torch._foreach_norm(self._gradients, dtype=torch.float64)
        norms = torch._foreach_mul(norms, self.shares())
        square = torch.stack(norms).square().sum()
        if self._world.world_size > 1:
            dist.all_reduce(square)
        return square.sqrt().float()


@torch.no_grad()
def _move_into(
    flats: Sequence[torch.Tensor], members: Sequence[Sequence[nn.Parameter]]
) -> dict[nn.Parameter, tuple[int, int]]:
    """Make each parameter a view of its group's flat tensor, rounded to its dtype.

    Returns the number of its group, and of its first value there.
    """
    group_and_offset: dict[nn.Parameter, tuple[int, int]] = {}
    for number, (flat, group) in enumerate(zip(flats, members, strict=True)):
        offset = 0
        for parameter in group:
            view = flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
            view.copy_(parameter)
            # From here on the parameter and the flat tensor share their memory.
            parameter.data = view
            group_and_offset[parameter] = (number, offset)
            offset += parameter.numel()
    return group_and_offset


class WholeModel:
    """A model that is not trained, whole on every rank, whose parameters lie in one flat tensor."""

    def __init__(
        self, model: nn.Module, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """model: is moved and rounded; values of its parameters are set by the caller."""
        self.model = model.to(device=device, dtype=dtype).requires_grad_(False).eval()
        named = dict(model.named_parameters())
        size = sum(parameter.numel() for parameter in named.values())
        self.flat = torch.zeros(size, dtype=dtype, device=device)
        _move_into([self.flat], [list(named.values())])
        self.values = {name: parameter.view(-1) for name, parameter in named.items()}
        """Flat views of `flat`, by the names of the parameters."""
