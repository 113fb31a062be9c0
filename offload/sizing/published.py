"""Published figures that contradict each other, and the side that this tool takes."""

from __future__ import annotations

from typing import NamedTuple


class Contradiction(NamedTuple):
    """Figures about models of one size that cannot all be right."""

    least: float
    """Smallest number of parameters that the figures are about."""

    most: float
    """Largest number of parameters that the figures are about."""

    text: str


CONTRADICTIONS = (
    Contradiction(
        174e9,
        176e9,
        'GPT-3 (175 B parameters): slides give both 350 GB and "more than 500 GB" for its '
        "parameters. This tool takes 350 GB, which is 16 bits for each; no dtype gives the other.",
    ),
    Contradiction(
        174e9,
        176e9,
        'GPT-3 (175 B): "50 seconds" for a checkpoint at 273 GB/s is the time of 13.8 TB, which '
        "is a model of 1 T parameters. This tool computes 8.8 s for 2.4 TB.",
    ),
    Contradiction(
        174e9,
        176e9,
        'GPT-3 (175 B): "300 years on one A100" is Megatron\'s figure for a V100. This tool '
        "computes 6 x parameters x tokens: 71 years at 140 TFLOPS, 95 with recomputation.",
    ),
    Contradiction(
        174e9,
        176e9,
        "GPT-3 (175 B) on 1,024 GPUs: slides give TP 8 and PP 16 (128 writers, 8 replicas), a blog "
        "TP 8 and PP 8 (64 writers, 16 replicas). Restores then read 19.6 TB or 39.2 TB; this tool "
        "takes the --tp and --pp that it is given.",
    ),
    Contradiction(
        529e9,
        545e9,
        "The row of 544 B parameters (1,088 GB) in slides is probably the model of 530 B "
        "parameters. This tool takes the number that it is given.",
    ),
    Contradiction(
        0.99e12,
        1.01e12,
        "1 T parameters: 13.8 TB is published for a checkpoint, which is 13.77 bytes per "
        "parameter. This tool takes 14 with Adam: 2 for parameters, 4 each for masters and two "
        "moments. --checkpoint-bytes 13.77 gives the published figure.",
    ),
    Contradiction(
        0.99e12,
        1.01e12,
        '1 T parameters: "50 seconds" to restore cannot be at the cited 1 TB/s, at which 6 '
        "replicas read for 82.8 s. This tool computes the time from the rate.",
    ),
    Contradiction(
        0.99e12,
        1.01e12,
        '1 T parameters: "one pipeline group writes the checkpoint" holds only if the optimizer '
        "is replicated. This tool counts one writer for each GPU with --sharded.",
    ),
)


def remarks(num_parameters: float) -> list[str]:
    """Return what is to be said about the published figures for a model of this size."""
    return [c.text for c in CONTRADICTIONS if c.least <= num_parameters <= c.most]
