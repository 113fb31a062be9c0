"""What failed uploads have sent goes when nobody needs it; and nothing is believed for long."""

from __future__ import annotations

from pathlib import Path

import pytest

import offload
from offload.errors import OffloadError, TierError
from offload.tiers import list_tier, push, verify_tier
from offload.tiers.services.opening import open_objects
from tests.stores.small import train
from tests.tiers.proxy import Proxy, Request
from tests.tiers.test_arriving import optimizer_with

SMALL = 8192


def records(store: Path) -> list[str]:
    return [path.name for path in (store / "tiers").glob("*.upload")]


def train_beside_uploads(optimizer: offload.OffloadedOptimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        train(optimizer, 1)
        assert optimizer._uploads is not None
        assert optimizer._uploads.wait(60)


def test_uploads_that_fail_leave_as_much_as_the_store_keeps(
    s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    """The tier refuses objects that come late; then it takes everything again."""
    store = tmp_path / "store"
    proxy.rule = lambda r: (
        "403:AccessDenied" if r.method == "PUT" and "/state/exp_avg_sq" in r.path else ""
    )
    with optimizer_with(store, s3, keep=2, fresh=True) as optimizer:
        train_beside_uploads(optimizer, 8)
        left = list_tier(s3)
        assert [copy.marker for copy in left] == [None] * len(left)
        assert 1 <= len(left) <= 4
        assert len(records(store)) == len(left)
        proxy.rule = lambda _: ""
        train_beside_uploads(optimizer, 4)
    assert records(store) == []
    assert all(copy.marker is not None for copy in list_tier(s3))


def test_a_tier_that_is_away_leaves_no_records(
    tmp_path: Path, s3: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.tiers.background.RETRY_S", 0.01)
    proxy.rule = lambda _: "cut"
    with optimizer_with(tmp_path / "store", s3, keep=2, fresh=True) as optimizer:
        train_beside_uploads(optimizer, 6)
    assert records(tmp_path / "store") == []


def test_an_upload_that_runs_is_nobodys_leftover(store: Path, s3: str) -> None:
    """Its checkpoint is recycled, but it holds the lock of its record, and ends by itself."""
    seen: list[int] = []

    def progress(done: int, _: int) -> None:
        if seen:
            return
        with optimizer_with(store, s3, keep=1) as optimizer:
            optimizer.restore()
            train_beside_uploads(optimizer, 3)
        seen.append(len([copy for copy in list_tier(s3) if copy.marker is None]))

    with pytest.raises(OffloadError, match="recycled"):
        push(store / "step-00000002", s3, object_bytes=1, num_transfers=1, progress=progress)
    assert seen == [1]
    assert all(copy.marker is not None for copy in list_tier(s3))


def test_uploads_of_other_stores_are_no_leftovers(store: Path, s3: str, tmp_path: Path) -> None:
    with open_objects(s3) as objects:
        objects.put(f"{'a' * 32}/gen-00000001/{'b' * 32}/WRITER.json", b"{}")
    with optimizer_with(tmp_path / "new", s3, fresh=True, keep=1) as optimizer:
        train_beside_uploads(optimizer, 3)
    assert f"{'a' * 32}" in {copy.identity.store_id for copy in list_tier(s3)}


@pytest.mark.parametrize("change", ["swapped", "another byte"])
def test_what_an_interrupted_upload_had_checked_is_checked_again(
    store: Path, s3: str, proxy: Proxy, change: str
) -> None:
    """Somebody may have changed it meanwhile, and no size tells."""

    def rule(request: Request) -> str:
        return "403:AccessDenied" if request.method == "PUT" and "COMPLETE" in request.path else ""

    proxy.rule = rule
    with pytest.raises(TierError):
        push(store, s3, object_bytes=SMALL)
    proxy.rule = lambda _: ""
    with open_objects(s3) as objects:
        one, two = (
            next(name for name in objects.sizes_below("") if name.endswith(f"state/{array}.000000"))
            for array in ("exp_avg", "exp_avg_sq")
        )
        data = [objects.get(name, 1 << 20) for name in (one, two)]
        if change == "swapped":
            objects.put(one, data[1])
            objects.put(two, data[0])
        else:
            objects.put(one, data[0][:-1] + bytes([data[0][-1] ^ 1]))
    again = push(store, s3, object_bytes=SMALL)
    assert again.num_sent == (2 if change == "swapped" else 1)
    assert [report.ok for report in verify_tier(s3)] == [True]
