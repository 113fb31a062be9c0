"""Two ranks with a server each, as tests start them, and as campaigns kill them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.limits import AGREEMENT_S
from tests.near.proxy import GRADIENT, RESULT, Fate, Proxy, Rule, Way
from tests.near.servers import Server, serving
from tests.ranks_training.cases import Calls, durable, of_each, run_all, values
from tests.ranks_training.rank_server import Jobs, Rank

BLOB: Final = 9

WHO: Final = ("client 0", "client 1", "server 0", "server 1")
WHEN: Final = ("step", "seal")

SETTING: Final[dict[str, Any]] = {
    "options": {"backend": None},
    "widths": (40, 70, 33),
    "group_timeout_s": AGREEMENT_S,
}


def opened(urls: list[str], calls: Calls, **how: Any) -> list[Calls]:
    """Return the calls of ranks that each begin with a run of their own."""
    return [[["open", {"directory": url, **how}], *calls] for url in urls]


def run(jobs: Jobs, folder: Path, calls: list[Calls], **setting: Any) -> list[Rank]:
    """Run ranks that must all succeed."""
    return run_all(jobs, folder, calls, **{**SETTING, **setting})


def plain(jobs: Jobs, folder: Path, num_steps: int, **setting: Any) -> list[list[str]]:
    """Return the bits after each step of training in memory, by rank."""
    calls: Calls = [["open"], *[["step"]] * num_steps]
    ranks = run(jobs, folder / "plain", [calls] * 2, is_plain=True, **setting)
    return [values(rank, "step") for rank in ranks]


def moment(when: str, chance: Random, strike: Callable[[], object]) -> Rule:
    """Return a rule that lets all frames pass, and strikes once within a step or a seal.

    A step is struck when some chunk's gradients are sent. A seal is struck when its train state is
    sent, when the server has just begun to seal, or up to some milliseconds later.
    """
    left, in_seal, struck = chance.randrange(3), False, False
    place, later_s = chance.randrange(3), chance.uniform(0, 0.01)

    def rule(way: Way, kind: int) -> Fate:
        nonlocal left, in_seal, struck
        in_seal = in_seal or kind == BLOB
        begun = (way, kind) == ("down", RESULT) and in_seal
        if struck:
            return "pass"
        if when == "step" and (way, kind) == ("up", GRADIENT):
            left -= 1
            struck = left < 0
        if when == "seal":
            struck = (kind == BLOB) if place == 0 else begun
        if struck and (when, place) == ("seal", 2):
            threading.Timer(later_s, strike).start()
        elif struck:
            strike()
        return "pass"

    return rule


def killed(jobs: Jobs, servers: list[Server], folder: Path, who: str, when: str, seed: str) -> int:
    """Kill a client or a server within a step or a seal, and go on; return the step resumed from.

    Raises:
        AssertionError: A checkpoint that any rank was told of is lost, or a bit is another one.
    """
    folder.mkdir(exist_ok=True)
    victim, urls = int(who[-1]), [server.url(folder.name) for server in servers]
    proxies = [Proxy(server.socket) for server in servers]
    hit = threading.Event()
    try:
        begin: Calls = [["step"], ["checkpoint"], ["result"], ["train", 100_000, 1]]
        more: Calls = [["await_file", "back"], ["zero"], ["restore"], ["bits"], ["step"], ["step"]]
        more = more if who.startswith("server") else []
        through = [proxy.url(folder.name) for proxy in proxies]
        limit_s = AGREEMENT_S / 2
        job = jobs.start(folder, opened(through, [*begin, *more]), **SETTING, timeout_s=limit_s)
        for rank in range(2):
            job.until(rank, len(begin) + 2)

        def strike() -> None:
            """Kill the victim."""
            if who.startswith("server"):
                servers[victim].kill()
            else:
                job.kill(victim)
            hit.set()

        proxies[victim].rule = moment(when, Random(seed), strike)
        assert hit.wait(AGREEMENT_S), "nothing was killed"
        if who.startswith("server"):
            servers[victim].start()
            (folder / "back").touch()
        ranks = job.wait()
    finally:
        for proxy in proxies:
            proxy.close()
    trained = [rank for n, rank in enumerate(ranks) if n != victim or who.startswith("server")]
    assert all(rank.of("train")["error"] for rank in trained), "it went on as if nothing was"
    if who.startswith("server"):
        again = ranks
    else:
        calls: Calls = [["restore"], ["bits"], ["step"], ["step"]]
        again = run(jobs, folder, opened(urls, calls))
    assert not any(rank.of("restore")["error"] for rank in again), [r.outcomes[-7:] for r in again]
    (step,) = {step for step, _ in of_each(again, "restore")}
    assert of_each(again, "restore") == [[step, {"step": step, "rank": n}] for n in range(2)]
    assert step >= durable(ranks), (who, when, step, durable(ranks))
    expected = plain(jobs, folder, step + 2)
    for rank, bits in zip(again, expected, strict=True):
        assert values(rank, "bits")[-1] == bits[step - 1], (who, when, step)
        assert values(rank, "step")[-2:] == bits[step:], (who, when, step)
    return int(step)


def kill_many(folder: Path, times: int, seed: int) -> Iterator[tuple[str, str]]:
    """Kill each of `WHO` in each of `WHEN` a number of times, and yield who and when after each."""
    jobs = Jobs()
    try:
        with serving(folder / "0") as first, serving(folder / "1") as other:
            servers = [first, other]
            for who in WHO:
                for when in WHEN:
                    for number in range(times):
                        name = f"{who}-{when}-{seed}-{number}".replace(" ", "-")
                        killed(jobs, servers, folder / name, who, when, seed=name)
                        yield who, when
    finally:
        jobs.close()
