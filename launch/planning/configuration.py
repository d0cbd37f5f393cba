"""Print docs/configuration.md: every setting with what it may hold, its default and its meaning.

python -m launch.planning.configuration > docs/configuration.md
"""

from __future__ import annotations

import argparse

from finetune.settings import ExportRun, PredictRun, VisualizeRun
from launch.chains.settings import ChainRun
from launch.jobs.preparation import RUN_TYPES
from vitscale.config.reference import as_markdown, settings_reference
from vitscale.config.section import Run

COMMAND = "python -m launch.planning.configuration > docs/configuration.md"
INTRODUCTION = f"""\
# Configuration
A run is one YAML file, validated before anything heavy is imported:
```
python pretrain/main.py --config configs/vit_b16.yaml optim.lr=3e-4 data.val_split=null
python pretrain/main.py --config configs/vit_b16.yaml --print-config  # values, sources
python pretrain/main.py --help                   # groups; --help NAME: keys
```
- **Precedence**: command line > file > `base:` file > site file > default. `base:` names one
  YAML file, relative to the file that holds it. Groups are merged key by key, lists are replaced.
- **Site file**: your defaults of `launch` and `tracking` for all runs, in
  `~/.config/vitscale/site.yaml` or the file that `$VITSCALE_SITE` names; empty: none
  ([slurm.md](slurm.md#your-site-in-one-file)).
- **Command line**: any key as `group.key=value`; lists as `data.crop_area=[0.2,1]`, nothing as
  `key=null`.
- **Choices**: where a key can hold one of several groups, `name` chooses one:
  `objective.name=...`. A file that chooses another name than its base inherits only the keys
  that the new group has.
- **Values**: `1e-4` is a number; only `true` and `false` are truth values. YAML anchors, aliases,
  tags and duplicate keys are refused.
- **Mistakes** come in one report, with file and line, what is allowed and the nearest key; exit
  code 2. Conflicts between keys come in a second one, once each value is valid.

This page is written by `{COMMAND}`.
"""


def main() -> None:
    argparse.ArgumentParser(
        usage=COMMAND, description="Print the reference of all settings as Markdown."
    ).parse_args()
    own: dict[str, type[Run]] = {"predict": PredictRun, "export": ExportRun}
    own |= {"visualize": VisualizeRun, "chain": ChainRun}
    print(INTRODUCTION + as_markdown(settings_reference({**RUN_TYPES, **own})), end="")


if __name__ == "__main__":
    main()
