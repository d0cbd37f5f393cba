"""Read the chain or the study that a command line names.

    python launch/local.py --chain configs/chains/demo.yaml --num-procs 2
    python launch/slurm.py --study configs/studies/digits_objectives.yaml [--dry-run]

Leaves out: running and submitting it (`launch.plans`), and sweeps (`sweeps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from launch.plans.chains.graph import load_chain
from launch.plans.chains.settings import ChainRun
from launch.plans.command import SWITCHES, PlanCommand, split_option
from launch.plans.stages import load_study
from launch.studies.settings import StudyRun
from vitscale.config.command_line import load_command

CHAIN, STUDY = "--chain", "--study"


def names_a_plan(argv: Sequence[str]) -> bool:
    return any(word.partition("=")[0] in (CHAIN, STUDY) for word in argv)


def plan_command(argv: Sequence[str], *, script: str, counts: Sequence[str]) -> PlanCommand:
    """counts: the options that take a number of processes, with their meaning in `PlanCommand`."""
    option = next(name for word in argv if (name := word.partition("=")[0]) in (CHAIN, STUDY))
    others, numbers = split_option(argv, option, counts=counts)
    command = load_command(
        {"chain": ChainRun} if option == CHAIN else {"study": StudyRun},
        script=f"{script} {option}",
        description="Run stages that use what earlier stages have made."
        if option == CHAIN
        else "Train a grid of runs.",
        argv=others,
        switches=SWITCHES,
    )
    if isinstance(command.run, StudyRun):
        load = partial(load_study, command.run)
    else:
        assert isinstance(command.run, ChainRun)
        load = partial(load_chain, command.run)
    return PlanCommand(load=load, is_dry_run="--dry-run" in command.switches, **numbers)
