"""What the process imports that forks the ranks of `tests.ranks_gather.ranks`: once, for all."""

import torch._dynamo  # noqa: F401

import tests.ranks_gather.scenes
import tests.ranks_gather.test_step_agreement  # noqa: F401
from tests.dying import die_with_parent, let_forks_die

die_with_parent()
let_forks_die()
