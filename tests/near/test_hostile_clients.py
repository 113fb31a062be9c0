"""What a client sends that no client sends is refused by name, and harms nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.near.peers import (
    BLOB,
    CALL,
    END,
    ERROR,
    GRADIENT,
    HELLO,
    PARAMETER,
    PASS,
    RESULT,
    TENSOR,
    Change,
    Peer,
    Recorded,
    changed,
    put,
)
from tests.near.servers import Server
from tests.near.training import are_same, copied, expected, make_model, make_optimizer, train

MAX_GROWTH_KB = 400 << 10
"""Most memory that all attacks of this file together may take: that of one document."""


@pytest.fixture(scope="module", autouse=True)
def others(
    server: Server, recorded: Recorded, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Train in another run meanwhile; in the end, nothing but that is left on the server."""
    values = expected(tmp_path_factory.mktemp("local") / "run", 4)
    model = make_model()
    optimizer = make_optimizer(model, server.url("others"))
    train(model, optimizer, 1, 2)
    optimizer.checkpoint().result()
    train(model, optimizer, 3, 3)
    threads, files = server.status("Threads"), server.open_files()
    before, names = server.status("VmHWM"), {path.name for path in server.runs.iterdir()}
    yield
    make_optimizer(make_model(), server.url("attacked"), fresh=True).close()
    assert server.comes_to_rest(threads, files), (threads, files, server.at_work())
    assert server.status("VmHWM") < before + MAX_GROWTH_KB
    assert {path.name for path in server.runs.iterdir()} <= (
        names | {"attacked"} | {f"left-{number}" for number in range(20)}
    )
    train(model, optimizer, 4, 4)
    assert are_same(copied(model), values[4])
    assert optimizer.restore(discard_newer=True) is not None
    assert are_same(copied(model), values[2])
    optimizer.close()


def _tensor(*changes: Any) -> Change:
    return put("tensors", 0, *changes)


TERMS: dict[str, Change] = {
    "no-run": lambda terms: terms.pop("run") and None,
    **{
        f"run-{n}": put("run", name)
        for n, name in enumerate(
            [
                "..",
                "/",
                ".",
                "",
                "a/b",
                "../a",
                "a\0b",
                ".a",
                "-a",
                "x" * 101,
                "\u00fc",
                "a\n",
                5,
                None,
            ]
        )
    },
    "a-list": lambda _: [],
    "overflow": _tensor(1, [1 << 32, 1 << 32]),
    "overflow-to-one": _tensor(1, [(1 << 62) + 1, 4]),
    "quadrillion": _tensor(1, [10**9, 10**6]),
    "more-than-the-drive": _tensor(1, [1 << 49]),
    "zero-and-huge": _tensor(1, [0, 1 << 62, 1 << 62]),
    "negative": _tensor(1, [-1, 96]),
    "both-negative": _tensor(1, [-128, -96]),
    "fraction": _tensor(1, [1.5]),
    "true": _tensor(1, [True]),
    "dimensions": _tensor(1, [1] * 65),
    "many-dimensions": _tensor(1, [1 << 62] * 100_000),
    "dtype": _tensor(0, "torch.bfloat16"),
    "dtype-list": _tensor(0, ["BF16"]),
    "dtype-integer": _tensor(0, "I64"),
    "short-tensor": put("tensors", 0, ["BF16"]),
    "many-tensors": put("tensors", [["U8", [1], False, False]] * 600_000),
    "no-tensors": put("tensors", []),
    **{
        f"entry-{n}": put("entries", 0, [name, 0])
        for n, name in enumerate(
            [
                "",
                ".",
                "a..b",
                ".a",
                "a.",
                "__class__",
                "forward",
                "forward.a",
                "training",
                "\ud800",
                "0.bias",
                "0.bias.a",
                "1",
                "a." * 5000 + "b",
                5,
            ]
        )
    },
    "entry-negative": put("entries", 0, 1, -1),
    "entry-far": put("entries", 0, 1, 10**6),
    "entry-short": put("entries", 0, []),
    "group-twice": lambda terms: terms["groups"].append(terms["groups"][0]),
    "group-far": put("groups", 0, 1, [99]),
    "group-empty": put("groups", []),
    "group-names": put("groups", 0, 2, ["a"]),
    "group-params": put("groups", 0, 0, "params", []),
    "group-lr": put("groups", 0, 0, "lr", "much"),
    "group-text": put("groups", 0, 0, 7),
    "group-betas": put("groups", 0, 0, "betas", None),
    "group-tensor": put("groups", 0, 0, "lr", {"tensor": "1", "dtype": "cuda", "shape": []}),
    "group-deep": put("groups", 0, 0, "lr", json.loads("[" * 500 + "]" * 500)),
    "hyper": put("hyper", {"lr": 1e-3, "betas": "os.system"}),
    "hyper-unknown": put("hyper", "directory", "/tmp"),
    **{
        f"class-{n}": put("optimizer", name)
        for n, name in enumerate(
            ["", "LBFGS", "Optimizer", "os.system", "adamw", ["AdamW"], None, 1]
        )
    },
    "keep": put("keep", [["LastK", {"n": -1}]]),
    "keep-nothing": put("keep", []),
    "keep-unknown": put("keep", [["Retention", {}]]),
    "keep-list": put("keep", [[["LastK"], {}]]),
    "keep-argument": put("keep", [["LastK", {"self": 1}]]),
    "fresh": put("fresh", "yes"),
    **{
        f"seconds-{n}": put("timeout_s", value)
        for n, value in enumerate([0, -1, 1e300, "1", None, [1]])
    },
    "options": put("options", None),
    "chunk-0": put("options", "chunk_bytes", 0),
    "chunk-text": put("options", "chunk_bytes", "32MiB"),
    "chunk-fraction": put("options", "chunk_bytes", 65536.5),
    "host-memory": put("options", "host_memory", "/dev/shm"),
    "host-memory-list": put("options", "host_memory", ["8GiB"]),
    "host-memory-large": put("options", "host_memory", "3GiB"),
    "ring": put("options", "ring_chunks", 1 << 40),
    "chunk-large": put("options", "chunk_bytes", 1 << 30),
    "train-state": put("options", "train_state_bytes", 1 << 50),
    "state": put("options", "state_dtype", "float8"),
    "threads": put("options", "drives", "threads", "3"),
    "many-threads": put("options", "drives", "threads", 1 << 20),
    "shares": put("options", "drives", "shares", [0]),
    "drives": put("options", "drives", []),
}


