"""Flip single bits in the memory of training ranks, and count what finds them.

    python benchmarks/faults/bit_flips.py --flips 200 --seed 1

Two ranks (gloo, CPU) train a small ViT with AdamW, an average of the weights, accumulation and
clipping, at ZeRO 0 to 3, in fp32 and bf16. Every case starts from the same state, trains a few
steps and flips one random bit of one random element of one rank: of its weights for the forward
pass, their fp32 originals, first or second moments, average or gradient, before the forward pass or
before the update of a random step. It is found

- on the way, by the comparison of `engine.compare_weights_every_steps` (here after every step), or
  because the update is skipped as not finite;
- by a replay: the last state, as a checkpoint has it, or a loss or gradient norm, as the journal
  has them, differs by a bit from that of undisturbed training.

A flip without effect is no error and is drawn again: in the end every value on every rank, and in
the journal, is what it is without the flip. The update may overwrite a weight before it is used, or
rounding remove the difference in a moment or an average, at once or after some steps.
Exit code 1 if a flip with an effect was found by neither.

Owns: flips, cases and the table. Leaves out: the training (`tests/support/engine`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support/engine")]

try:
    from tests.support.ranks.rank_processes import run_ranks
except ModuleNotFoundError as error:
    print(f"{error}. Run: pip install -e .", file=sys.stderr)
    raise SystemExit(2) from None

NUM_RANKS, WARM_UP, STEPS = 2, 3, 4
STAGES, PRECISIONS = (0, 1, 2, 3), ("float32", "bfloat16")
WHAT = {
    "weights": None,
    "fp32 originals": "model",
    "first moments": "exp_avg",
    "second moments": "exp_avg_sq",
    "average": "ema",
    "gradient": None,
}
# A rank trains all cases of a layout.
TIMEOUT_S = 7200.0
RESULT = "RESULT "


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip:
    """One bit. Its tensor, element and bit are shares in [0, 1) of what there is to choose from."""

    what: str
    rank: int
    step: int
    when: str
    tensor: float
    element: float
    bit: float


def draw(numbers: random.Random, *, stage: int) -> Flip:
    # Without ZeRO the weights of the forward pass are the fp32 originals.
    kinds = [each for each in WHAT if stage or each != "fp32 originals"]
    return Flip(
        what=numbers.choice(kinds),
        rank=numbers.randrange(NUM_RANKS),
        step=WARM_UP + numbers.randrange(STEPS),
        when=numbers.choice(("forward", "update")),
        tensor=numbers.random(),
        element=numbers.random(),
        bit=numbers.random(),
    )


class Subject:
    """An engine that trains the same steps again and again."""

    def __init__(self, world: Any, *, stage: int, precision: str) -> None:
        import torch
        from engine_training import engine_losses, new_engine, reader, whole_state

        self.world, self.stage = world, stage
        self.engine = new_engine(world, stage=stage, dtype=getattr(torch, precision))
        engine_losses(self.engine, world, start=0, stop=WARM_UP)
        state = {name: each.clone() for name, each in whole_state(self.engine).items()}
        self._read = reader(state)
        self._steps, self._counters = self.engine.optimizer_steps(), self.engine.export_counters()

    def train(self, flip: Flip | None) -> dict[str, Any]:
        """Train all steps from the same state. Returns what this rank has and what it found."""
        from plain_training import ACCUMULATION, ADAMW

        engine, found = self.engine, None
        engine.import_state(self._read, optimizer_steps=self._steps)
        engine._layout.publish_weights()
        engine.import_counters(self._counters)
        journal = []
        for step in range(WARM_UP, WARM_UP + STEPS):
            engine.set_learning_rate(ADAMW.rate(step))
            here = flip if flip and (flip.step, flip.rank) == (step, self.world.rank) else None
            hook = self._flip_gradient(here) if here and here.what == "gradient" else None
            if here and hook is None and here.when == "forward":
                self._flip(here)
            for part in range(ACCUMULATION):
                journal.append(self._backward(step, part))
                if hook is not None:
                    hook.remove()
                elif here and here.when == "update" and part == ACCUMULATION - 1:
                    self._flip(here)
                engine.step()
            journal.append(engine.gradient_norm())
            found = found or engine.disagreement()
        if engine.health().skipped > self._counters["guard"]["skipped"]:
            found = found or "skipped"
        saved = {name: _bytes(each) for name, each in engine.export_state().items()}
        counters = json.dumps(engine.export_counters())
        seen = {
            "last": self._digest(),
            "journal": repr(journal),
            "saved": saved,
            "counters": counters,
        }
        return seen | {"found": found}

    def _backward(self, step: int, part: int) -> float:
        import torch
        from plain_training import ACCUMULATION, BATCH, data

        images, labels = data(step)
        each = BATCH // ACCUMULATION // self.world.world_size
        first = (part * self.world.world_size + self.world.rank) * each
        rows = slice(first, first + each)
        logits = self.engine.logits(images[rows])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[rows])
        self.engine.backward(loss)
        return loss.item()

    def _parameters(self) -> list[Any]:
        return list(self.engine._engine.module.parameters())

    def _flip(self, flip: Flip) -> None:
        if flip.what == "weights":
            tensors = [self._forward_copy(each) for each in self._parameters()]
        else:
            tensors = [t for name, t in self._owned() if name.partition(".")[0] == WHAT[flip.what]]
        flip_bit(tensors[int(flip.tensor * len(tensors))], flip)

    def _owned(self) -> Iterator[tuple[str, Any]]:
        """(name, values) of all that this rank holds, without ZeRO whole tensors."""
        engine = self.engine
        if self.stage:
            yield from ((name, part) for name, _, _, _, part in engine._own_parts())
            return
        for name, parameter in engine._parameters():
            for kind in (None, *engine._state_names):
                yield f"{kind or 'model'}.{name}", engine._layout._whole(parameter, kind)

    def _forward_copy(self, parameter: Any) -> Any:
        """What the forward pass reads; ZeRO 3 keeps small tensors gathered."""
        if self.stage == 3 and parameter.data.numel() != parameter.ds_numel:
            return parameter.ds_tensor.data
        return parameter.data

    def _flip_gradient(self, flip: Flip) -> Any:
        parameters = self._parameters()

        def flipped(gradient: Any) -> Any:
            changed = gradient.clone()
            flip_bit(changed, flip)
            return changed

        return parameters[int(flip.tensor * len(parameters))].register_hook(flipped)

    def _digest(self) -> str:
        """Of all weights, originals and states of this rank."""
        import blake3

        digest = blake3.blake3()
        copies = [self._forward_copy(each) for each in self._parameters()]
        for tensor in [*copies, *(each for _, each in self._owned())]:
            digest.update(_bytes(tensor))
        return digest.hexdigest()


def flip_bit(tensor: Any, flip: Flip) -> None:
    import torch

    bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    flat = tensor.detach().view(-1).view(bits)
    bit = int(flip.bit * 8 * tensor.element_size())
    place = int(flip.element * flat.numel())
    value = (int(flat[place]) ^ (1 << bit)) & ((1 << 8 * tensor.element_size()) - 1)
    top = 1 << (8 * tensor.element_size() - 1)
    flat[place] = value - 2 * top if value >= top else value


def _bytes(tensor: Any) -> bytes:
    import torch

    found: bytes = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return found


def run_cases(*, flips: int, seed: int, say: Callable[[str], None]) -> None:
    """One rank: print a row for each flip with an effect, and the number of those without."""
    from vitscale.distributed.world import gather_objects, process_group

    layouts = [(precision, stage) for precision in PRECISIONS for stage in STAGES]
    with process_group(device="cpu", timeout_min=5, num_threads=1) as world:
        for number, (precision, stage) in enumerate(layouts):
            wanted = (flips - number + len(layouts) - 1) // len(layouts)
            numbers = random.Random(f"{seed} {precision} {stage}")
            subject = Subject(world, stage=stage, precision=precision)
            sound = subject.train(None)
            while wanted:
                flip = draw(numbers, stage=stage)
                now = subject.train(flip)
                changed = any(now[key] != sound[key] for key in ("last", "journal"))
                replayed = any(now[key] != sound[key] for key in ("journal", "saved", "counters"))
                ranks = gather_objects((changed, replayed))
                has_effect = any(each for each, _ in ranks)
                wanted -= has_effect
                row = {"what": flip.what, "stage": stage, "precision": precision}
                row |= {"effect": has_effect, "way": now["found"] is not None}
                row |= {"replay": any(each for _, each in ranks)}
                if world.is_first:
                    say(RESULT + json.dumps(row))
            # Every case began from the same state.
            again = subject.train(None)
            assert again == sound, "a case has changed the ones after it"


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """On the way / by a replay / by either / of, for each kind and stage."""
    yield f"{'':<16}" + "".join(f"{f'ZeRO {stage}':>16}" for stage in STAGES)
    for what in WHAT:
        cells = []
        for stage in STAGES:
            here = [each for each in rows if (each["what"], each["stage"]) == (what, stage)]
            counts: Counter[str] = Counter()
            for each in here:
                counts += Counter(way=each["way"], replay=each["replay"], of=1)
                counts["either"] += each["way"] or each["replay"]
            cells.append("/".join(str(counts[key]) for key in ("way", "replay", "either", "of")))
        yield f"{what:<16}" + "".join(f"{cell:>16}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="Flip single bits and count what finds them.")
    parser.add_argument("--flips", type=int, default=200, help="with an effect; default 200")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        from vitscale.distributed.failures.ending import run_rank_script

        run_rank_script(
            lambda: run_cases(
                flips=arguments.flips, seed=arguments.seed, say=lambda text: print(text, flush=True)
            )
        )
        return
    start = time.perf_counter()
    command = [__file__, "--flips", str(arguments.flips), "--seed", str(arguments.seed)]
    outputs = run_ranks(command, num_ranks=NUM_RANKS, cwd=Path.cwd(), timeout_s=TIMEOUT_S)
    if any(code for code, _ in outputs):
        sys.exit("\n".join(text[-3000:] for _, text in outputs))
    lines = outputs[0][1].splitlines()
    rows = [json.loads(line.removeprefix(RESULT)) for line in lines if line.startswith(RESULT)]
    kept = [each for each in rows if each["effect"]]
    found = [each for each in kept if each["way"] or each["replay"]]
    print("found on the way / by a replay / by either / of flips with an effect")
    print("\n".join(table(kept)))
    seconds = time.perf_counter() - start
    print(
        f"{len(found)} of {len(kept)} found, {sum(each['way'] for each in kept)} of them on the "
        f"way; {len(rows) - len(kept)} flips without an effect; {seconds:.0f} s"
    )
    for each in kept:
        if each not in found:
            print(f"not found: {each}")
    raise SystemExit(len(found) < len(kept))


if __name__ == "__main__":
    main()
