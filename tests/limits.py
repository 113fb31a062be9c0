"""How long tests wait: one place for all limits, so that a busy machine fails no test.

A process may be without a processor for seconds. So a wait whose end is certain has a limit that
only a hang reaches, and ranks have an agreement limit that none reaches that is at work.
"""

from __future__ import annotations

from typing import Final

HANG_S: Final = 200.0
"""For a wait whose expiry is a failure; that a new process imports torch may take a minute of it.

It is less than the ``faulthandler_timeout`` of pytest, so that the test says what it waited for.
"""

AGREEMENT_S: Final = 20.0
"""``Options(agreement_timeout_s=...)`` of ranks in tests."""

SHORT_AGREEMENT_S: Final = 3.0
"""The same where a test waits for the limit itself: for a rank that does not come, or is stopped,
and nothing else takes long."""

UNREACHED_AGREEMENT_S: Final = 400.0
"""The same where a test shows that no rank waits for the limit."""

UNREACHED_S: Final = UNREACHED_AGREEMENT_S / 2
"""How long such a test waits for all that the ranks do."""

SHORT_ANSWER_S: Final = 3.0
"""For one answer of a tier where a test waits until it is given up."""
