"""Record of the first forwards: the order of modules, and the readers of parameters.

Pre-forward hooks report that a module is about to run. A `Watch` reports reads of a parameter
before the module that owns it has run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


class ForwardOrder:
    """Record of the first forward, and of some later ones."""

    def __init__(self) -> None:
        self._parameters: dict[int, torch.Tensor] = {}
        """Known parameters, by id. They are kept alive so that their ids stay unique."""
        self._first_uses: dict[int, int] = {}
        """Number of modules that had begun to run when a parameter was first needed, by its id."""
        self._readers: dict[int, int] = {}
        """Number of the module that read a parameter before its own module ran, by the
        parameter's id."""
        self._num_ran = 0

    def start_over(self) -> None:
        """Note that the next forward belongs to another step."""
        self._num_ran = 0

    def ran(self, own: Iterable[torch.Tensor]) -> None:
        """Note that the module that owns these parameters is about to run."""
        self._num_ran += 1
        for parameter in own:
            self._note(parameter)

    def used(self, parameter: torch.Tensor, reader: int | None) -> None:
        """Note that a parameter is read before the module that owns it has run.

        Args:
            parameter: Parameter that is read.
            reader: Number of the innermost module that is running; None outside of all modules.
        """
        if id(parameter) not in self._first_uses and reader is not None:
            self._readers[id(parameter)] = reader
        self._note(parameter)

    def first_use(self, parameter: torch.Tensor) -> int | None:
        """Return how many modules had begun to run when a parameter was first needed.

        None means that the parameter was never needed.
        """
        return self._first_uses.get(id(parameter))

    def readers(self, numbers: Mapping[int, int]) -> dict[int, list[int]]:
        """Return the parameters that modules read before the module that owns them has run."""
        found: dict[int, list[int]] = {}
        for parameter, reader in self._readers.items():
            if parameter in numbers:
                found.setdefault(reader, []).append(numbers[parameter])
        return found

    def _note(self, parameter: torch.Tensor) -> None:
        self._parameters.setdefault(id(parameter), parameter)
        self._first_uses.setdefault(id(parameter), self._num_ran)
