"""What the first forwards tell: which modules run in which order, and who reads which parameter.

Modules say when they are about to run, through their pre-forward hooks. What is read before the
module that owns it has run is noted by a `Watch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


class ForwardOrder:
    """A record of the first forward, and of some later ones."""

    def __init__(self) -> None:
        self._parameters: dict[int, torch.Tensor] = {}
        """By id: those that are known; held, so that ids stay theirs."""
        self._turns: dict[int, int] = {}
        """By id of a parameter: how many modules had begun to run when it was first needed."""
        self._readers: dict[int, int] = {}
        """By id of a parameter that was read before its own module ran: the module that did."""
        self._num_ran = 0

    def start_over(self) -> None:
        """Note that what comes next is a forward of another step."""
        self._num_ran = 0

    def ran(self, own: Iterable[torch.Tensor]) -> None:
        """Note that a module is about to run, which owns these parameters."""
        self._num_ran += 1
        for parameter in own:
            self._note(parameter)

    def used(self, parameter: torch.Tensor, reader: int | None) -> None:
        """Note that a parameter is read before the module that owns it has run.

        Args:
            parameter: That is read.
            reader: The innermost module that is running, by number; None outside of all.
        """
        if id(parameter) not in self._turns and reader is not None:
            self._readers[id(parameter)] = reader
        self._note(parameter)

    def turn(self, parameter: torch.Tensor) -> int | None:
        """Return when a parameter is first needed, counted in modules; None if it never was."""
        return self._turns.get(id(parameter))

    def readers(self, numbers: Mapping[int, int]) -> dict[int, list[int]]:
        """Return what modules read before it is its own module's turn.

        Args:
            numbers: Of the parameters to return, by id.

        Returns:
            Numbers of parameters, by number of the module.
        """
        found: dict[int, list[int]] = {}
        for parameter, reader in self._readers.items():
            if parameter in numbers:
                found.setdefault(reader, []).append(numbers[parameter])
        return found

    def _note(self, parameter: torch.Tensor) -> None:
        self._parameters.setdefault(id(parameter), parameter)
        self._turns.setdefault(id(parameter), self._num_ran)
