"""All attacks on a store, and the few of each kind that a short run carries out."""

from __future__ import annotations

from tests.attacks import headers, manifests, names, parts, train_states
from tests.attacks.attack import Attack

ONE_IN = 48
"""How many attacks there are to each of a short run, beside the first of each kind."""


def all_attacks() -> list[Attack]:
    """Return every attack, in a fixed order."""
    modules = (manifests, headers, train_states, parts, names)
    return [attack for module in modules for attack in module.attacks()]


def some_attacks() -> list[Attack]:
    """Return the first attack on each file at each stage, and one in `ONE_IN` of all."""
    attacks = all_attacks()
    first = {(a.group, a.target, a.stage): a for a in reversed(attacks)}
    chosen = {attack.id for attack in [*first.values(), *attacks[::ONE_IN]]}
    return [attack for attack in attacks if attack.id in chosen]
