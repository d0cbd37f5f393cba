"""Read the site file: one user's defaults of the groups `launch` and `tracking`.

Owns: where the file is, and what it may hold.
Leaves out: merging it under the run's file, and validating its values (`loader`).
"""

from __future__ import annotations

import os
from collections.abc import Container
from functools import reduce

from vitscale.config.errors import UserError, nearest
from vitscale.config.inheritance import merge, read_layers
from vitscale.config.wording import kind_of
from vitscale.config.yaml_source import YamlNode

SITE_VARIABLE = "VITSCALE_SITE"
SITE_FILE = "~/.config/vitscale/site.yaml"
GROUPS = ("launch", "tracking")


def read_site(groups: Container[str], *, errors: list[UserError]) -> YamlNode | None:
    """The site file's groups that are in `groups`; None if there is no file.

    The file is $VITSCALE_SITE, none if that is empty, else `SITE_FILE` if it exists.
    """
    named = os.environ.get(SITE_VARIABLE)
    path = os.path.expanduser(SITE_FILE) if named is None else named
    if not path or (named is None and not os.path.lexists(path)):
        return None
    where = None if named is None else SITE_VARIABLE
    layers = read_layers(path, chain=(), errors=errors, where=where)
    if layers is None:
        return None
    root = reduce(merge, layers)
    assert isinstance(root.content, dict)
    kept = {}
    for key, node in root.content.items():
        where = f"{node.place}: {key}"
        if key not in GROUPS:
            best = nearest(key, GROUPS)
            errors.append(
                UserError(
                    f"{key} cannot be set in a site file",
                    where=where,
                    allowed=", ".join(GROUPS),
                    next_step=f"did you mean {best}?" if best else "set it in the run's file",
                )
            )
        elif node.content is None and not node.broken:
            continue  # a group whose keys are all comments
        elif not isinstance(node.content, dict) and not node.broken:
            what = f"{key} is {kind_of(node.content)} instead of keys and values"
            errors.append(UserError(what, where=where, allowed="a group of keys"))
        elif key in groups:
            kept[key] = node
    return YamlNode(kept, root.place)
