"""A store that was copied or moved to another directory or file system."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.campaigns import FULL
from tests.kernel import loop_devices
from tests.kernel.loop_devices import mounted
from tests.kernel.trainee import LAST_STEP, Plan, Report, Trainees

SEALED: Final = 3

COPY: Final = {
    "cp": ["cp", "-a", "{source}", "{target}"],
    "cp-sparse": ["cp", "-a", "--sparse=always", "{source}", "{target}"],
    "rsync-sparse": ["rsync", "-rS", "{source}/", "{target}"],
    "tar": ["sh", "-c", "mkdir {target} && tar -C {source} -cS . | tar -C {target} -x"],
    "mv": ["mv", "{source}", "{target}"],
}


@pytest.fixture(scope="module")
def original(trainees: Trainees, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("original")
    trainees.run(place, Plan(last_step=SEALED))
    return place


@pytest.fixture
def source(original: Path, tmp_path: Path) -> Path:
    """A store that may be changed."""
    shutil.copytree(original / "run", tmp_path / "source" / "run")
    return tmp_path / "source" / "run"


@pytest.fixture(scope="module", params=["same", *(loop_devices.MAKE if FULL else ["ext4"])])
def elsewhere(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A directory on the file system of the tests, or on another one."""
    place = tmp_path_factory.mktemp("elsewhere")
    if request.param == "same":
        yield place
        return
    if reason := loop_devices.why_not(request.param):
        pytest.skip(reason)
    with mounted(request.param, place) as found:
        yield found.path


def copy_store(how: str, source: Path, target: Path) -> None:
    command = [part.format(source=source, target=target) for part in COPY[how]]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    subprocess.run(command, check=True)


@pytest.mark.parametrize("how", COPY)
def test_a_copy_goes_on_and_the_original_is_untouched(
    how: str, source: Path, elsewhere: Path, trainees: Trainees, tmp_path: Path
) -> None:
    before = content(source)
    target = elsewhere / f"{how}-run"
    copy_store(how, source, target)
    assert trainees.newest(target) == SEALED
    plan = Plan(store=(str(target),))
    assert trainees.resume(tmp_path / "child", plan, SEALED) == SEALED
    if how == "mv":
        assert not source.exists()
    else:
        assert content(source) == before


def test_both_are_trained_at_once(
    source: Path, elsewhere: Path, trainees: Trainees, tmp_path: Path
) -> None:
    target = elsewhere / "both-run"
    copy_store("cp", source, target)
    places = {tmp_path / "one": Plan(store=(str(source),), last_step=2 * LAST_STEP)}
    places[tmp_path / "other"] = Plan(store=(str(target),), last_step=LAST_STEP)
    pids = {place: trainees.start(place, plan) for place, plan in places.items()}
    for place, pid in pids.items():
        assert trainees.wait(pid, place).status == 0
        assert Report(place).values("restored") == [str(SEALED)]
    for plan in places.values():
        assert trainees.newest(plan.store[0]) == plan.last_step


def test_a_checkpoint_alone_is_copied_into_a_new_store(
    source: Path, trainees: Trainees, tmp_path: Path
) -> None:
    target, name = tmp_path / "alone", f"step-{SEALED:08d}"
    shutil.copytree(source / name, target / name)
    assert trainees.resume(tmp_path / "child", Plan(store=(str(target),)), SEALED) == SEALED


def content(store: Path) -> dict[str, str]:
    """Return a digest of every file."""
    digest: Callable[[Path], str] = lambda path: hashlib.sha256(path.read_bytes()).hexdigest()  # noqa: E731
    return {str(p.relative_to(store)): digest(p) for p in store.rglob("*") if p.is_file()}
