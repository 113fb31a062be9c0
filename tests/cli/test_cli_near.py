"""`offload ls`, `show` and `verify` of a run on a server, while a client trains in it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command_line import Run
from tests.near.servers import serving
from tests.stores.files import flip_on_disk
from tests.stores.small import make_model, make_optimizer, train


@dataclass(frozen=True)
class Served:
    """A run on a server, in which a client of this process trains."""

    url: str
    store: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("near")) as server:
        url = server.url("run")
        with make_optimizer(make_model(), directory=url, keep=2) as optimizer:
            train(optimizer, 4, seal_at=(2, 4), losses={2: 3.5, 4: 3.25})
            optimizer.pin("best", 2)
            yield Served(url, server.runs / "run")


@pytest.mark.parametrize(
    "command",
    [
        *(["ls"], ["ls", "--wide"], ["ls", "--json"], ["verify"], ["verify", "--json"]),
        *(["show", "--json"], ["show", "--tensors"]),
    ],
    ids=" ".join,
)
def test_the_output_is_that_of_a_directory_but_for_the_path(
    run: Run, served: Served, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # so that no path is cut into lines
    code, there, _ = run(command[0], served.url, *command[1:])
    assert code == 0
    _, here, _ = run(command[0], served.store, *command[1:])
    assert served.url in there
    assert _without(there, served.url) == _without(here, str(served.store))


def _without(output: str, path: str) -> str:
    """Return an output without a path, and without the spaces that fill its cell."""
    return " ".join(output.replace(path, "PATH").replace("─", "").split())


def test_one_checkpoint_has_a_url(run: Run, served: Served) -> None:
    older = f"{served.url}/step-00000002"
    code, out, _ = run("verify", older)
    assert (code, out.splitlines()[0].partition(": ")[0]) == (0, older)
    code, out, _ = run("show", older, "--json")
    assert (code, '"step": 2' in out) == (0, True)


def test_damage_is_found_by_the_server(run: Run, served: Served) -> None:
    file = served.store / "step-00000002" / "exp_avg.safetensors"
    before = file.read_bytes()
    flip_on_disk(file, 5000)
    code, out, error = run("verify", served.url)
    with file.open("r+b") as whole:
        whole.write(before)
    assert code == 1
    assert f"{served.url}/step-00000002: damaged" in out
    assert str(file) in error


COMMANDS = (
    *("du", "top", "report", "prune", "size", "serve", "pin {} x", "unpin {} x"),
    *("push {} s3://b/a", "pull s3://b/a {}", "export {} out --to pt", "import {} out"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_other_commands_say_where_they_must_run(run: Run, served: Served, command: str) -> None:
    name, *rest = (command if "{}" in command else f"{command} {{}}").split()
    code, out, error = run(name, *(served.url if one == "{}" else one for one in rest))
    assert (code, out) == (1, "")
    assert error.startswith(f"error: offload {name} must run where the server of {served.url} runs")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("offload+unix:///nowhere/s/run", "cannot be reached (No such file or directory)"),
        ("offload+unix:///nowhere/s/ru n", "is not the name of a run"),
        ("offload://host/a/run", "is not the address of a run on a server"),
        ("{}/step-00000003", "there is no checkpoint or store here"),
        ("{}2", "there is no store here"),
    ],
)
def test_what_cannot_be_read_is_one_line(run: Run, served: Served, url: str, why: str) -> None:
    code, out, error = run("show" if "step" in url else "ls", url.format(served.url))
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert why in error


def test_a_server_marks_nothing_for_others(run: Run, served: Served) -> None:
    code, _, error = run("verify", served.url, "--quarantine")
    assert (code, "run it there" in error) == (2, True)


def test_the_link_is_measured_for_the_size_of_a_run(run: Run, served: Served) -> None:
    drives = ("--read", "1000", "--write", "1000", "--set", "update_gbps=1000")
    code, out, error = run("size", "1B", "--link", served.url, "--json", *drives)
    assert (code, error) == (0, "")
    found = json.loads(out)
    rates = found["link"]
    assert {*rates} == {"to_server", "from_server", "both"}
    assert all(rate > 0 for rate in rates.values())
    (there,) = (step for step in found["steps"] if step["place"] == "storage")
    assert there["limited_by"] == "the network"
    assert there["seconds"] == pytest.approx(2 / rates["both"])
    code, out, _ = run("size", "1B", "--link", served.url)
    assert (code, "both at once" in out) == (0, True)
    code, _, error = run("size", "1B", "--link", "offload+unix:///nowhere/s/run")
    assert (code, error.count("\n"), "cannot be reached" in error) == (1, 1, True)
    code, _, error = run("size", "1B", "--link", str(served.store))
    assert (code, "is not the address of a run on a server" in error) == (1, True)


@pytest.mark.parametrize("command", [["ls", "URL"], ["size", "1B", "--link", "URL"]])
def test_torch_is_not_loaded(served: Served, command: list[str]) -> None:
    words = ["offload", *(served.url if word == "URL" else word for word in command)]
    code = (
        f"import sys; sys.argv = {words!r}\n"
        "from offload.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules)\n"
    )
    program = [sys.executable, "-c", code]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
