"""Messages lead with the fact, and say a path, a number and a hint once."""

from __future__ import annotations

import builtins
import pickle
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
import offload.errors
from gds import Backend, LockHeldError, MemoryBackend, ShortReadError, StorageError
from offload.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    DamagedError,
    SlotFullError,
    StoreError,
    StoreLockedError,
    VolatileStoreError,
)
from offload.units import count, duration, many, rate, said_once, seen_from, size
from tests.stores.files import remove_tree
from tests.stores.small import make_model, make_optimizer, options, step, train

STORE, OTHER = "/run", "/other/run"
HINT = "If the drive is not mounted, mount it"


def trained(backend: Backend, num_checkpoints: int = 1, **arguments: Any) -> None:
    with make_optimizer(make_model(), backend, **arguments) as optimizer:
        train(optimizer, num_checkpoints)


class TestNumbersOfErrors:
    def test_a_store_that_is_not_durable(self) -> None:
        with pytest.raises(VolatileStoreError) as raised:
            offload.AdamW([torch.nn.Parameter(torch.ones(3))], directory="/dev/shm/offload-none")
        assert str(raised.value).startswith("/dev/shm")
        assert "[Errno" not in str(raised.value)

    def test_a_checkpoint_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointNotFoundError) as raised:
            offload.open_checkpoint(tmp_path / "none")
        assert str(raised.value) == f"{tmp_path}/none: there is no checkpoint or store here"
        assert isinstance(raised.value, FileNotFoundError)

    def test_a_store_in_use(self) -> None:
        backend, parameter = MemoryBackend(), torch.nn.Parameter(torch.ones(3))
        with (
            offload.AdamW([parameter], directory=STORE, options=options(backend)),
            pytest.raises(StoreLockedError) as raised,
        ):
            offload.AdamW([parameter], directory=STORE, options=options(backend))
        assert str(raised.value).startswith(f"{STORE}: another optimizer of this process")
        said = "".join(traceback.format_exception(raised.value))
        assert said.count("Traceback") == 1  # how the lock is taken helps nobody

    @pytest.mark.parametrize(
        "error",
        [
            StoreError(22, "cannot be used", STORE),
            SlotFullError(28, "No space left on device: the slot needs 3 bytes", STORE),
            CheckpointNotFoundError(2, "there is none", STORE),
            StorageError(5, "write 4096 bytes", STORE, offset=8192),
            StoreError(22, "named in bytes", STORE.encode()),
            LockHeldError(11, "lock", STORE),
            ShortReadError(5, "read 3 bytes", STORE, offset=1),
        ],
        ids=repr,
    )
    def test_none_says_a_number(self, error: OSError) -> None:
        assert str(error) == f"{STORE}: {error.strerror}"
        assert error.errno
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.errno) == (type(error), str(error), error.errno)

    def test_one_without_a_path_says_what_it_was_given(self) -> None:
        assert str(StoreError("only this")) == "only this"


