"""What the attacks are variations of: the documents of a small store, as they should be.

Written out here rather than taken from a run, so that they are the same bytes in every run.
`test_attacks.py` shows that the parsers take them.
"""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

STORE_ID = "0123456789abcdef0123456789abcdef"
WIDTHS = (30, 40, 4)
"""Of the two linear layers, in bf16, that the store's model has."""

_ADAMW = {
    "lr": 0.001,
    "betas": {"tuple": [0.9, 0.999]},
    "eps": 1e-08,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
}
_SHAPES = {
    "0.weight": [WIDTHS[1], WIDTHS[0]],
    "0.bias": [WIDTHS[1]],
    "1.weight": [WIDTHS[2], WIDTHS[1]],
    "1.bias": [WIDTHS[2]],
}
_ARRAYS = ["master", "exp_avg", "exp_avg_sq"]

BODY: dict[str, Any] = {
    "store_id": STORE_ID,
    "generation": 9,  # newer than what a test's run makes
    "step": 2,
    "created": "2026-01-01T00:00:00+00:00",
    "torch_version": "2.13.0",
    "optimizer": "torch.optim.adamw.AdamW",
    "groups": [_ADAMW],
    "chunk_elements": 1024,
    "state_dtype": "float32",
    "shares": [1],
    "arrays": [[name, "F32", 1] for name in _ARRAYS],
    "parameters": [[name, "BF16", shape, 0, _ARRAYS] for name, shape in _SHAPES.items()],
    "model": [[name, "BF16", shape, []] for name, shape in _SHAPES.items()],
    "scalars": [[["step", "f32", "2.0"]] for _ in _SHAPES],
    "model_block_bytes": 16777216,
    "digests": {name: ["0123456789abcdef", "fedcba9876543210"] for name in _ARRAYS},
    "model_digests": ["0011223344556677"],
    "parts": [],
}


def body() -> dict[str, Any]:
    """Return a copy of the good body, to be spoilt."""
    return copy.deepcopy(BODY)


def blake2b(value: object) -> str:
    """Return the digest that a document has of its body."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def signed(content: object) -> dict[str, Any]:
    """Return a manifest with the right digest, whatever its body is."""
    return {"format": 1, "digest": blake2b(content), "body": content}


def as_json(document: object) -> bytes:
    """Return JSON, as Python writes it: NaN, Infinity and huge integers included."""
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def manifest(content: object = None) -> bytes:
    """Return the file for a body, by default the good one."""
    return as_json(signed(BODY if content is None else content))


def two_drives() -> dict[str, Any]:
    """Return a body for a store on two directories; where the second is, nobody knows."""
    found = body()
    found["shares"] = [1, 1]
    content = blake2b({name: values[1:] for name, values in found["digests"].items()})
    sealed = {
        "store_id": STORE_ID,
        "generation": found["generation"],
        "drive": 1,
        "content": content,
    }
    found["parts"] = [
        {
            "directory": "/nowhere",
            "name": "part-1",
            "generation": found["generation"],
            "digest": blake2b(sealed),
        }
    ]
    return found


PART = {"store_id": STORE_ID, "generation": 9, "drive": 1, "content": "0" * 32}


def part(content: object = None) -> dict[str, Any]:
    """Return the document of a ``part.json`` with the right digest, whatever its body is."""
    content = PART if content is None else content
    return {"format": 1, "digest": blake2b(content), "body": content}
