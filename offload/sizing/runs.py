"""What is known about a training run besides its model and its hardware."""

from __future__ import annotations

from dataclasses import dataclass

from offload.sizing.checks import Field, FieldError, require_count, require_positive

STALL_S = 0.02
"""Seconds for which a seal in place stops training, if nothing else is given. The recorded median
is a tenth of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is known about a training run besides the model and the hardware.

    Raises:
        SizingError: A value is not a positive number, or another value that it needs is missing.
    """

    keep: int = 2
    """Number of sealed checkpoints that the store keeps."""

    interval_s: float | None = None
    """Seconds from one checkpoint to the next."""

    budget: float | None = None
    """Largest share of time that checkpoints may add, such as 0.05."""

    mttf_s: float | None = None
    """Mean time to failure of the whole run, in seconds."""

    stall_s: float = STALL_S
    """Seconds for which a seal in place stops training."""

    iteration_s: float | None = None
    """Seconds from one optimizer step to the next; None for the step's own time."""

    forward_s: float | None = None
    """Seconds of a forward pass, beside which a step may run."""

    backward_s: float | None = None
    """Seconds of a backward pass, beside which a step may run too; needs `forward_s`."""

    tokens: float | None = None
    """Number of tokens that the model is trained on."""

    tflops: float | None = None
    """Rate of one GPU in training, in 1e12 operations per second."""

    upload_s: float | None = None
    """Seconds that a copy of a checkpoint to a remote tier takes."""

    def __post_init__(self) -> None:
        """Check the values."""
        require_count("keep", self.keep)
        for name in ("interval_s", "budget", "mttf_s", "stall_s", "iteration_s", "forward_s"):
            require_positive(name, getattr(self, name))
        for name in ("backward_s", "tokens", "tflops", "upload_s"):
            require_positive(name, getattr(self, name))
        if self.backward_s is not None and self.forward_s is None:
            raise FieldError(
                Field("backward_s"),
                " needs ",
                Field("forward_s"),
                ": a step that runs beside backward runs beside the next forward too",
            )
