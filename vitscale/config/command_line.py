"""The command line that all scripts share.

Owns: --config, key=value overrides, --resume, --print-config, --help, and a script's own switches.
Leaves out: reading and validating the configuration (`loader`).
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

from vitscale.config.errors import UserError, UserErrors, nearest
from vitscale.config.loader import RunT, RunTypes, load_run, run_to_yaml
from vitscale.config.schema import groups_in
from vitscale.config.wording import describe_field

COMMON_SWITCHES = {
    "--config": "FILE  the run's YAML file",
    "--resume": "VALUE  the same as checkpoint.resume=VALUE",
    "--print-config": "print the resolved configuration with the source of every value, and end",
    "--help": "print this text, and end",
}
# Launchers add it; the environment (LOCAL_RANK) is what counts.
IGNORED = ("--local_rank", "--local-rank")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command(Generic[RunT]):
    """What was asked for on the command line."""

    run: RunT
    sources: dict[str, str]
    """Dotted key -> "configs/x.yaml:12", "command line" or "default"."""
    switches: frozenset[str]
    config_path: str | None


@dataclass(slots=True)
class _Arguments:
    config: str | None = None
    overrides: list[str] = field(default_factory=list)
    switches: set[str] = field(default_factory=set)
    errors: list[UserError] = field(default_factory=list)


def load_command(
    run_types: RunTypes[RunT],
    *,
    script: str,
    description: str,
    argv: Sequence[str] | None = None,
    default_config: str | None = None,
    switches: Mapping[str, str] | None = None,
) -> Command[RunT]:
    """Read the command line into a validated run.

    `run_types`: one run type, or {stage: run type} chosen by the file's `stage:`.
    `switches`: further switches without a value, {"--dry-run": "help text"}.
    Raises UserErrors with every mistake; SystemExit(0) after --help and --print-config.
    """
    known = COMMON_SWITCHES | dict(switches or {})
    arguments = _split(sys.argv[1:] if argv is None else argv, known=known)
    if "--help" in arguments.switches:
        print(help_text(run_types, script=script, description=description, switches=known,
                        default_config=default_config))  # fmt: skip
        raise SystemExit(0)
    config = arguments.config or default_config
    if config is None:
        arguments.errors.append(
            UserError(
                "no configuration given",
                where="command line",
                next_step=f"python {script} --config FILE (see configs/), or --help",
            )
        )
        raise UserErrors(arguments.errors)
    loaded = load_run(run_types, config, overrides=arguments.overrides, errors=arguments.errors)
    if "--print-config" in arguments.switches:
        print(run_to_yaml(loaded.run, sources=loaded.sources), end="")
        raise SystemExit(0)
    return Command(
        run=loaded.run,
        sources=loaded.sources,
        switches=frozenset(arguments.switches),
        config_path=config,
    )


def _split(argv: Sequence[str], *, known: Mapping[str, str]) -> _Arguments:
    found = _Arguments()
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            found.overrides.append(word)
            continue
        name, equals, value = word.partition("=")
        name = "--help" if name == "-h" else name
        if name in ("--config", "--resume", *IGNORED):
            if not equals:
                value = words.pop(0) if words and not words[0].startswith("--") else ""
            if name in IGNORED:
                continue
            if not value:
                found.errors.append(UserError(f"{name} needs a value", where="command line"))
            elif name == "--config":
                found.config = value
            else:
                found.overrides.append(f"checkpoint.resume={value}")
        elif name not in known:
            best = nearest(name, list(known))
            found.errors.append(
                UserError(
                    f"unknown switch {name}",
                    where="command line",
                    allowed=", ".join(known),
                    next_step=f"did you mean {best}?" if best else None,
                )
            )
        elif equals:
            found.errors.append(UserError(f"{name} takes no value", where="command line"))
        else:
            found.switches.add(name)
    return found


def help_text(
    run_types: RunTypes[RunT],
    *,
    script: str,
    description: str,
    switches: Mapping[str, str],
    default_config: str | None,
) -> str:
    types = dict(run_types) if isinstance(run_types, Mapping) else {"": run_types}
    config = "[--config FILE]" if default_config else "--config FILE"
    own = " ".join(f"[{name}]" for name in switches if name not in COMMON_SWITCHES)
    lines = [
        description,
        "",
        f"usage: python {script} {config} [key=value ...] {own}".rstrip(),
        *([f"default --config: {default_config}"] if default_config else []),
        "",
        "switches:",
        *(f"  {name:<16} {text}" for name, text in switches.items()),
        "",
        "Any setting can be given as key=value, for example optim.lr=1e-3 data.val_split=null",
        "data.crop_area=[0.2,1]. Command line > file > base > default; --print-config shows all.",
    ]
    for stage, run_type in types.items():
        lines += ["", f"keys of stage {stage}:" if stage else "keys:"]
        for name, info in run_type.model_fields.items():
            groups = groups_in(info)
            if groups is not None and not groups.is_list:
                keys = dict.fromkeys(
                    key for member in groups.members for key in member.model_fields
                )
                text = f"{name}.{{{', '.join(keys)}}}"
                lines += _wrapped(text, indent=f"  {'':<12} ")
            else:
                lines.append(f"  {name:<12} {describe_field(info)}")
    return "\n".join(lines)


def _wrapped(text: str, *, indent: str) -> list[str]:
    group, _, members = text.partition(".")
    first = f"  {group:<12} "
    return textwrap.wrap(
        members.strip("{}"), width=96, initial_indent=first, subsequent_indent=indent
    )
