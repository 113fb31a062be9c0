"""Ranks in processes of their own, each of which does what the lines of a pipe ask for."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence

import torch

from gds import PosixBackend
from offload.errors import DamagedError
from offload.format.digests import DigestContext
from offload.model.model_sharing import finish_share, write_share
from tests.dying import let_forks_die
from tests.ranks_model.model import CONTEXT, bytes_of, some_shares, values
from tests.ranks_model.ranks import Rank, header_of


def main(path: str, *descriptors: str) -> None:
    """Fork a process for each rank, from one that has imported torch and started no thread.

    Args:
        path: Path of the model file.
        descriptors: For each rank, the pipe with its requests, and the pipe for its answers.
    """
    let_forks_die()
    torch.set_num_threads(1)
    pipes = [int(number) for number in descriptors]
    ranks = list(zip(pipes[::2], pipes[1::2], strict=True))
    children = []
    for rank in range(len(ranks)):
        pid = os.fork()
        if not pid:
            try:
                _serve(path, rank, ranks)
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    for number in pipes:
        os.close(number)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))


def _serve(path: str, number: int, ranks: Sequence[tuple[int, int]]) -> None:
    for other, pipes in enumerate(ranks):
        for descriptor in pipes if other != number else ():
            os.close(descriptor)
    requests, answers = (os.fdopen(d, mode) for d, mode in zip(ranks[number], "rw", strict=True))
    shares = some_shares(header_of(values(0)), 8192, len(ranks))
    share = shares.share(number)
    with PosixBackend(direct=True) as backend, requests, answers:
        rank = Rank(number, backend, backend.open(path, writable=True))
        print(json.dumps("ready"), file=answers, flush=True)
        for line in requests:
            what, *arguments = json.loads(line)
            answer = _done(rank, shares, share, what, arguments)
            print(json.dumps(answer), file=answers, flush=True)


def _done(rank, shares, share, what, arguments):
    if what == "write":
        image = rank.image(share, values(arguments[0]))
        buffers = rank.buffers(image.plan.buffer_bytes)
        copied = [].append
        rank.written = write_share(image, rank.file, buffers, CONTEXT, rank.known, copied)
        return len(rank.written.edges)
    if what == "finish":
        finish_share(rank.file, rank.written)
        return rank.written.digests
    if what == "read":
        generation, digests = arguments
        every = values(0)
        wanted = [
            (one, torch.zeros(one.box.sizes, dtype=every[one.name].dtype))
            for one in shares.boxes[rank.rank]
        ]
        try:
            rank.read([(share, digests)], wanted, DigestContext(CONTEXT.store_id, generation))
        except DamagedError as error:
            return str(error)
        return [bytes_of(tensor).hex() for _, tensor in wanted]
    raise ValueError(what)


if __name__ == "__main__":
    main(*sys.argv[1:])
