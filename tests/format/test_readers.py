"""What readers say of stores that are not whole, and what they hold on to."""

import gc
import warnings

import pytest

from gds import MemoryBackend
from offload import open_checkpoint
from offload.errors import RecycledError
from tests.stores import small
from tests.stores.files import contents, remove_tree, write


def test_an_abandoned_checkpoint_that_a_warning_keeps_has_no_lock_any_more():
    """Whoever reads it learns that it has been recycled, and takes nothing for damage."""
    backend = small.memory_store(2)
    path = f"{small.STORE}/step-00000001"
    found = open_checkpoint(path, backend=backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del found
        gc.collect()
    (kept,) = [one.source for one in caught if one.category is ResourceWarning]
    remove_tree(backend, path)
    with pytest.raises(RecycledError):
        kept.verify()
    with pytest.raises(RecycledError):
        _ = kept.train_state
    kept.close()


def test_what_cannot_be_newer_than_the_newest_checkpoint_needs_no_warning():
    """Another store's checkpoint of the same generation, of which something is missing."""
    other = MemoryBackend()
    with small.make_optimizer(small.make_model(), other) as optimizer:
        small.train(optimizer, 2, seal_at=[2])
    backend, foreign = small.memory_store(1), f"{small.STORE}/step-00000002"
    backend.make_dir(foreign)
    for name, data in contents(other, foreign).items():
        if name != "train_state.safetensors":
            write(backend, f"{foreign}/{name}", data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with open_checkpoint(small.STORE, backend=backend) as found:
            assert (found.step, found.generation) == (1, 1)
