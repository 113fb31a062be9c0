"""English text that every Python has, cut into batches that depend only on the step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def text() -> str:
    """Return the help texts of Python's own `help()`: half a megabyte of English."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


class Batches:
    """Batches of token ids.

    Batch k is the same in every process, so that a resume needs no sampler. The last tenth of the
    text is never trained on.
    """

    def __init__(self, encode: Callable[[str], list[int]], *, batch: int, tokens: int) -> None:
        ids = torch.tensor(encode(text()))
        self._training, self._held_out = ids.tensor_split([ids.numel() * 9 // 10])
        self._shape = (batch, tokens)

    def __getitem__(self, step: int) -> Tensor:
        """Return the ids of a step, as int64 of shape (batch, tokens).

        The ids are random windows of the text, drawn with the step as the seed.
        """
        batch, tokens = self._shape
        draw = torch.Generator().manual_seed(step)
        starts = torch.randint(self._training.numel() - tokens, (batch, 1), generator=draw)
        return self._training[starts + torch.arange(tokens)]

    def held_out(self) -> Tensor:
        """Return ids of shape (8, tokens), spread evenly over the text that is never trained on."""
        _, tokens = self._shape
        starts = torch.linspace(0, self._held_out.numel() - tokens, 8).long()
        return self._held_out[starts[:, None] + torch.arange(tokens)]
