"""Programs: what is trained, and with what operations; made from a seed and a number alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tests.fuzz import models

AMBIENT = (
    "inference",
    "no_grad",
    "enable_grad",
    "meta",
    "autocast",
    "anomaly",
    "deterministic",
    "float64",
    "function_mode",
)


@dataclass(frozen=True)
class Operation:
    """One operation: its kind, the seed of its data, and what it was drawn with."""

    kind: str
    seed: int
    args: dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A training program: `config` says what is built, `operations` what is done with it."""

    name: str
    config: dict[str, Any]
    operations: tuple[Operation, ...]

    def shortened(self, operations: list[Operation]) -> Program:
        """Return the program with these operations only."""
        return Program(self.name, self.config, tuple(operations))

    def to_json(self) -> str:
        """Return text that `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Program:
        """Read a program."""
        read = json.loads(text)
        operations = tuple(Operation(**operation) for operation in read["operations"])
        return Program(read["name"], read["config"], operations)

    def listing(self) -> str:
        """Return the program for people, an operation on a line."""
        lines = [f"program {self.name}"]
        lines += [f"  {key}: {value}" for key, value in self.config.items()]
        for n, operation in enumerate(self.operations):
            usual = {"micro": 1, "zero": "none", "path": "call", "scale": 1.0}
            said = {k: v for k, v in operation.args.items() if v not in (None, usual.get(k))}
            lines.append(f"  {n:3d} {operation.kind} {said} seed={operation.seed}")
        return "\n".join(lines)


OPTIMIZERS: dict[str, list[dict[str, Any]]] = {
    "AdamW": [{}, {"amsgrad": True}, {"maximize": True}, {"foreach": True}, {"tensor_lr": True}],
    "Adam": [{}, {"weight_decay": 0.05, "amsgrad": True}, {"betas": [0.8, 0.95]}],
    "SGD": [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.8, "dampening": 0.3, "maximize": True},
    ],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{}, {"weight_decay": 0.1}],
    "Adamax": [{}, {"weight_decay": 0.1}],
    "RMSprop": [{}, {"momentum": 0.5, "centered": True}],
    "Adagrad": [{}, {"lr_decay": 0.1}],
    "Adadelta": [{}, {"rho": 0.8}],
    "Rprop": [{}],
    "ASGD": [{}, {"weight_decay": 0.01}],
}
COMMON = ("AdamW", "AdamW", "Adam", "SGD", "SGD")


def _optimizer(rng: random.Random, names: list[str]) -> dict[str, Any]:
    kind = rng.choice(COMMON) if rng.random() < 0.7 else rng.choice(sorted(OPTIMIZERS))
    shared = {"lr": rng.choice([1e-3, 3e-3, 1e-2]), **rng.choice(OPTIMIZERS[kind])}
    count = min(rng.choice([1, 1, 2, 3]), len(names))
    split: list[list[str]] = [[] for _ in range(count)]
    for n, name in enumerate(names):
        split[n if n < count else rng.randrange(count)].append(name)
    groups = []
    for n, members in enumerate(split):
        own = dict(shared)
        if n:
            own["lr"] = shared["lr"] * 2
            own["weight_decay"] = rng.choice([0.0, 0.02])
        groups.append({"names": members, "hyper": own})
    return {"class": kind, "groups": groups}


def options(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    """Draw how state is streamed; what a store keeps for good comes from `config`."""
    drawn: dict[str, Any] = {
        "overlap": rng.choice([None, "forward", "backward"]) if config["model"] else None,
        "chunk_bytes": rng.choice([4096, 4096, 8192, 1 << 20]),
        "ring_chunks": rng.choice([2, 3, 6]),
        "host_memory": rng.choice([0, 0, 20_000, "1GiB"]),
        "master": config["master"],
        "verify": rng.choice(["restored", "restored", "always"]),
        "threads": rng.choice([None, 1, 4]),
    }
    if config["scaler"] and drawn["overlap"] == "backward":
        drawn["overlap"] = "forward"
    return drawn


def _config(rng: random.Random, seed: int) -> dict[str, Any]:
    shape = models.draw(rng)
    network = models.Network(shape, 0)
    names = [name for name, _ in network.named_parameters() if not name.startswith("late.")]
    late = rng.random() < 0.4
    if not late:
        names += ["late.weight", "late.bias"]
    frozen = [name for name in names if rng.random() < 0.1]
    outside = [name for name in frozen if rng.random() < 0.5]  # not given to any optimizer
    given = [name for name in names if name not in outside]
    dtypes = {parameter.dtype for parameter in network.parameters()}
    half = any(str(dtype) == "torch.float16" for dtype in dtypes)
    config: dict[str, Any] = {
        "seed": seed,
        "shape": shape,
        "frozen": frozen,
        "late": late,
        "model": rng.random() < 0.8,
        "master": rng.choice(["float32", "float32", "float32", "split"]),
        "scaler": rng.choice([64.0, 1024.0]) if half or rng.random() < 0.15 else None,
        "directories": rng.choice([1, 1, 1, 2, 3]),
        "keep": {"last": rng.choice([1, 2, 2, 3]), "every": rng.choice([0, 0, 4])},
        "scheduler": rng.choice([None, None, *["step", "cosine", "lambda", "plateau"]]),
        "threads": 2 if rng.random() < 0.1 else 1,
        "denormal": rng.random() < 0.1,
        "disk": rng.random() < 0.2,
        "hooks": [
            hook
            for hook in ("step", "forward", "forward_pre", "gradient", "accumulated")
            if rng.random() < 0.12
        ],
    }
    if half and rng.random() < 0.5:
        config["scaler"] = None
    if late:
        config["scheduler"] = None  # torch's stop with an error where a group has joined
    if rng.random() < 0.12 and len(given) > 3:
        parts = [given[::2], given[1::2]]
        config["scaler"] = None
    else:
        parts = [given]
    config["optimizers"] = [_optimizer(rng, names) for names in parts]
    if any(g["hyper"].get("tensor_lr") for o in config["optimizers"] for g in o["groups"]):
        config["scheduler"] = None if config["scheduler"] == "plateau" else config["scheduler"]
    config["options"] = options(rng, config)
    return config


def _train(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    backward = config["options"]["overlap"] == "backward"
    plain = rng.random() < 0.4
    args: dict[str, Any] = {
        "micro": 1,
        "clip": None,
        "zero": "none",
        "path": "call",
        "recompute": None,
        "closure": False,
        "fails": None,
        "ambient": None,
        "scale": 1.0,
    }
    if plain:
        return args
    args["zero"] = rng.choice(["none", "zero", "skip", "model"])
    args["path"] = rng.choice(["call", "call", "loss", "encode"])
    args["recompute"] = rng.choice([None, None, True, False])
    args["ambient"] = rng.choice([None, None, None, *AMBIENT])
    args["scale"] = rng.choice([1.0, 1.0, 1e-20, float("inf") if config["scaler"] else 1.0])
    if not backward:
        args["micro"] = rng.choice([1, 1, 2, 3])
        args["clip"] = rng.choice([None, "norm", "value"])
        args["closure"] = rng.random() < 0.1 and not config["scaler"]
    if rng.random() < 0.08:
        args["fails"] = rng.choice(["forward", "backward", "closure"])
    return args


def _choice(**choices: list[Any]) -> Callable[[random.Random, dict[str, Any]], dict[str, Any]]:
    def draw(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
        return {key: rng.choice(values) for key, values in choices.items()}

    return draw


def _reopen(rng: random.Random, config: dict[str, Any]) -> dict[str, Any]:
    mode = rng.choice([None, None, *AMBIENT])
    return {"options": options(rng, config), "close": rng.random() < 0.8, "ambient": mode}


KINDS: dict[str, tuple[float, Callable[[random.Random, dict[str, Any]], dict[str, Any]]]] = {
    "train": (30, _train),
    "accumulate": (2, _choice(path=["call", "loss"])),
    "step": (1.5, _choice(ambient=[None, *AMBIENT])),
    "zero_grad": (1, _choice(to_none=[True, False])),
    "evaluate": (
        8,
        _choice(
            mode=["eval", "train"],
            grad=["grad", "no_grad", "inference"],
            path=["call", "encode", "loss", "block", "penalty", "head", "functional", "tail"],
        ),
    ),
    "look": (
        4,
        _choice(
            how=["numpy", "state_dict", "data", "norm", "deepcopy", "save", "dlpack", "vector"]
        ),
    ),
    "edit": (4, _choice(how=["add", "data", "clamp", "load", "assign", "negative_zero", "nan"])),
    "freeze": (1.5, _choice(block=[0, 1, 2], gradient=[None, "keep", "ones"])),
    "unfreeze": (1.5, _choice(block=[0, 1, 2])),
    "hyper": (1.5, _choice(key=["lr", "weight_decay"], factor=[0.5, 2.0])),
    "add_group": (1.5, _choice(ambient=[None, *AMBIENT])),
    "checkpoint": (
        8,
        _choice(
            wait=[True, False],
            again=[None, None, "same", "edited", "forward"],
            metric=[None, 1.0, 2.0],
            ambient=[None, None, *AMBIENT],
        ),
    ),
    "restore": (4, _choice(back=[0, 0, 1, 2], zero=[True, False], ambient=[None, None, *AMBIENT])),
    "reopen": (3, _reopen),
    "pin": (1, _choice(name=["a", "b"], ambient=[None, *AMBIENT])),
    "unpin": (1, _choice(name=["a", "b"])),
    "reference": (1, _choice(ambient=[None, *AMBIENT])),
    "load_full": (1, _choice(source=["ours", "plain"], ambient=[None, *AMBIENT])),
    "materialized": (0.7, _choice(ambient=[None, *AMBIENT])),
    "state": (2, _choice(ambient=[None, *AMBIENT])),
    "read": (1.5, _choice(verify=[True, False])),
    "fork": (0.7, _choice(path=["call", "encode"])),
    "threads": (1.5, _choice(path=["call", "encode", "block"])),
    "interrupt": (
        3,
        lambda rng, _: {
            "action": rng.choice(["train", "train", "checkpoint", "restore", "state", "evaluate"]),
            "at": int(2 ** rng.uniform(0, 11)),
        },
    ),
    "grad": (0.7, _choice(create=[True, False])),
    "saliency": (0.7, _choice(training=[True, False])),
}


def make(seed: int, number: int) -> Program:
    """Make program `number` of a seed; the same one always."""
    rng = random.Random(f"{seed}:{number}")
    config = _config(rng, rng.randrange(1 << 30))
    kinds = sorted(KINDS)
    weights = [KINDS[kind][0] for kind in kinds]
    operations = []
    for _ in range(rng.randint(30, 60)):
        kind = rng.choices(kinds, weights)[0]
        args = KINDS[kind][1](rng, config)
        operations.append(Operation(kind, rng.randrange(1 << 30), args))
    return Program(f"{seed}:{number}", config, tuple(operations))
