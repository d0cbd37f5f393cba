"""SimCLR against equation 1 of its paper, written out with loops in fp64, on several ranks."""

import math

import pytest
import torch
import yaml

from pretrain.objectives.contrast import contrastive_loss
from pretrain.run import PretrainRun
from tests.support.ranks.warm_ranks import on_ranks
from tests.support.tables import rows
from vitscale.objectives.objective import Supervised, SupervisedSettings
from vitscale.training.session import build_model

RUN = yaml.safe_load("""
name: x
data: {path: s, global_batch: 8, views: [{name: global, count: 2}]}
model: {width: 16, depth: 1, num_heads: 2, mlp_width: 24, patch_size: 4, image_size: 16}
optim: {lr: 0.001}
schedule: {steps: 10}
objective: {name: simclr}
""")
