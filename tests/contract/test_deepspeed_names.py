"""The private names of DeepSpeed that the engine uses, and the release in which they were checked.

They may change in any release, so another version fails here: look each name up in its new source,
then change `DEEPSPEED` in vitscale/engine/deepspeed_parts.py and the requirement in pyproject.toml.
"""

import ast
import importlib.util
from importlib.metadata import version
from pathlib import Path

from tests.contract.tree import ROOT
from tests.support.tables import every
from vitscale.engine.deepspeed_parts import DEEPSPEED, LOSS_SCALER

FILE = ROOT / "vitscale/engine/deepspeed_parts.py"
# Each name that is not part of DeepSpeed's documentation, and the file that defines it: of the
# process, of the engine, of every wrapper of an optimiser, of ZeRO 1 and 2, and of ZeRO 3.
PRIVATE = dict(
    line.split()
    for line in """\
__compatible_ops__ ops/__init__.py
TORCH_AUTOCAST_INITIALIZED runtime/torch_autocast.py
_WORLD_GROUP utils/groups.py
enable_backward_allreduce runtime/engine.py
_global_grad_norm runtime/zero/stage_1_and_2.py
averaged_gradients runtime/zero/stage_1_and_2.py
get_grad_norm_direct runtime/zero/stage_1_and_2.py
loss_scaler runtime/zero/stage_1_and_2.py
loss_scale runtime/zero/stage_1_and_2.py
_hp_mapping runtime/zero/stage_1_and_2.py
bit16_groups_flat runtime/zero/stage_1_and_2.py
hp_fragment_address utils/tensor_fragment.py
lp_fragment_address utils/tensor_fragment.py
numel utils/tensor_fragment.py
parallel_partitioned_bit16_groups runtime/zero/stage_1_and_2.py
param_group_index utils/tensor_fragment.py
single_partition_of_fp32_groups runtime/zero/stage_1_and_2.py
start utils/tensor_fragment.py
_partition_all_parameters runtime/zero/stage3.py
_reassign_or_swap_out_partitioned_parameters runtime/zero/stage3.py
all_gather runtime/zero/partition_parameters.py
ds_numel runtime/zero/partition_parameters.py
ds_shape runtime/zero/partition_parameters.py
fp32_partitioned_groups_flat runtime/zero/stage3.py
get_param_id runtime/zero/stage3.py
grad_position runtime/zero/stage3.py
persistent_parameters runtime/zero/stage3.py
sub_group_to_group_id runtime/zero/stage3.py
""".splitlines()
)
# Set and read by their names.
PRIVATE |= dict.fromkeys(LOSS_SCALER, "runtime/fp16/loss_scaler.py")
# The names through which the file reaches DeepSpeed, and what it documents of them.
OBJECTS = set(
    """
    engine wrapper _wrapper _engine mapping parameter groups deepspeed torch_autocast
    lp_fragment_address hp_fragment_address ops persistent_parameters
    """.split()
)
PUBLIC = set(
    """
    initialize ops backward step module optimizer named_parameters shape data zero __version__
    """.split()
)


def used_names():
    """Attributes that the file reads or sets of DeepSpeed's objects."""
    names = set()
    for node in ast.walk(ast.parse(FILE.read_text())):
        if not isinstance(node, ast.Attribute):
            continue
        # Of a[0].b the holder is a.
        holder = node.value
        while isinstance(holder, ast.Subscript):
            holder = holder.value
        name = getattr(holder, "attr", "")
        if isinstance(holder, ast.Name):
            name = holder.id
        if name in OBJECTS:
            names.add(node.attr)
    return names - PUBLIC - OBJECTS.intersection({"_wrapper", "_engine"})


def test_every_private_name_is_listed():
    assert used_names() == PRIVATE.keys() - {*LOSS_SCALER}


@every(name=PRIVATE)
def test_deepspeed_defines_the_name(name):
    spec = importlib.util.find_spec("deepspeed")
    # Read and not imported: importing it takes seconds, and some modules need a GPU.
    assert name in (Path(spec.origin).parent / PRIVATE[name]).read_text()


def test_the_names_were_checked_in_the_installed_release():
    assert version("deepspeed") == DEEPSPEED
    assert f'"deepspeed=={DEEPSPEED}"' in (ROOT / "pyproject.toml").read_text()
