"""Steps that keep others out, and that decide which directories and which errors are believed."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone

_READER_OPENING = "offload/checkpoint/opening.py"
_SUPPLY = "offload/store/slots/supply.py"
_SEALING = "offload/store/sealing.py"
_LOCK = "offload/store/writer_lock.py"
_STORE = "offload/store/store.py"
_WITHDRAWAL = "offload/store/withdrawal.py"
_OPENING = "offload/store/opening.py"
_PLACES = "offload/store/directories.py"
_NEW_PLACES = "offload/store/new_directories.py"
_UNREADABLE = "offload/format/unreadable.py"
_VERIFY = "offload/checkpoint/verify.py"
_SLOT = "offload/store/slots/slot.py"
_PARTS = "offload/store/slots/part.py"
_TESTS = "tests/crash/test_writer_lock.py"
_FREE = "offload/store/slots/free.py"
_WAITING = "gds/waiting.py"
_WAITS = "tests/crash/test_interrupted_waits.py"
_TESTS_OF_WAITING = "tests/contract/test_waiting.py"
_MOVED = "tests/crash/test_moved_directory.py"
_DIRECTORIES = "tests/torch_contract/test_directories.py"
_GROUPS = "tests/torch_contract/test_process_groups.py"
_REMOTE = "tests/kernel/test_remote.py"
_LINKS = "tests/crash/test_hard_links.py"
_ERRORS = "tests/crash/test_environment_errors.py"
_DAMAGE = "tests/torch_contract/test_damaged_checkpoints.py::TestDamage"
_OVERLOOKED = "tests/crash/test_overlooked_steps.py"

_EACH_TURN = "        self._lock.require()  # after each wait again: the directory may be moved\n"
_TAKES_TURNS = "test_small_writes_take_their_turn_on_a_thread_that_is_not_interrupted"
_NOT_LATER = "test_a_transfer_that_an_interrupt_keeps_from_being_begun_does_not_run_later"

LOCKING = (
    Mutation(
        "lock-directory-shared",
        "the directory of a store is locked itself",
        (
            Edit(
                _LOCK,
                'of_directory = backend.lock(f"{directory}/.")',
                'of_directory = backend.lock(f"{directory}/.", shared=True)',
            ),
        ),
        (f"{_TESTS}::test_a_removed_lock_lets_nobody_in",),
    ),
    Mutation(
        "lock-file-not-locked",
        "LOCK is locked, for earlier versions lock nothing else",
        (
            Edit(
                _LOCK,
                'of_file = backend.lock(f"{directory}/{LOCK_NAME}", create=True)',
                'of_file = backend.lock(f"{directory}/.{LOCK_NAME}", create=True)',
            ),
        ),
        (f"{_TESTS}::test_an_earlier_version_and_this_one_keep_each_other_out",),
    ),
    Mutation(
        "lock-not-renewed",
        "a LOCK that was removed is made and locked again",
        (gone(_LOCK, "        held.of_file = again\n"),),
        (f"{_TESTS}::test_a_removed_lock_lets_nobody_in",),
    ),
    Mutation(
        "lock-another-file-taken",
        "a LOCK that somebody else has made is not taken for one's own",
        (Edit(_LOCK, "        if held.backend.stat(path) is not None:\n", "        if False:\n"),),
        (f"{_TESTS}::test_an_earlier_version_that_got_in_ends_all_writing",),
    ),
    Mutation(
        "lock-lost-and-found",
        "a lock that was lost once is lost for good",
        (
            Edit(
                _LOCK,
                "            if self._lost is not None:\n                raise self._lost\n",
                "            self._lost = None\n",
            ),
        ),
        (f"{_TESTS}::test_an_earlier_version_that_got_in_ends_all_writing",),
    ),
    Mutation(
        "lock-of-a-moved-directory",
        "a directory that was moved away is not written to by its old path",
        (
            Edit(
                _LOCK,
                "                if not held.of_directory.is_current():\n",
                "                if False:\n",
            ),
        ),
        (f"{_TESTS}::test_a_directory_that_was_moved_away_is_written_to_by_nobody_else",),
    ),
    Mutation(
        "lock-not-looked-at-for-a-slot",
        "the lock is looked at before a slot is made or taken",
        (
            gone(
                _SUPPLY,
                _EACH_TURN,
            ),
        ),
        (_TESTS, _MOVED),
    ),
    Mutation(
        "lock-not-looked-at-behind-a-wait-for-a-slot",
        "the lock is looked at again when a slot has been waited for",
        (
            Edit(
                _SUPPLY,
                "        look = partial(self._next_slot, layout, num_groups, reader_wait)\n",
                "        self._lock.require()\n"
                "        look = partial(self._next_slot, layout, num_groups, reader_wait)\n",
            ),
            gone(
                _SUPPLY,
                _EACH_TURN,
            ),
        ),
        (_MOVED,),
    ),
    Mutation(
        "lock-not-looked-at-behind-a-slot",
        "a slot that was made by its path is used only if the path still is the store's",
        (gone(_SUPPLY, "        self._require_place_of(slot)\n"),),
        (f"{_MOVED}::test_a_slot_that_came_to_lie_in_another_directory_is_not_written_to",),
    ),
    Mutation(
        "lock-not-looked-at-before-spare-slots-go",
        "spare slots are not removed by paths that may be another store's by now",
        (
            gone(
                _WITHDRAWAL,
                "        if not self._lock.is_held():\n"
                "            return  # their paths may name another process's files\n",
            ),
        ),
        (f"{_MOVED}::test_spare_slots_are_not_removed_from_another_store",),
    ),
    Mutation(
        "lock-not-looked-at-before-a-replacement",
        "a file is replaced only if its path still is the store's once it has been written",
        (
            gone(
                _STORE,
                "        try:\n"
                "            self._lock.require()\n"
                "        except BaseException:\n"
                "            file.close()\n"
                "            raise\n",
            ),
        ),
        (f"{_MOVED}::test_a_train_state_is_not_replaced_in_another_store",),
    ),
    Mutation(
        "lock-not-looked-at-before-the-commit",
        "the lock is looked at again just before the rename that commits",
        (
            gone(
                _SEALING,
                "                self._lock.require()\n",
            ),
        ),
        (f"{_TESTS}::test_it_is_looked_at_again_just_before_the_commit",),
    ),
    Mutation(
        "lock-not-looked-at-before-a-withdrawal",
        "the lock is looked at before each withdrawal",
        (gone(_WITHDRAWAL, "        self._lock.require()\n"),),
        (f"{_TESTS}::test_it_is_looked_at_before_each_withdrawal",),
    ),
    Mutation(
        "lock-not-looked-at-for-what-is-given-back",
        "a slot is not removed where another process may be writing to it by now",
        (
            Edit(
                _STORE,
                "            if self._quarantine.has(slot) or not self._lock.is_held():\n",
                "            if self._quarantine.has(slot):\n",
            ),
        ),
        (
            f"{_OVERLOOKED}::test_a_slot_that_is_given_back_is_not_removed_from_under_another_writer",
        ),
    ),
    Mutation(
        "interrupt-slot-free-twice",
        "a slot that is given back twice, because of an interrupt, is lent once",
        (Edit(_FREE, "        if slot not in self._slots:\n", "        if True:\n"),),
        (f"{_WAITS}::test_nothing_waits_for_ever_behind_an_interrupt[lets_go_of_its_slot-None]",),
    ),
    Mutation(
        "interrupt-lock-in-python",
        "no handler of a signal runs between the acquisition of a lock and the body",
        (
            Edit(
                _WAITING,
                "    def notify_all(self) -> None:\n",
                "    def __enter__(self) -> bool:\n"
                "        return super().__enter__()\n\n"
                "    def notify_all(self) -> None:\n",
            ),
        ),
        (f"{_TESTS_OF_WAITING}::test_a_monitor_is_free_after_an_interrupt",),
    ),
    Mutation(
        "interrupt-seal-that-nobody-makes",
        "a seal that was interrupted before it began is not waited for",
        (
            Edit(
                "offload/engine/training_state.py",
                "            if seal is None or seal.cancel():  # otherwise the seal goes on\n",
                "            if False:\n",
            ),
        ),
        (f"{_WAITS}::test_a_seal_that_was_interrupted_while_it_began_is_begun_or_not",),
    ),
    Mutation(
        "interrupt-not-looked-again",
        "a change that an interrupt has kept from being told is seen all the same",
        (Edit(_WAITING, "ticket.acquire(timeout=_LOST_S)", "ticket.acquire(timeout=1e6)"),),
        (f"{_TESTS_OF_WAITING}::test_a_change_that_nobody_was_told_of_is_seen",),
    ),
    Mutation(
        "interrupt-transfer-runs-on",
        "a transfer that was interrupted while it began does not run later",
        (
            gone(
                "gds/backends/threads.py",
                "        except BaseException:\n"
                "            transfer.abandon()\n            raise\n",
            ),
            Edit(
                "gds/backends/threads.py",
                "        try:\n            with self._lock:\n",
                "        if True:\n            with self._lock:\n",
            ),
        ),
        (f"{_TESTS_OF_WAITING}::{_NOT_LATER}",),
    ),
    Mutation(
        "interrupt-turn-on-the-main-thread",
        "a write that takes turns is made on a thread that no interrupt comes to",
        (
            Edit(
                "gds/backends/posix_file.py",
                "        if self._descriptors.takes_turns:\n",
                "        if False:\n",
            ),
        ),
        (f"{_TESTS_OF_WAITING}::{_TAKES_TURNS}",),
    ),
    Mutation(
        "place-with-other-things",
        "a directory that holds other things is no store",
        (
            Edit(
                _PLACES,
                "        if place.exists and not place.is_store and place.others:\n",
                "        if False:\n",
            ),
        ),
        (f"{_DIRECTORIES}::TestOtherThings",),
    ),
    Mutation(
        "place-missing-is-made",
        "a directory of a store that is missing is not made",
        (gone(_PLACES, "    _require_all(places)\n"),),
        (f"{_DIRECTORIES}::TestMissing",),
    ),
    Mutation(
        "place-empty-mount-point",
        "an empty directory is not taken for a drive with parts of the checkpoints",
        (
            Edit(
                _PLACES,
                "        if is_spread and not fresh and not place.is_store:\n",
                "        if False:\n",
            ),
        ),
        (f"{_DIRECTORIES}::TestMissing",),
    ),
    Mutation(
        "place-part-as-first",
        "a directory of parts is not begun as a store of its own",
        (Edit(_PLACES, "    if first.parts and not first.is_first:\n", "    if False:\n"),),
        (f"{_DIRECTORIES}::TestOrder",),
    ),
    Mutation(
        "place-store-as-second",
        "the first directory of a store is not given a part of another",
        (
            Edit(
                _PLACES,
                "        if place.is_first:\n            raise",
                "        if False:\n            raise",
            ),
        ),
        (f"{_DIRECTORIES}::TestOrder",),
    ),
    Mutation(
        "place-order-not-checked",
        "directories are in the order in which the store has them",
        (Edit(_PLACES, "    if own and position not in own:\n", "    if False:\n"),),
        (f"{_DIRECTORIES}::TestOrder",),
    ),
    Mutation(
        "place-parts-of-another",
        "a directory with parts of another store only is not used",
        (
            Edit(
                _PLACES,
                "    if not own and place.drives and all_known:\n",
                "    if False:\n",
            ),
        ),
        (f"{_DIRECTORIES}::TestOrder",),
    ),
    Mutation(
        "place-remote-accepted",
        "a store on a file system that is served from elsewhere is refused",
        (
            Edit(
                _NEW_PLACES,
                "        if capabilities.remote and not allow_remote:\n",
                "        if False:\n",
            ),
        ),
        (f"{_REMOTE}::test_a_network_file_system_is_refused_by_name",),
    ),
    Mutation(
        "place-made-by-another",
        "a directory that another process makes at the same time is there",
        (
            Edit(
                _NEW_PLACES,
                "            if error.errno != errno.EEXIST or made",
                "            if True or made",
            ),
        ),
        (f"{_GROUPS}::test_directories_that_others_make_at_the_same_time_are_there",),
    ),
    Mutation(
        "error-counts-as-damage",
        "what could not be read stops the opening of a store",
        (
            Edit(
                _OPENING,
                "        except CheckpointError as error:\n",
                "        except (CheckpointError, StorageError) as error:\n",
            ),
        ),
        (f"{_ERRORS}::test_the_error_says_what_to_do",),
    ),
    Mutation(
        "error-counts-as-damage-for-readers",
        "what could not be read stops a reader from taking an older checkpoint",
        (
            Edit(
                _READER_OPENING,
                "        except CheckpointError as error:\n            refused.append(",
                "        except (CheckpointError, OSError) as error:\n            refused.append(",
            ),
        ),
        (f"{_ERRORS}::test_the_error_says_what_to_do",),
    ),
    Mutation(
        "error-counts-as-damage-for-verify",
        "what could not be read is not reported as damaged",
        (
            Edit(
                _VERIFY,
                "isinstance(error, CheckpointError) or is_of_content(error)",
                "True",
            ),
        ),
        (f"{_ERRORS}::test_an_error_that_passes_costs_no_checkpoint[verifying-1]",),
    ),
    Mutation(
        "error-of-content-for-ever",
        "a file that is gone says something about the content",
        (Edit(_UNREADABLE, "    return error.errno in _OF_CONTENT\n", "    return False\n"),),
        (f"{_ERRORS}::test_what_says_something_about_the_content_is_refused",),
    ),
    Mutation(
        "pin-error-ignored",
        "a store is not opened while a pin of it cannot be read",
        (
            Edit(
                "offload/store/expiry.py",
                "        if found.failures:\n            raise found.failures[0]\n",
                "",
            ),
        ),
        (
            f"{_ERRORS}::test_a_pin_that_could_not_be_read_stops_the_opening_and_keeps_everything_later",
        ),
    ),
    Mutation(
        "reader-falls-back-in-silence",
        "a reader says that it takes an older checkpoint",
        (
            Edit(
                _READER_OPENING,
                "        _warn_passed_over(storage, passed_over, parts, need_parts=need_parts)\n",
                "        pass\n",
            ),
        ),
        (f"{_DAMAGE}::test_is_passed_over_with_the_reason",),
    ),
    Mutation(
        "reader-warns-of-what-was-recycled",
        "a checkpoint that was recycled while it was looked at is no damaged one",
        (
            Edit(
                _READER_OPENING,
                "            if now is not None and now.inode == one.inode:\n",
                "            if True:\n",
            ),
        ),
        (f"{_ERRORS}::test_a_checkpoint_that_is_recycled_while_it_is_looked_at_is_not_warned_of",),
    ),
    Mutation(
        "link-invalidated",
        "a checkpoint that has other names is not even made invalid",
        (
            Edit(
                _WITHDRAWAL,
                "                if slot is not None and _may_be_shared(slot):\n",
                "                if False:\n",
            ),
        ),
        (_LINKS,),
    ),
    Mutation(
        "link-of-a-leftover-slot",
        "a leftover slot that has other names is not rewritten",
        (gone(_SLOT, "    if has_other_names(backend, path):\n        return None\n"),),
        (_LINKS,),
    ),
    Mutation(
        "link-of-a-leftover-part",
        "a leftover part that has other names is not rewritten",
        (
            Edit(
                _PARTS,
                "    if not _fits(backend, path, sizes) or has_other_names(backend, path):\n",
                "    if not _fits(backend, path, sizes):\n",
            ),
        ),
        (_LINKS,),
    ),
    Mutation(
        "link-not-told",
        "where it cannot be told whether a slot has other names it counts as having them",
        (
            Edit(
                _WITHDRAWAL,
                "    except StorageError:\n        return True\n",
                "    except StorageError:\n        raise\n",
            ),
        ),
        (f"{_LINKS}::test_what_cannot_be_told_counts_as_linked",),
    ),
)
