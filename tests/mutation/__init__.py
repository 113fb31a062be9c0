"""Every step of the protocol taken out in turn: a test must notice.

python -m tests.mutation      # see `tests.mutation.__main__`
"""

from __future__ import annotations

from typing import Final

from tests.mutation.arriving import ARRIVING
from tests.mutation.device import DEVICE
from tests.mutation.frozen import FROZEN
from tests.mutation.gathering import GATHERING
from tests.mutation.keeping import KEEPING
from tests.mutation.locking import LOCKING
from tests.mutation.meddling import MEDDLING
from tests.mutation.mutation import Mutation
from tests.mutation.numbers import NUMBERS
from tests.mutation.opening import OPENING
from tests.mutation.overlapping import OVERLAPPING
from tests.mutation.overlooked import OVERLOOKED
from tests.mutation.owning import OWNING
from tests.mutation.quarantining import QUARANTINING
from tests.mutation.ranks import RANKS
from tests.mutation.recorded import RECORDED
from tests.mutation.recycling import RECYCLING
from tests.mutation.restoring import RESTORING
from tests.mutation.sealing import SEALING
from tests.mutation.sharing import SHARING

MUTATIONS: Final[tuple[Mutation, ...]] = (
    *SEALING,
    *FROZEN,
    *RECYCLING,
    *KEEPING,
    *OPENING,
    *LOCKING,
    *MEDDLING,
    *OVERLOOKED,
    *RESTORING,
    *QUARANTINING,
    *RECORDED,
    *NUMBERS,
    *OVERLAPPING,
    *RANKS,
    *OWNING,
    *SHARING,
    *GATHERING,
    *ARRIVING,
    *DEVICE,
)
