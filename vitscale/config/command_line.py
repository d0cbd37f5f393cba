"""Parse the command line that all scripts share.

Owns: --config, key=value overrides, --print-config, --help, and a script's own switches, options
and words.
Leaves out: reading and validating the configuration (`loader`), the list of keys (`reference`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NoReturn

from vitscale.config.errors import UserError, UserErrors, did_you_mean
from vitscale.config.loader import RunT, RunTypes, load_run, run_to_yaml, types_by_stage
from vitscale.config.reference import WIDTH, as_markdown, as_overview, settings_reference
from vitscale.config.section import is_list, tree_of
from vitscale.config.source import COMMAND_LINE

EPILOG = """\
Any setting can be given as key=value, for example optim.lr=1e-3 data.val_split=null
data.crop_area=[0.2,1]. Command line > file > base > site file > default; --print-config
shows all. The site file is $VITSCALE_SITE, or ~/.config/vitscale/site.yaml."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command(Generic[RunT]):
    """The parsed command line and its run."""

    run: RunT
    switches: frozenset[str]
    config_path: str | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, where=COMMAND_LINE, next_step="--help shows all switches")


def load_command(
    run_types: RunTypes[RunT],
    *,
    program: str,
    description: str,
    argv: Sequence[str] | None = None,
    needs_config: bool = True,
    examples: Sequence[str] = (),
    switches: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
    words_key: str | None = None,
) -> Command[RunT]:
    """Read the command line into a validated run.

    `program`: how it is started, for example vitscale pretrain.
    `run_types`: one run type, or {stage: run type} chosen by the file's `stage:`.
    `needs_config`: false where the command line alone can make a run.
    `examples`: commands to show when no configuration is given.
    `switches`: further switches without a value, {"--dry-run": "help text"}.
    `options`: further switches with a value, {"--to": "to"}; the same as the key to=VALUE.
    `words_key`: the key that words without `=` are the value of; several of them where it is a
    list. None: such words are errors.
    Raises UserErrors with all errors; SystemExit(0) after --help and --print-config.
    """
    options, switches, by_stage = options or {}, switches or {}, types_by_stage(run_types)
    takes = f"[--config FILE] [key=value ...] {words_key.upper()}" if words_key else None
    parser = _Parser(
        usage=f"{program} {takes or 'CONFIG [key=value ...]'}",
        description=description,
        epilog="\n\n".join([EPILOG, "\n".join(f"  {each}" for each in examples)]),
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=WIDTH),
        allow_abbrev=False,
        add_help=False,
    )
    parser.set_defaults(overrides=[], switches=[])
    parser.add_argument(
        "--config", metavar="FILE", help="a YAML file, or a name of `vitscale configs`"
    )
    for name, key in options.items():
        repeated: Any = {"action": "append", "dest": "overrides", "metavar": "VALUE"}
        text, override = f"the same as {key}=VALUE", f"{key}={{}}".format
        parser.add_argument(name, type=override, help=text, **repeated)
    for name, text in switches.items():
        parser.add_argument(name, dest="switches", action="append_const", const=name, help=text)
    text = "print the resolved configuration with the source of every value, and end"
    parser.add_argument("--print-config", action="store_true", help=text)
    text = "print this text, or the settings of these groups and keys, and end"
    parser.add_argument("--help", "-h", nargs="*", metavar="NAME", help=text)
    # Launchers add it; the environment (LOCAL_RANK) is what counts.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    found, rest = parser.parse_known_args(argv)
    if found.help is not None:
        reference = settings_reference(by_stage)
        overview = f"{parser.format_help()}\n{as_overview(reference)}"
        print(as_markdown(reference, found.help) if found.help else overview)
        raise SystemExit(0)
    errors = []
    for name in (word.partition("=")[0] for word in rest if word.startswith("-")):
        known = ["--config", *options, *switches, "--print-config", "--help"]
        what, step = f"unknown switch {name}", did_you_mean(name, known)
        allowed = ", ".join(known)
        errors.append(UserError(what, where=COMMAND_LINE, allowed=allowed, next_step=step))
    words = [word for word in rest if not word.startswith("-")]
    overrides = [word for word in words if words_key is None or "=" in word] + found.overrides
    if plain := [word for word in words if words_key is not None and "=" not in word]:
        takes_list = any(is_list(tree_of(t)["properties"][words_key]) for t in by_stage.values())
        # Quoted, because they are no YAML.
        value = plain if takes_list or len(plain) > 1 else plain[0]
        overrides.append(f"{words_key}={json.dumps(value, ensure_ascii=False)}")
    if found.config is None and needs_config:
        shown = examples or [f"{program} CONFIG  # vitscale configs lists them"]
        step = "\n    ".join(["one of", *shown, f"{program} --help"])
        error = UserError("no configuration given", where=COMMAND_LINE, next_step=step)
        raise UserErrors([*errors, error])
    loaded = load_run(run_types, found.config, overrides=overrides, errors=errors)
    if found.print_config:
        print(run_to_yaml(loaded.run, places=loaded.places), end="")
        raise SystemExit(0)
    switched = frozenset(found.switches)
    return Command(run=loaded.run, switches=switched, config_path=found.config)
