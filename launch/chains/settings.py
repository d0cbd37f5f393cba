"""The run type of a chain: stages that use what earlier stages have made. Needs no torch.

Leaves out: the run files of the stages (`load`).
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal

from pydantic import Field

from vitscale.config.errors import did_you_mean
from vitscale.config.section import Items, Problems, Run, Section
from vitscale.runs.training import RUN_NAME

# Overrides that a chain makes itself.
OWN_KEYS = {"stage": "the run file", "name": "the names of chain and stage"}


class ChainStage(Section):
    """One stage: the run of a file, or several such runs."""

    name: str
    """Name of the stage: letters, digits, dot, dash, underscore."""
    config: str
    """Run file, relative to the current folder. Its `stage:` says what is run."""
    overrides: Items[str] = ()
    """Settings as on the command line, for example [launch.nodes=4]."""
    inputs: dict[str, str] = {}
    """Key of the run -> stage whose folder it is, for example {data.path: shards, init: pretrain}.
    The folder of a data preparation is that of its shards. If that stage has several runs, this
    stage has one for each of them. {init: trunk@6000}: a branch of a pre-training at that step."""
    after: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Further stages that must be done before."""
    sweep: dict[str, Annotated[tuple[Any, ...], Field(min_length=1, strict=False)]] = {}
    """Key -> values, for example {optim.lr: [0.003, 0.03]}: a run for every combination."""
    variants: dict[str, Annotated[tuple[str, ...], Field(strict=False)]] = {}
    """Name -> overrides, for example {wide: [model.width=192], deep: [model.depth=8]}: a run for
    each, and for every combination of the sweep. A run that starts from a variant of the same name
    has that one alone."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Stages that must be done before this one, each once."""
        sources = [stage_of(name) for name in self.inputs.values()]
        return tuple(dict.fromkeys([*sources, *self.after]))


class ChainRun(Run):
    """Stages from images to evaluated models, run or submitted by one command."""

    stage: Literal["chain"] = "chain"
    """`vitscale launch` runs files of this stage."""
    name: str
    """Name of the chain and of its folder."""
    output: str | None = None
    """Folder of all runs but the shards, whose folder is that of their file; null: runs/NAME."""
    overrides: Items[str] = ()
    """Settings of every run that has them, as on the command line, for example
    [launch.partition=NAME]."""
    stages: Items[ChainStage] = Field(min_length=1)
    """The stages, in any order."""

    @property
    def folder(self) -> str:
        return self.output or f"runs/{self.name}"

    def problems(self) -> Problems:
        allowed = "use letters, digits, '.', '-', '_', at most 100"
        if not RUN_NAME.fullmatch(self.name):
            yield "name", f"{self.name!r}: {allowed}"

        # Inputs name stages, and folders have their names.
        names = [stage.name for stage in self.stages]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield "stages", f"two stages have the name {name!r}; rename one"

        for stage in self.stages:
            if not RUN_NAME.fullmatch(stage.name):
                yield "stages", f"{stage.name!r}: {allowed}"
            for text in _stage_problems(stage):
                yield "stages", f"{stage.name}: {text}"
            for name in stage.needs:
                if name not in names:
                    advice = did_you_mean(name, names, f"one of {', '.join(names)}")
                    text = f"{stage.name}: there is no stage {name!r}; {advice}"
                    yield "stages", text

        try:
            TopologicalSorter(
                {stage.name: stage.needs for stage in self.stages}
            ).prepare()
        except CycleError as error:
            # graphlib lists each stage before those that need it.
            circle = " -> ".join(reversed(error.args[1]))
            text = f"need each other in a circle: {circle}; remove one reference"
            yield "stages", text


def _stage_problems(stage: ChainStage) -> Iterator[str]:
    given = [key_of(text) for text in stage.overrides]
    # A key may be in many variants, each of which makes another run.
    varied = {
        key_of(text) for overrides in stage.variants.values() for text in overrides
    }
    for key in sorted({*given, *varied, *stage.sweep} & OWN_KEYS.keys()):
        yield f"{key}: the chain sets it itself, from {OWN_KEYS[key]}"

    # One of them would win without a word.
    keys = [*stage.inputs, *stage.sweep, *varied, *given]
    for key in sorted({*stage.inputs, *stage.sweep}):
        if keys.count(key) > 1:
            yield f"{key} is given twice; keep one of overrides, inputs, sweep and variants"


def stage_of(source: str) -> str:
    """Return the stage of an input STAGE or STAGE@STEP."""
    return source.partition("@")[0]


def key_of(override: str) -> str:
    """Return the key of an override KEY=VALUE."""
    return override.partition("=")[0].strip()
