"""Parse the command line that all scripts share.

Owns: --config, key=value overrides, --resume, --print-config, --help, and a script's own switches.
Leaves out: reading and validating the configuration (`loader`), the list of keys (`reference`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic

from vitscale.config.errors import UserError, UserErrors, nearest
from vitscale.config.loader import RunT, RunTypes, load_run, run_to_yaml, types_by_stage
from vitscale.config.reference import WIDTH, as_text, settings_reference

WITH_VALUE = {
    "--config": ("FILE", "the run's YAML file"),
    "--resume": ("VALUE", "the same as checkpoint.resume=VALUE"),
}
COMMON_SWITCHES = {
    "--print-config": "print the resolved configuration with the source of every value, and end",
    "--help": "print this text, and end",
}
# Launchers add it; the environment (LOCAL_RANK) is what counts.
IGNORED = ("--local_rank", "--local-rank")
EPILOG = """\
Any setting can be given as key=value, for example optim.lr=1e-3 data.val_split=null
data.crop_area=[0.2,1]. Command line > file > base > default; --print-config shows all.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command(Generic[RunT]):
    """The parsed command line and its run."""

    run: RunT
    sources: dict[str, str]
    """Dotted key -> "configs/x.yaml:12", "command line" or "default"."""
    switches: frozenset[str]
    config_path: str | None


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
    Raises UserErrors with all errors; SystemExit(0) after --help and --print-config.
    """
    known = dict(switches or {}) | COMMON_SWITCHES
    parser = _parser(script, description, switches=known, default_config=default_config)
    words = [
        "--help" if word == "-h" else word for word in (sys.argv[1:] if argv is None else argv)
    ]
    with_value = [word for word in words if word.partition("=")[0] in known and "=" in word]
    found, others = parser.parse_known_args([word for word in words if word not in with_value])
    given = vars(found)
    asked = frozenset(switch for switch in known if given[switch])
    if "--help" in asked:
        print(parser.format_help() + as_text(settings_reference(types_by_stage(run_types))))
        raise SystemExit(0)
    overrides = [word for word in others if not word.startswith("-")]
    errors = [_unknown_switch(word, known) for word in others if word.startswith("-")]
    errors += [
        UserError(f"{word.partition('=')[0]} takes no value", where="command line")
        for word in with_value
    ]
    errors += [
        UserError(f"{option} needs a value", where="command line")
        for option in WITH_VALUE
        if given[option] == ""
    ]
    if given["--resume"]:
        overrides.append(f"checkpoint.resume={given['--resume']}")
    config = given["--config"] or default_config
    if config is None:
        next_step = f"python {script} --config FILE (see configs/), or --help"
        errors.append(
            UserError("no configuration given", where="command line", next_step=next_step)
        )
        raise UserErrors(errors)
    loaded = load_run(run_types, config, overrides=overrides, errors=errors)
    if "--print-config" in asked:
        print(run_to_yaml(loaded.run, sources=loaded.sources), end="")
        raise SystemExit(0)
    return Command(run=loaded.run, sources=loaded.sources, switches=asked, config_path=config)


def _parser(
    script: str, description: str, *, switches: Mapping[str, str], default_config: str | None
) -> argparse.ArgumentParser:
    """A parser that never exits; `load_command` reports unknown words with the other errors."""
    config = "[--config FILE]" if default_config else "--config FILE"
    own = " ".join(f"[{name}]" for name in switches if name not in COMMON_SWITCHES)
    parser = argparse.ArgumentParser(
        usage=f"python {script} {config} [key=value ...] {own}".rstrip(),
        description=description,
        epilog=EPILOG + (f"Default --config: {default_config}\n" if default_config else ""),
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=WIDTH),
        add_help=False,
        allow_abbrev=False,
    )
    # A missing value becomes an empty one, so that parsing continues and finds further errors.
    for option, (value, text) in WITH_VALUE.items():
        parser.add_argument(option, dest=option, nargs="?", const="", metavar=value, help=text)
    for switch, text in switches.items():
        parser.add_argument(switch, dest=switch, action="store_true", help=text)
    parser.add_argument(*IGNORED, nargs="?", help=argparse.SUPPRESS)
    return parser


def _unknown_switch(word: str, known: Mapping[str, str]) -> UserError:
    name = word.partition("=")[0]
    best = nearest(name, [*WITH_VALUE, *known])
    return UserError(
        f"unknown switch {name}",
        where="command line",
        allowed=", ".join([*WITH_VALUE, *known]),
        next_step=f"did you mean {best}?" if best else None,
    )
