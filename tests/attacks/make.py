"""Makes the attack files: ``python -m tests.attacks.make``. Equal bytes wherever it is run."""

from __future__ import annotations

import shutil

from tests.attacks import headers, manifests, names, parts, train_states
from tests.attacks.attack import FILES, Attack


def all_attacks() -> list[Attack]:
    """Return every attack, in a fixed order."""
    modules = (manifests, headers, train_states, parts, names)
    return [attack for module in modules for attack in module.attacks()]


def write_files() -> int:
    """Write the file of every attack that has one; return how many there are."""
    shutil.rmtree(FILES, ignore_errors=True)
    made = [attack for attack in all_attacks() if attack.content is not None]
    for attack in made:
        attack.file.parent.mkdir(parents=True, exist_ok=True)
        attack.file.write_bytes(attack.content or b"")
    return len(made)


if __name__ == "__main__":
    print(f"attack files made: {write_files()}")
