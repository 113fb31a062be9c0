"""Uploads to a tier and downloads from it, killed at random moments until they end.

The tier is moto's server of S3 on this machine, behind a proxy that counts what passes. A process
that pushes or pulls is killed (SIGKILL) after a random time, and started again, until it has ended
by itself. After every kill, whatever the tier or the store offers is read completely. What the
server has said to have must not be sent again.

    python -m bench.tier_kills --directory DIR
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

import offload
from bench._harness import BenchError, Parser, Result, count, require_space, run, say, scratch
from offload.tiers import list_tier, verify_tier
from tests.dying import dying

_CHILD = """
import json, sys
from offload.tiers import pull, push
what, source, target, arguments = sys.argv[1:]
{"push": push, "pull": pull}[what](source, target, **json.loads(arguments))
"""

_OBJECT_BYTES = 128 << 10


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill, count, print and write the result."""
    try:
        from tests.tiers import servers
        from tests.tiers.proxy import Proxy
    except ImportError as error:
        raise BenchError(f"run this in a checkout with the extra `test`: {error}") from error
    args = _arguments(arguments)
    os.environ.update(servers.ENVIRONMENT)
    with scratch(args.directory) as directory, servers.moto() as place:
        require_space(directory, 60 * args.parameters)
        result = Result("tier_kills", args, directory)
        servers.make_bucket(*place, "bucket")
        proxy = Proxy(*place)
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        store = _make_store(f"{directory}/store", args.parameters)
        campaign = _Campaign(proxy, store, directory, random.Random(args.seed))
        while min(campaign.kills.values()) < args.kills:
            campaign.round()
        proxy.close()
        for name, value in campaign.facts().items():
            result.fact(name, value)
        result.write()


class _Campaign:
    """Counts kills, and everything that must not be.

    Args:
        proxy: Proxy before the server.
        store: Store with a checkpoint.
        directory: Directory for downloads.
        chance: Source of random times.
    """

    def __init__(self, proxy: Any, store: str, directory: str, chance: random.Random) -> None:
        self._proxy = proxy
        self._store = store
        self._directory = directory
        self._chance = chance
        self._longest_s = {"push": 2.0, "pull": 2.0}
        self._rounds = 0
        self.kills = {"push": 0, "pull": 0}
        self._partial_offered = 0
        self._sent_twice = 0
        self._fetched_bytes = 0
        self._needed_bytes = 0

    def round(self) -> None:
        """Upload to a new tier and download from it, both killed until they end."""
        tier = f"s3://bucket/{self._rounds}"
        back = f"{self._directory}/back"
        self._rounds += 1
        self._proxy.requests.clear()
        while self._is_killed("push", self._store, tier, object_bytes=_OBJECT_BYTES):
            for copy in list_tier(tier):
                if copy.marker is not None and not verify_tier(copy.url)[0].ok:
                    self._partial_offered += 1
        sent = Counter(name for name in self._proxy.puts() if name.startswith("state/"))
        self._sent_twice += sum(times - 1 for times in sent.values())
        if not sent or not verify_tier(tier)[0].ok:
            raise BenchError("the upload has ended, and the copy is not whole")
        self._proxy.requests.clear()
        while self._is_killed("pull", tier, back):
            self._require_nothing_partial(back)
        self._require_nothing_partial(back)
        answers = [r for r in self._proxy.requests if "/state/" in r.path and r.method == "GET"]
        self._fetched_bytes += sum(r.bytes_down for r in answers)
        with offload.open_checkpoint(back) as checkpoint:
            self._needed_bytes += sum(checkpoint.state_arrays.values())
        shutil.rmtree(back)
        say(f"{self.kills['push']} kills of uploads, {self.kills['pull']} of downloads")

    def _require_nothing_partial(self, back: str) -> None:
        offered = [n for n in os.listdir(back) if n.startswith("step-")] if _exists(back) else []
        if offered:
            with offload.open_checkpoint(back) as checkpoint:
                self._partial_offered += not checkpoint.verify().ok

    def _is_killed(self, what: str, source: str, target: str, **arguments: Any) -> bool:
        """Start a process, kill it after a random time; return whether it had not ended."""
        began_s = time.monotonic()
        process = _start(what, source, target, **arguments)
        try:
            status = process.wait(self._chance.uniform(0.05, 1.0) * self._longest_s[what])
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            self.kills[what] += 1
            self._longest_s[what] *= 1.05  # so that every round ends
            return True
        if status:
            raise BenchError(f"{what} has ended with status {status}")
        self._longest_s[what] = time.monotonic() - began_s
        return False

    def facts(self) -> dict[str, float]:
        """Return what was counted."""
        return {
            "rounds": self._rounds,
            "kills_of_uploads": self.kills["push"],
            "kills_of_downloads": self.kills["pull"],
            "partial_checkpoints_offered": self._partial_offered,
            "finished_objects_sent_again": self._sent_twice,
            "fetched_to_needed_ratio": round(self._fetched_bytes / self._needed_bytes, 4),
        }


def _exists(path: str) -> bool:
    return os.path.isdir(path)


def _start(what: str, source: str, target: str, **arguments: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _CHILD, what, source, target, json.dumps(arguments)]
    return subprocess.Popen(dying(command))


def _make_store(directory: str, num_parameters: int) -> str:
    model = torch.nn.Linear(1024, max(1, num_parameters // 1024), bias=False).bfloat16()
    options = offload.Options(drives=offload.DriveTuning(calibrate=False), chunk_bytes=1 << 20)
    with offload.AdamW(
        model.parameters(), directory=directory, model=model, keep=1, options=options
    ) as optimizer:
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        optimizer.checkpoint({"step": 1}).result()
    return directory


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("tier_kills", __doc__ or "")
    add = parser.add_argument
    add("--kills", type=int, default=50, help="kills of each kind (default: %(default)s)")
    add("--parameters", type=count, default=4 << 20, help="of the model (default: %(default)s)")
    add("--seed", type=int, default=1, help="of the random times (default: %(default)s)")
    args = parser.read(arguments, quick={"kills": 1, "parameters": 64 << 10})
    args.what = args.what or str(args.kills)
    return args


if __name__ == "__main__":
    run(main)