@pytest.mark.parametrize("name", TERMS)
def test_terms_that_no_client_has_are_refused_by_name(
    name: str, server: Server, recorded: Recorded
) -> None:
    terms = changed({**recorded.terms, "run": "attacked"}, TERMS[name])
    with Peer(server) as peer:
        message = peer.enter(terms)
        assert message
        assert len(message) < 2000
        assert peer.answer()[0] == 0


DOCUMENTS = {
    "deep": b"[" * 1_000_000 + b"]" * 1_000_000,
    "deep-object": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "commas": b"[" + b"0," * 2_500_000 + b"0]",
    "long-number": b'{"run":' + b"9" * 1_000_000 + b"}",
    "twice": b'{"run":"a","run":"b"}',
    "nan": b'{"run":NaN}',
    "text": b'"hello"',
    "no-utf8": b'{"run":"\xff"}',
    "nothing": b"",
    "zeros": bytes(1000),
    "pickle": b"\x80\x04cposix\nsystem\n",
    "long-text": b'{"run":"' + b"a" * (60 << 20) + b'"}',
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_that_is_none_is_refused(name: str, server: Server) -> None:
    with Peer(server) as peer:
        peer.greet()
        peer.send(HELLO, 0, DOCUMENTS[name])
        assert peer.error() or peer.answer()[0] == 0


HEADERS: dict[str, dict[str, Any]] = {
    "magic": {"magic": b"OFN2"},
    "digest": {"digest": 1},
    "length": {"nbytes": (1 << 63) - 1},
    "too-long": {"nbytes": 5000},
    "http": {"magic": b"GET "},
    "number": {"number": 7},
    **{f"kind-{kind}": {"kind": kind} for kind in (0, CALL, RESULT, ERROR, PASS, END, 12, 255)},
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_first_frame_that_is_none_ends_the_connection(name: str, server: Server) -> None:
    header = {"kind": HELLO, "number": 0, **HEADERS[name]}
    with Peer(server) as peer:
        peer.send(content=b'{"token":null,"secret":""}', **header)
        assert peer.answer()[0] == 0


def test_hellos_are_read_only_to_their_limits(server: Server) -> None:
    with Peer(server) as peer:
        peer.send(HELLO, 0, b" " * 5000)
        assert peer.error() == ""
    with Peer(server) as peer:
        peer.greet()
        peer.send(HELLO, 0, nbytes=(64 << 20) + 1)
        assert peer.error() == ""


CALLS: dict[str, tuple[str, Change]] = {
    "unknown": ("step", put("call", "__init__")),
    "no-name": ("step", put("call", None)),
    "no-groups": ("step", lambda call: call.pop("groups") and None),
    "groups": ("step", put("groups", [])),
    "group": ("step", put("groups", 0, 7)),
    "learning-rate": ("step", put("groups", 0, "lr", "much")),
    "flag": ("step", put("groups", 0, "fused", 7)),
    "have-far": ("step", put("have", [99])),
    "have-text": ("step", put("have", "0")),
    "have-negative": ("step", put("have", [-1])),
    "factors": ("step", put("factors", ["x"])),
    "pin-name": ("pin", put("name", "../../best")),
    "pin-list": ("pin", put("name", [])),
    "pin-which": ("pin", put("which", 99)),
    "unpin": ("pin", lambda _: {"call": "unpin", "name": "nothing"}),
    "restore-path": ("restore", put("which", "/etc/passwd")),
    "restore-other-run": ("restore", put("which", "../others/step-00000002")),
    "restore-list": ("restore", put("which", [1])),
    "restore-step": ("restore", put("which", 10**18)),
    "restore-nothing": ("restore", lambda _: {"call": "restore"}),
    "find": ("pin", lambda _: {"call": "find", "position": {"path": "/"}}),
    "find-list": ("pin", lambda _: {"call": "find", "position": []}),
    "reference": ("pin", lambda _: {"call": "load_reference", "reference": {"param_groups": 5}}),
    "state-list": ("load_state", put("state", [1])),
    "state-far": ("load_state", put("state", 0, 0, 99)),
    "state-text": ("load_state", put("state", 0, 0, "0")),
    "state-scalars": ("load_state", put("state", 0, 1, [["step", "f32", "1e999"]])),
    "state-steps": ("load_state", put("state", 0, 1, [["step", "f32", "-1.0"]])),
    "state-array": ("load_state", put("state", 0, 2, {"../exp_avg": "F32"})),
    "state-dtype": ("load_state", put("state", 0, 2, "exp_avg", "U8")),
    "state-no-dtype": ("load_state", put("state", 0, 2, "exp_avg", "float32")),
    "state-groups": ("load_state", put("groups", [])),
    "state-count": ("load_state", put("steps", -1)),
    "state-count-text": ("load_state", put("steps", "x")),
    "chunks": ("pin", lambda _: {"call": "parameters", "chunks": [10**6]}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_no_client_makes_is_refused(
    name: str, server: Server, recorded: Recorded
) -> None:
    call, change = CALLS[name]
    with Peer(server) as peer:
        assert peer.enter({**recorded.terms, "run": "attacked", "fresh": True}) == ""
        peer.document(CALL, 1, changed(recorded.calls[call], change))
        if name in ("learning-rate", "flag"):  # which torch finds in the first chunk
            assert peer.answer()[0] in (PASS, ERROR)
        else:
            message = peer.error()
            assert message or name in ("unknown", "no-name")
            assert len(message) < 2000


@pytest.mark.parametrize("handle", [10**6, "1", None, [1], -1])
@pytest.mark.parametrize("run", ["attacked", "others", ["others"]], ids=["own", "other", "list"])
def test_a_question_about_a_seal_that_no_client_asks_is_refused(
    handle: object, run: object, server: Server, recorded: Recorded
) -> None:
    with Peer(server) as peer, Peer(server) as asking:
        terms = {**recorded.terms, "run": "attacked", "fresh": True}
        peer.greet()
        peer.document(HELLO, 0, terms)
        _, welcome = peer.answer()
        secret = json.loads(welcome)["secret"]
        question = {"what": "sealed", "run": run, "secret": secret, "handle": handle}
        asking.document(HELLO, 0, {"read": {**question, "timeout_s": None}, "token": None})
        assert 0 < len(asking.error()) < 2000


@pytest.mark.parametrize(("up", "down"), [(-1, 0), (0, 1 << 40), ("1", 1), (None, 1), (1025, 1)])
def test_a_measurement_of_the_link_without_end_is_refused(
    up: object, down: object, server: Server
) -> None:
    with Peer(server) as peer:
        question = {"what": "link", "run": "attacked", "up": up, "down": down}
        peer.document(HELLO, 0, {"read": question, "token": None})
        assert 0 < len(peer.error()) < 2000
    with Peer(server) as peer:
        question = {"what": "link", "run": "attacked", "up": 1, "down": 0}
        peer.document(HELLO, 0, {"read": question, "token": None})
        peer.send(BLOB, 0, nbytes=1 << 40)
        assert peer.error() == ""


def _pass(peer: Peer, recorded: Recorded) -> list[int]:
    assert peer.enter({**recorded.terms, "run": "attacked", "fresh": True}) == ""
    peer.document(CALL, 1, recorded.calls["step"])
    kind, content = peer.answer()
    assert kind == PASS
    found: list[int] = json.loads(content)["chunks"]
    return found


@pytest.mark.parametrize(
    ("kind", "index", "length"),
    [
        (GRADIENT, 1, None),
        (GRADIENT, 10**6, None),
        (GRADIENT, 0, 0),
        (GRADIENT, 0, 1 << 40),
        (PARAMETER, 1, None),
        (PARAMETER, 0, 7),
        (TENSOR, 0, None),
        (BLOB, 0, None),
        (CALL, 0, None),
        (END, 0, 0),
    ],
)
def test_a_step_with_other_frames_than_were_asked_for_ends_the_connection(
    kind: int, index: int, length: int | None, server: Server, recorded: Recorded
) -> None:
    with Peer(server) as peer:
        assert _pass(peer, recorded)[0] == 0
        content = recorded.gradients[0][32:]
        peer.send(kind, 1, content, index=index, nbytes=length)
        assert peer.error() == ""


@pytest.mark.parametrize("kind", [PARAMETER, TENSOR])
@pytest.mark.parametrize("index", [0, 1, 2, 10**6])
def test_an_edit_of_something_else_than_it_says_is_refused(
    kind: int, index: int, server: Server, recorded: Recorded
) -> None:
    with Peer(server) as peer:
        assert peer.enter({**recorded.terms, "run": "attacked", "fresh": True}) == ""
        edit = {"call": "edit", "chunks": [], "tensors": [1]}
        peer.document(CALL, 1, edit)
        peer.send(kind, 1, b"1234567", index=index)
        assert peer.error() == ""


@pytest.mark.parametrize(
    ("kind", "length"),
    [(TENSOR, 0), (TENSOR, 7), (TENSOR, 1 << 40), (PARAMETER, None), (BLOB, None), (END, 0)],
)
def test_state_of_another_length_than_was_asked_for_ends_the_connection(
    kind: int, length: int | None, server: Server, recorded: Recorded
) -> None:
    with Peer(server) as peer:
        assert peer.enter({**recorded.terms, "run": "attacked", "fresh": True}) == ""
        peer.document(CALL, 1, recorded.calls["load_state"])
        found, content = peer.answer()
        assert found == PASS
        first, last = json.loads(content)["range"]
        peer.send(kind, 1, bytes(4 * (last - first)), nbytes=length)
        assert peer.error() == ""


@pytest.mark.parametrize("content", [b"", bytes(4096), b"\xff" * 100], ids=["no", "zeros", "ones"])
def test_a_train_state_that_is_none_is_refused(
    content: bytes, server: Server, recorded: Recorded
) -> None:
    with Peer(server) as peer:
        assert peer.enter({**recorded.terms, "run": "attacked", "fresh": True}) == ""
        peer.document(CALL, 1, recorded.calls["checkpoint"])
        peer.send(BLOB, 1, content)
        peer.send(END, 1)
        assert peer.error()
        peer.document(CALL, 2, {"call": "position"})  # the connection goes on
        assert peer.answer()[0] == RESULT


def test_a_train_state_longer_than_was_agreed_is_not_read(
    server: Server, recorded: Recorded
) -> None:
    with Peer(server) as peer:
        assert peer.enter({**recorded.terms, "run": "attacked", "fresh": True}) == ""
        peer.document(CALL, 1, recorded.calls["checkpoint"])
        peer.send(BLOB, 1, nbytes=1 << 40)
        assert peer.error() == ""


def test_many_clients_that_say_nothing_keep_nobody_out_for_good(
    server: Server, recorded: Recorded
) -> None:
    silent = [Peer(server) for _ in range(80)]
    for peer in silent:
        peer.socket.close()
    with Peer(server) as peer:
        assert peer.enter({**recorded.terms, "run": "attacked", "fresh": True}) == ""


def test_runs_that_are_left_do_not_pile_up(server: Server, recorded: Recorded) -> None:
    for number in range(20):
        with Peer(server) as peer:
            assert peer.enter({**recorded.terms, "run": f"left-{number}"}) == ""
    files = server.open_files()
    assert sum("left-" in name for name in files) <= 2 * 9  # of each, its folder and its lock
    for number in range(20):
        with Peer(server) as peer:
            assert peer.enter({**recorded.terms, "run": f"left-{number}"}) == ""
            peer.document(CALL, 1, {"call": "close"})
            assert peer.answer()[0] == RESULT
