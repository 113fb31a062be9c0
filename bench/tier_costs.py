"""What uploads and downloads cost: processor time, memory, and the steps of a training beside them.

Transfers. A process pushes a checkpoint, reads it back, and pulls it, to and from a server of S3 in
another process. Its own processor time is divided by the size of the checkpoint: 0.7 s per GiB is
allowed. What the kernel takes for the same bytes through plain sockets is measured beside it. What
a process has to do once (connections, memory) counts as well, so a small checkpoint costs more per
GiB.

Steps. A training makes checkpoints, and uploads them over a link of a share of the rate at which it
makes them. In the control, the same training has no tier, and another process writes and reads
objects over the same link to the same server. The median step of the first may take 1.05 of that of
the second. The link is a proxy, which counts bytes in both directions.

    python -m bench.tier_costs --directory DIR
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench._harness import (
    BenchError,
    Parser,
    Result,
    count,
    numbers,
    require_space,
    run,
    say,
    scratch,
    words,
)
from offload.tiers.contents import OBJECT_BYTES
from offload.tiers.sending import NUM_TRANSFERS
from tests.dying import dying

if TYPE_CHECKING:
    from tests.tiers.proxy import Proxy

PARTS = ("transfers", "steps")
_CPU_LIMIT = 0.7
_STEP_LIMIT = 1.05
_BYTES_PER_PARAMETER = 14
"""Of a checkpoint with Adam and bf16 parameters."""

_MOST_CHECKPOINTS = 12
"""Number of checkpoints for which there must be room: a training has three slots, and its tier has
as many checkpoints as it makes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the result."""
    try:
        from tests.tiers import servers
        from tests.tiers.proxy import Proxy
    except ImportError as error:
        raise BenchError(f"run this in a checkout with the extra `test`: {error}") from error
    args = _arguments(arguments)
    os.environ.update(servers.ENVIRONMENT)
    with scratch(args.directory) as directory:
        require_space(directory, _MOST_CHECKPOINTS * _BYTES_PER_PARAMETER * args.parameters)
        result = Result("tier_costs", args, directory)
        with _server(args.server, directory) as (place, bucket):
            proxy = Proxy(*place)
            os.environ["AWS_ENDPOINT_URL"] = f"http://{place[0]}:{place[1]}"
            if "transfers" in words(args.parts):
                _measure_transfers(result, args, directory, bucket)
            os.environ["AWS_ENDPOINT_URL"] = proxy.url
            if "steps" in words(args.parts):
                _measure_steps(result, args, directory, bucket, proxy)
            proxy.close()
        result.write()


@contextmanager
def _server(name: str, directory: str) -> Iterator[tuple[tuple[str, int], str]]:
    """Run a server; yield its host and port, and the URL of a bucket."""
    from tests.tiers import servers

    if name == "moto":
        with servers.moto() as place:
            servers.make_bucket(*place, "bucket")
            yield place, "s3://bucket"
        return
    folder = Path(directory) / "juicefs"
    folder.mkdir()
    with servers.juicefs(folder) as place:
        yield place, "s3://tier"


def _measure_transfers(
    result: Result, args: argparse.Namespace, directory: str, bucket: str
) -> None:
    """Measure processor time and memory of uploads and downloads."""
    store, back = f"{directory}/store", f"{directory}/back"
    _child("train", store, "", args.parameters, 1, 1)
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(args.rounds):
        for name, what, check in (
            ("upload", "push", "read"),
            ("upload, sizes only", "push", "size"),
            ("download", "pull", "read"),
        ):
            tier = f"{bucket}/{check}{number}"
            given = (store, tier) if what == "push" else (tier, back)
            found.setdefault(name, []).append(_child("move", what, *given, check))
            if name == "upload":
                nbytes = int(found[name][-1]["bytes"])
                found.setdefault("plain sockets", []).append(_child("sockets", nbytes))
            shutil.rmtree(back, ignore_errors=True)
        file = f"file://{directory}/folder"
        for name, what, given in (
            ("upload to a folder", "push", (store, file)),
            ("download from a folder", "pull", (file, back)),
        ):
            found.setdefault(name, []).append(_child("move", what, *given, "read"))
            shutil.rmtree(back, ignore_errors=True)
        shutil.rmtree(f"{directory}/folder", ignore_errors=True)
        _empty(bucket)
        say(f"transfers: round {number + 1} of {args.rounds}")
    shutil.rmtree(store)
    plain = found.pop("plain sockets")
    result.claim(
        "upload: processor time, beside that of plain sockets for the same bytes",
        [
            one["cpu_s"] / one["bytes"] / (other["cpu_s"] / other["bytes"])
            for one, other in zip(found["upload"], plain, strict=True)
        ],
        numerator="processor time of the process that uploads and reads back",
        denominator="processor time of a process that sends and receives as much, and nothing else",
        limit=None,
    )
    seconds = [one["cpu_s"] / (one["bytes"] / 2**30) for one in plain]
    result.fact("plain_sockets_s_per_gib", round(statistics.median(seconds), 3))
    for name, runs in found.items():
        result.claim(
            f"{name}: processor time in s per GiB",
            [one["cpu_s"] / (one["bytes"] / 2**30) for one in runs],
            numerator="processor time of the process in s",
            denominator="size of the checkpoint in GiB",
            limit=_CPU_LIMIT,
        )
        label = name.replace(",", "").replace(" ", "_")
        result.fact(f"{label}_memory_bytes", max(one["memory_bytes"] for one in runs))
        rates = [one["bytes"] / one["seconds"] / 1e9 for one in runs]
        result.fact(f"{label}_gbps", round(statistics.median(rates), 3))
    result.fact("four_parts_bytes", NUM_TRANSFERS * OBJECT_BYTES)


def _measure_steps(
    result: Result, args: argparse.Namespace, directory: str, bucket: str, proxy: Proxy
) -> None:
    """Compare steps beside uploads with steps beside another process that sends."""
    store = f"{directory}/trained"

    def steps(tier: str = "") -> dict[str, Any]:
        found: dict[str, Any] = _child(
            "train", store, tier, args.parameters, args.steps, args.seal_every
        )
        shutil.rmtree(store)
        return found

    alone = steps()
    interval_s = statistics.median(alone["step_s"]) * args.seal_every
    rate = _BYTES_PER_PARAMETER * args.parameters / interval_s
    result.fact("checkpoint_bytes_per_s", round(rate))
    result.fact("alone_memory_bytes", alone["memory_bytes"])
    ratios: dict[float, list[float]] = {share: [] for share in args.shares}
    most, passed, complete = 0, dict.fromkeys(args.shares, (0, 0)), dict.fromkeys(args.shares, 0)
    for number in range(args.rounds):
        for share in args.shares:
            proxy.bytes_per_s = rate * share
            proxy.requests.clear()
            beside = steps(f"{bucket}/steps{number}-{share:g}")
            by_tier = _passed(proxy)
            proxy.requests.clear()
            with _sending(bucket):
                control = steps()
            passed[share] = (by_tier, _passed(proxy))
            complete[share] += beside["num_complete"]
            _empty(bucket)
            most = max(most, beside["memory_bytes"])
            ratios[share].append(
                statistics.median(beside["step_s"]) / statistics.median(control["step_s"])
            )
        say(f"steps: round {number + 1} of {args.rounds}")
    for share, values in ratios.items():
        result.claim(
            f"a step beside uploads, link of {share:.0%} of the checkpoint rate",
            values,
            numerator="median step with a tier",
            denominator="median step beside a process that sends over the same link",
            limit=_STEP_LIMIT,
            link_bytes=passed[share][0],
            control_link_bytes=passed[share][1],
            complete_checkpoints=complete[share],
        )
    result.fact("beside_uploads_memory_bytes", most)
    result.fact("beside_uploads_further_memory_bytes", most - alone["memory_bytes"])


def _empty(bucket: str) -> None:
    """Remove all objects, so that rounds do not fill the drive."""
    import obstore
    from obstore.store import from_url

    # JuiceFS answers a request to remove many objects in a way that the library refuses.
    config: Any = {"endpoint": os.environ["AWS_ENDPOINT_URL"], "disable_bulk_delete": True}
    store = from_url(bucket, config=config, client_options={"allow_http": True})
    for found in obstore.list(store):
        obstore.delete(store, [one["path"] for one in found])


def _passed(proxy: Proxy) -> int:
    return sum(request.bytes_up + request.bytes_down for request in proxy.requests)


@contextmanager
def _sending(bucket: str) -> Iterator[None]:
    """Let another process send for as long as the block runs."""
    process = subprocess.Popen(dying(_command("send", bucket)))
    try:
        yield
        if process.poll() is not None:
            raise BenchError(f"the process that sends has ended with {process.returncode}")
    finally:
        process.kill()
        process.wait()


def _child(what: str, *given: object) -> Any:
    """Run a process of `bench._tier_child`; return its result."""
    done = subprocess.run(dying(_command(what, *given)), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise BenchError(f"{what} has ended with status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def _command(what: str, *given: object) -> list[str]:
    return [sys.executable, "-m", "bench._tier_child", json.dumps([what, *given])]


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("tier_costs", __doc__ or "")
    add = parser.add_argument
    add("--parameters", type=count, default=128 << 20, help="of the model (default: 128Mi)")
    add("--server", choices=("juicefs", "moto"), default="juicefs", help="(default: %(default)s)")
    add("--parts", default=",".join(PARTS), help="with commas (default: %(default)s)")
    add("--steps", type=int, default=24, help="in a training (default: %(default)s)")
    add("--seal-every", type=int, default=6, help="steps (default: %(default)s)")
    add("--shares", type=numbers, default=[0.1, 0.5, 2.0], help="of the checkpoint rate that the "
        "link passes (default: 0.1,0.5,2)")  # fmt: skip
    quick = {"parameters": 1 << 20, "steps": 6, "seal_every": 2, "rounds": 1, "server": "moto"}
    args = parser.read(arguments, quick=quick)
    if unknown := {*words(args.parts)} - {*PARTS}:
        raise BenchError(f"--parts has {', '.join(unknown)}: give some of {', '.join(PARTS)}")
    args.what = args.what or "-".join([args.server, *words(args.parts)])
    return args


if __name__ == "__main__":
    run(main)
