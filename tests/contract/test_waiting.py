"""Ctrl-C at each moment of a wait: no other thread ever waits for the one that it came to."""

import itertools
import os
import sys
import threading
import time
from queue import SimpleQueue

from gds import ALIGNMENT, PosixBackend
from gds.backends.threads import TransferPool
from gds.waiting import Pending, wait
from tests.eventually import TIMEOUT_S
from tests.fuzz.interrupts import interrupted


def each_moment(prepare, action, *, at_least):
    """Interrupt `action` at each moment in turn; yields what `prepare` has returned, after each.

    The last time no interrupt comes.
    """
    for at in itertools.count(1):
        prepared = prepare()
        try:
            with interrupted(at, __file__) as fired:
                action(prepared)
            assert not fired, "the interrupt was swallowed"
        except KeyboardInterrupt:
            pass
        yield prepared
        if not fired:
            break
    assert at > at_least, f"only {at - 1} moments"


def elsewhere(action):
    """Run something on another thread, which must not be kept waiting; return what it returns."""
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(action()), daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert outcome, "a lock that it needs is held by nobody"
    return outcome[0]


class Helper:
    """A thread that does something when it is told to, by a call that cannot be interrupted."""

    def __init__(self, action):
        self.told = SimpleQueue()
        self.thread = threading.Thread(target=lambda: (self.told.get(), action()), daemon=True)
        self.thread.start()

    def acts(self):
        self.told.put(None)


def test_an_outcome_can_be_waited_for_and_told_after_an_interrupt():
    def outcome_and_helper():
        pending = Pending()
        return pending, Helper(lambda: pending.set_result(7))

    def wait_for_it(prepared):
        pending, helper = prepared
        pending.add_done_callback(lambda _: None)
        helper.acts()
        wait([pending])
        assert pending.result() == 7
        pending.add_done_callback(lambda _: None)

    for pending, helper in each_moment(outcome_and_helper, wait_for_it, at_least=10):
        helper.acts()
        assert pending.wait(TIMEOUT_S)
        told = SimpleQueue()
        pending.add_done_callback(told.put)
        assert told.get_nowait().result(0) == pending.result() == 7


def test_a_transfer_that_an_interrupt_keeps_from_being_begun_does_not_run_later():
    """Its memory is used for something else by then."""

    def pool_and_parts():
        pool, running, ran = TransferPool("test", 2), set(), []

        def part():
            running.add(threading.get_ident())
            time.sleep(0.002)
            running.discard(threading.get_ident())
            ran.append(1)
            return 1

        pool.submit(lambda: 0).result()
        return pool, part, running, ran, []

    def submit(prepared):
        pool, part, _, _, begun = prepared
        begun.append(pool.submit(part, part, part))

    for pool, _, running, ran, begun in each_moment(pool_and_parts, submit, at_least=8):
        if begun:
            assert begun[0].result(TIMEOUT_S) == 3
        assert not running
        num_ran = len(ran)
        assert [pool.submit(lambda n=n: n).result(TIMEOUT_S) for n in range(3)] == [0, 1, 2]
        assert len(ran) == num_ran, "one ran that nobody waits for"
        pool.close()


def test_small_writes_take_their_turn_on_a_thread_that_is_not_interrupted(tmp_path):
    """A turn that is never given back would keep all writes of the other kind waiting."""
    backend = PosixBackend(hybrid=True)
    large = backend.allocate(1 << 20)

    def opened():
        return backend.create(f"{tmp_path}/{time.monotonic_ns()}", 16 << 20)

    def write(file):
        file.write_bytes(b"header", 0)

    for file in each_moment(opened, write, at_least=20):
        assert file._descriptors.takes_turns
        written = [file.write(large, 4096 + number * large.nbytes) for number in range(2)]
        small = elsewhere(lambda file=file: file.write_bytes(b"later", 0) or True)
        assert [one.result(TIMEOUT_S) for one in written] == [large.nbytes] * 2
        assert small
        file.close()
    backend.close()


def test_an_interrupt_while_a_file_is_opened_closes_no_descriptor_twice(tmp_path, monkeypatch):
    failed, closed_twice = [], []
    close = os.close

    def watched(fd):
        try:
            close(fd)
        except OSError:
            closed_twice.append(fd)
            raise

    monkeypatch.setattr(os, "close", watched)
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: failed.append(raised.exc_value))
    backend = PosixBackend()
    backend.create(f"{tmp_path}/there", ALIGNMENT).close()
    for action in (
        lambda at: backend.create(f"{tmp_path}/new-{at}", ALIGNMENT),
        lambda _: backend.open(f"{tmp_path}/there"),
    ):
        moments = 0
        for at in range(1, 1000):
            try:
                with interrupted(at) as fired:
                    action(at).close()
            except KeyboardInterrupt:
                moments += 1
            if not fired:
                break
        assert not fired, "the last call has ended without an interrupt"
        assert moments > 20
    backend.close()
    assert closed_twice == []
    assert all(isinstance(error, KeyboardInterrupt) for error in failed)
