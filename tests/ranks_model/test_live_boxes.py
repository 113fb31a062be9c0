"""What a rank holds: views of what it writes, copies by value, and edits that are noticed."""

from __future__ import annotations

import pytest
import torch

from offload.errors import MismatchError
from offload.format.boxes import Box
from offload.format.header import build_header
from offload.format.shares.model_shares import TensorBox, divide
from offload.model.live_boxes import EditCheck, LiveBox, views_of
from tests.ranks_model.cuts import divided

HEADER = build_header([("a", "F32", (6, 5)), ("b", "F32", (4,)), ("buffer", "F32", (3,))])
OWNED = divided({"a": (6, 5), "b": (4,)}, 2)


def test_views_are_memory_of_whole_tensors_and_of_local_shards():
    share = divide(HEADER, OWNED).share(0)
    whole = torch.arange(30.0).view(6, 5)
    local = torch.arange(100.0, 103.0)  # more of b than the rank writes
    held = [
        LiveBox.whole("a", whole),
        LiveBox("b", Box((0,), (3,)), local),
        LiveBox.whole("buffer", torch.zeros(3)),
    ]
    first, second, third = views_of(share, held)
    assert torch.equal(first, whole[:3])
    assert first.data_ptr() == whole.data_ptr()
    assert second.tolist() == [100.0, 101.0]
    assert third.shape == (3,)
    inner = divide(HEADER, [[], [*OWNED[0], *OWNED[1]]], writer=1).share(1)
    with pytest.raises(MismatchError, match=r"write \[2:4,\] of 'b', but holds \[0:3,\]"):
        views_of(inner, held)
    with pytest.raises(MismatchError, match=r"of 'b', but holds nothing of it"):
        views_of(inner, held[:1])


def test_a_shard_that_begins_later_is_counted_from_its_own_offsets():
    boxes = [[TensorBox("a", Box((0, 0), (3, 5)))], [TensorBox("a", Box((3, 0), (3, 5)))]]
    share = divide(HEADER, boxes).share(1)
    local = torch.arange(20.0).view(4, 5)
    (view,) = views_of(share, [LiveBox("a", Box((2, 0), (4, 5)), local)])
    assert torch.equal(view, local[1:])


def test_what_is_captured_by_value_does_not_change():
    tensor = torch.ones(3)
    by_value = LiveBox.whole("buffer", tensor, by_value=True).captured()
    by_reference = LiveBox.whole("buffer", tensor).captured()
    tensor.zero_()
    assert by_value.tensor.tolist() == [1, 1, 1]
    assert by_reference.tensor is tensor


class TestEdits:
    def test_a_tensor_that_changes_before_it_is_copied_is_named(self):
        share = divide(HEADER, OWNED).share(0)
        a, b = torch.ones(6, 5), torch.ones(4)
        check = EditCheck(share, [LiveBox.whole("b", b), LiveBox.whole("a", a)])
        b.add_(1)
        check.copied(share.stop_of("a"))
        with pytest.raises(RuntimeError, match=r"'b' was changed in place"):
            check.copied(share.stop_of("b"))

    def test_changes_after_the_copy_and_of_copies_are_allowed(self):
        share = divide(HEADER, OWNED).share(0)
        a, buffer = torch.ones(6, 5), torch.ones(3)
        held = [LiveBox.whole("a", a), LiveBox.whole("buffer", buffer, by_value=True)]
        check = EditCheck(share, held)
        check.copied(share.stop_of("a"))
        a.add_(1)
        buffer.add_(1)
        check.copied(share.nbytes)

    def test_what_the_rank_does_not_write_is_not_watched(self):
        """Rows that come from another rank change the tensor, but not this rank's share."""
        share = divide(HEADER, OWNED).share(1)
        a, buffer = torch.ones(6, 5), torch.ones(3)
        check = EditCheck(share, [LiveBox.whole("buffer", buffer), LiveBox.whole("a", a)])
        buffer.add_(1)
        check.copied(share.nbytes)
        with torch.inference_mode():
            made = LiveBox.whole("a", torch.ones(6, 5))
        EditCheck(share, [made]).copied(share.nbytes)

    def test_an_edit_of_other_rows_counts_until_the_own_ones_are_copied(self):
        """So whoever receives rows waits for the whole tensor: torch has one count for all rows."""
        share = divide(HEADER, OWNED).share(0)
        a = torch.ones(6, 5)
        check = EditCheck(share, [LiveBox.whole("a", a)])
        a[3:].add_(1)
        with pytest.raises(RuntimeError, match=r"'a' was changed"):
            check.copied(share.stop_of("a"))
