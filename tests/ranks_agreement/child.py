"""One rank as a process of its own: parts and checkpoints are small files, the rest is real.

python -m tests.ranks_agreement.child

It reads what ranks to start from its standard input, a JSON object for each, and forks them,
because importing torch takes seconds. A rank prints what happens as lines of JSON. At each point in
``pauses`` it prints the point and waits for a line on its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from offload.distributed import Agreement, Offer, Plan, Report, Sight, TorchChannel
from offload.distributed.agreement.sights import CheckpointSight, OwnerSight, PartSight, StoreSight
from offload.errors import InDoubtError, RanksError, SealError
from tests.dying import let_forks_die
from tests.hurry import hurry_after


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def write(path: Path, text: str) -> None:
    """Write a small file durably."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def owner_sight(folder: Path, owner: int) -> OwnerSight:
    """Return what is in the directory of an owner."""
    home = folder / f"owner-{owner}"
    parts = tuple(PartSight(name=p.name, digest=p.read_text()) for p in sorted(home.iterdir()))
    return OwnerSight(owner=owner, place=str(home), parts=parts)


def sight(folder: Path, rank: int, owners: list[int]) -> Sight:
    """Return what a rank sees that was given the directories of some owners."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("step-*/manifest.json"))]
    checkpoints = tuple(
        CheckpointSight(
            step=one["step"],
            generation=one["generation"],
            parts=tuple((owner, name, digest) for owner, name, digest in one["parts"]),
        )
        for one in found
    )
    seen = tuple(owner_sight(folder, o) for o in owners if (folder / f"owner-{o}").exists())
    is_first = rank == 0 and (folder / "first").exists()
    stores = ()
    if is_first or seen:
        store = StoreSight(
            store_id="a store",
            place=str(folder) if is_first else "",
            checkpoints=checkpoints if is_first else (),
            owners=seen,
        )
        stores = (store,)
    return Sight(host=f"node-{rank}", new_id="a store", stores=stores)


class Rank:
    """A rank, with as much of an engine as the agreement needs."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self.rank: int = asked["rank"]
        self.folder = Path(asked["folder"])
        self.home = self.folder / f"owner-{self.rank + 1}"
        self.pauses = asked["pauses"]
        serves = asked["serves"] and self.rank == 0
        store = TCPStore("127.0.0.1", asked["port"], None, serves, wait_for_workers=False)
        limit_s = asked["timeout_s"]
        hurry_after(Path(asked["hurry"]), limit_s)
        channel = TorchChannel(store, "test", timeout_s=limit_s)
        self.agreement = Agreement(channel, self.rank, asked["size"], timeout_s=limit_s)
        self.part = ""
        self.generation = 0

    def pause(self, point: str) -> None:
        if point in self.pauses:
            say(at=point)
            sys.stdin.readline()

    def run(self, num_seals: int) -> None:
        say(at="connected")
        sys.stdin.readline()
        plan = self.agreement.open(sight(self.folder, self.rank, [self.rank + 1]), self.enter)
        self.generation = plan.checkpoint[1] if plan.checkpoint else 0
        say(opened=plan.checkpoint)
        for _ in range(num_seals):
            granted = self.agreement.grant(self.offer, self.ready)
            self.generation = granted.offer.generation
            content = f"generation {self.generation} of rank {self.rank}"
            write(self.home / self.part, content)
            self.seal(content)
            self.pause("sealed")

    def enter(self, plan: Plan) -> None:
        self.home.mkdir(exist_ok=True)
        if self.agreement.is_writer:
            (self.folder / "first").touch()

    def offer(self) -> Offer:
        manifests = self.folder.glob("step-*/manifest.json")
        named = [pair for path in manifests for pair in json.loads(path.read_text())["parts"]]
        return Offer(
            slot="slot",
            generation=self.generation + 1,
            named=tuple((owner, name) for owner, name, _ in named),
        )

    def ready(self, offer: Offer, held: frozenset[str]) -> str:
        named = {name for owner, name in offer.named if owner == self.rank + 1}
        self.part = next(
            name for name in (f"part-{k}" for k in range(9)) if name not in named | held
        )
        write(self.home / self.part, "invalid")
        return self.part

    def seal(self, content: str) -> None:
        number = self.agreement.begin_seal(self.part)
        report = Report(
            step=number, generation=self.generation, part=self.part, table_digest=content
        )
        self.agreement.report(number, report)
        self.pause("reported")
        try:
            if self.agreement.is_writer:
                self.agreement.decide(number, self.complete, self.rename)
            else:
                self.agreement.decision(number)
        except InDoubtError as error:
            say(told="in doubt", why=str(error))
            raise
        except SealError as error:
            say(told="aborted", why=str(error))
        else:
            say(told="published")

    def complete(self, reports: Mapping[int, Report]) -> None:
        parts = [[r + 1, one.part, one.table_digest] for r, one in sorted(reports.items())]
        slot = self.folder / ".slot"
        slot.mkdir(exist_ok=True)
        manifest = {"step": self.generation, "generation": self.generation, "parts": parts}
        write(slot / "manifest.json", json.dumps(manifest))
        self.pause("complete")

    def rename(self) -> None:
        self.pause("rename")
        (self.folder / ".slot").rename(self.folder / f"step-{self.generation}")


def run(asked: Mapping[str, Any]) -> None:
    """Be a rank, with pipes that have names as standard input and output."""
    os.dup2(os.open(asked["stdin"], os.O_RDONLY), 0)
    os.dup2(os.open(asked["stdout"], os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch reports lost connections at length
    try:
        Rank(asked).run(asked["seals"])
    except (RanksError, InDoubtError) as error:
        say(ended=type(error).__name__, why=str(error))
    except BaseException as error:
        say(ended=type(error).__name__, why=str(error))
        raise
    else:
        say(ended="well")


def main() -> None:
    let_forks_die()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            sys.stdin = open(0, closefd=False)  # noqa: SIM115  (without what the server has read)
            run(json.loads(line))
            return
        print(pid, flush=True)


if __name__ == "__main__":
    main()
