"""The model of a client as its server has it: tensors in a file, under the client's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from offload.near.terms import Terms
from offload.serve.memory import TensorMemory


class ServedModel:
    """Tensors of a client's model, and memory for their gradients.

    Args:
        terms: What the client trains.
        directory: Directory on whose drive the tensors are.

    Raises:
        gds.StorageError: There is no room for the tensors.
        ValueError: The names make no model.
    """

    def __init__(self, terms: Terms, directory: str) -> None:
        kinds = [(one.dtype, one.shape) for one in terms.tensors]
        self.live = TensorMemory(kinds, directory)
        self.gradients = TensorMemory(kinds, None)
        self.tensors: list[torch.Tensor] = [
            torch.nn.Parameter(tensor, requires_grad=one.requires_grad)
            if one.is_parameter
            else tensor
            for one, tensor in zip(terms.tensors, self.live.tensors, strict=True)
        ]
        self._numbers = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        self.module = None if terms.entries is None else _module(terms.entries, self.tensors)
        self.has_gradient: set[int] = set()
        """Numbers of the tensors that have a gradient in the present step."""

    def number_of(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor in the terms."""
        return self._numbers[id(tensor)]

    def set_gradients(self, numbers: Iterable[int]) -> None:
        """Give some parameters a gradient, whose values will arrive, and the others none."""
        self.has_gradient = set(numbers)
        for number, tensor in enumerate(self.tensors):
            has = number in self.has_gradient
            tensor.grad = self.gradients.tensors[number] if has else None


def _module(entries: Sequence[tuple[str, int]], tensors: Sequence[torch.Tensor]) -> torch.nn.Module:
    """Return a module whose state dict has some names, in their order.

    Raises:
        ValueError: The names make no module.
    """
    root = torch.nn.Module()
    for name, number in entries:
        *path, last = name.split(".")
        owner = root
        tensor = tensors[number]
        try:
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            if isinstance(tensor, torch.nn.Parameter):
                owner.register_parameter(last, tensor)
            else:
                owner.register_buffer(last, tensor)
        except KeyError as error:
            raise ValueError(f"{name!r:.60} cannot be the name of a tensor: {error}") from None
    return root