class TestWhatIsSaidOnce:
    def test_a_hint_of_many_checkpoints_whose_drive_is_gone(self) -> None:
        backend = MemoryBackend()
        trained(backend, 3, directory=[STORE, OTHER], keep=3)
        remove_tree(backend, OTHER)
        backend.make_dir(OTHER)  # as if somebody had removed the parts, and nothing else
        backend.create(f"{OTHER}/LOCK", 0).close()
        with (
            make_optimizer(make_model(), backend, directory=[STORE, OTHER]) as optimizer,
            pytest.warns(RuntimeWarning) as warned,
            pytest.raises(CheckpointError) as raised,
        ):
            optimizer.restore()
        said = str(raised.value)
        assert said.count("step-00000001, step-00000002, step-00000003: a part of its state") == 1
        assert said.count(f"missing: {OTHER} has no parts. {HINT}") == 1
        messages = [str(each.message) for each in warned]
        assert len(messages) == 1
        assert messages[0].startswith(f"not using {STORE}/step-00000001, step-00000002, step-0000")
        with pytest.raises(CheckpointError) as raised:
            offload.open_checkpoint(STORE, backend=backend)
        assert str(raised.value).count(OTHER) == 1
        assert "--part of the commands" in str(raised.value)

    def test_the_path_of_a_quarantined_checkpoint(self) -> None:
        backend = MemoryBackend()
        trained(backend, 2)
        file = backend.open(f"{STORE}/step-00000002/exp_avg.safetensors", writable=True)
        file.write_bytes(b"\xff" * 100, file.size_bytes - 5000)
        file.close()
        with make_optimizer(make_model(), backend) as optimizer:
            optimizer.restore()
            with pytest.raises(DamagedError):
                step(optimizer)
        with (
            make_optimizer(make_model(), backend) as optimizer,
            pytest.warns(RuntimeWarning, match="quarantined") as warned,
        ):
            optimizer.restore()
        (said,) = (str(each.message) for each in warned)
        assert said.startswith(
            f"not using {STORE}/step-00000002: quarantined, because it was found damaged "
            "(exp_avg.safetensors: bytes "
        )
        assert said.count("step-00000002") == 1

    @pytest.mark.parametrize(
        ("texts", "said"),
        [
            ([], []),
            (["A. Do x"], ["A. Do x"]),
            (["A. Do x", "B. Do x"], ["A", "B. Do x"]),
            (["A. Do x", "B. Do y"], ["A. Do x", "B. Do y"]),
            (["A. Do x. Do y", "B. Do x", "C"], ["A. Do y", "B. Do x", "C"]),
            (["A", "A"], ["A", "A"]),
        ],
    )
    def test_a_sentence_that_several_texts_end_with(self, texts: Any, said: Any) -> None:
        assert said_once(texts) == said

    def test_a_directory_that_was_named_before(self) -> None:
        assert seen_from("/a/b", "/a/b: gone") == "gone"
        assert seen_from("/a/b", "/a/b/c: gone, as /a/b/d is") == "c: gone, as d is"
        assert seen_from("/a/b", "/a/bc: gone") == "/a/bc: gone"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (size(0), "0 bytes"),
        (size(1), "1 byte"),
        (size(1023), "1023 bytes"),
        (size(56_343_392), "53.7 MiB"),
        (size(3 << 30), "3.00 GiB"),
        (size(5 << 40), "5.00 TiB"),
        (count(999), "999"),
        (count(1000), "1.0 k"),
        (rate(999), "999 B/s"),
        (rate(2.5e9), "2.50 GB/s"),
        (duration(0), "0 s"),
        (duration(4e-6), "4 us"),
        (duration(0.25), "250.0 ms"),
        (duration(61), "61.000 s"),
        (many(1, "slot"), "1 slot"),
        (many(0, "slot"), "0 slots"),
    ],
)  # fmt: skip
def test_numbers_have_units_that_fit(said: str, expected: str) -> None:
    assert said == expected


class TestErrorsByName:
    def test_every_error_is_in_the_package(self) -> None:
        of_package = {
            name
            for name, value in vars(offload.errors).items()
            if isinstance(value, type)
            and issubclass(value, offload.OffloadError)
            and not name.startswith("_")
        }
        assert len(of_package) > 20
        assert of_package <= {*offload.__all__}
        for name in of_package:
            assert getattr(offload, name) is getattr(offload.errors, name)

    def test_every_error_in_the_documents_is_in_the_package(self) -> None:
        docs = Path(__file__).parents[2] / "docs"
        of_guides = [docs / name for name in ("recovery.md", "quickstart.md", "guarantees.md")]
        named = {
            name
            for page in of_guides
            for name in re.findall(r"`(?:offload\.)?([A-Z][A-Za-z]*Error)`", page.read_text())
        }
        assert {"DamagedError", "MismatchError", "StoreLockedError"} <= named
        assert named <= {*offload.__all__} | {*vars(builtins)}

    def test_none_of_them_imports_torch(self) -> None:
        source = (
            "import sys, offload\n"
            "names = [n for n in offload.__all__ if n.endswith('Error')]\n"
            "assert all(issubclass(getattr(offload, n), Exception) for n in names)\n"
            "assert 'torch' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", source], check=True)
