"""Bytes per parameter of optimizer state, by optimizer, precision and state format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from offload.format.arrays import (
    MasterFormat,
    StateDtype,
    StateFormat,
    array_format,
    scale_name,
)
from offload.format.header import DTYPE_BYTES
from offload.sizing.checks import FieldError, shown

OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "Adadelta": ("square_avg", "acc_delta"),
    "Adagrad": ("sum",),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "Adam amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "AdamW amsgrad": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "Adamax": ("exp_avg", "exp_inf"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "RMSprop": ("square_avg",),
    "SGD": (),
    "SGD momentum": ("momentum_buffer",),
}
"""State arrays that each optimizer of torch keeps besides the master, by the name that a user
gives; an option of the class that adds an array follows the class's name."""

DTYPES: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""safetensors code of each dtype of parameters, by torch's name."""


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
"""Other names of dtypes that people use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes and optimizer of a training run, in capital or small letters; also ``bf16``.

    Raises:
        SizingError: A value is not known. The message names those that are.
    """

    optimizer: str = "AdamW"
    """A key of `OPTIMIZERS`."""

    dtype: str = "bfloat16"
    """Dtype of parameters and gradients; a key of `DTYPES`."""

    master: MasterFormat = "float32"
    state_dtype: StateDtype = "float32"

    gradient_bytes: int = 0
    """Bytes of one parameter's gradient in a run that keeps all state in memory: 2 or 4, or 0 for
    those of the parameter's dtype. With this library, gradients have the parameter's dtype."""

    def __post_init__(self) -> None:
        """Check the names, and complete the short ones."""
        for name, value, known in (
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("dtype", self.dtype, DTYPES),
            ("master", self.master, ("float32", "split")),
            ("state_dtype", self.state_dtype, ("float32", "bfloat16", "int8")),
            ("gradient_bytes", self.gradient_bytes, (0, 2, 4)),
        ):
            if isinstance(value, str):
                spelled = {str(one).lower(): one for one in known}
                value = spelled.get(_SHORT.get(value.lower(), value.lower()), value)
                object.__setattr__(self, name, value)
            if value not in tuple(known):  # a dictionary would raise for a list
                listed = ", ".join(map(str, known))
                raise FieldError(f"{{{name}}} is {{value}}, known are {listed}", value=shown(value))

    @property
    def code(self) -> str:
        """Safetensors code of the parameters' dtype."""
        return DTYPES[self.dtype]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of one parameter in forward and backward."""
        return DTYPE_BYTES[self.code]

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the state arrays of a parameter on storage.

        Raises:
            offload.errors.UnsupportedOptimizerError: 8 bits are not known to be enough for one.
        """
        return self.state_format.stored_arrays(self.code, OPTIMIZERS[self.optimizer])

    @property
    def state_format(self) -> StateFormat:
        """Encoding of the state on storage."""
        return StateFormat(self.master, self.state_dtype)

    @property
    def state_bytes(self) -> float:
        """Bytes of state of one parameter on storage: 12 for AdamW with 16-bit parameters."""
        forms = [array_format(name, self.state_dtype) for name in self.arrays]
        return sum(form.nbytes / form.block for form in forms)

    @property
    def memory_state_bytes(self) -> int:
        """Bytes of state of one parameter if it is kept in memory, as FP32."""
        masters = self.code != "F32"
        return 4 * (masters + len(OPTIMIZERS[self.optimizer]))


def num_arrays(names: Iterable[str]) -> int:
    """Return the number of FP32 arrays in memory, given the names of the arrays on storage."""
    kept = {*names}
    return len(kept - {scale_name(name) for name in kept})
