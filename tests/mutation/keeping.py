"""Steps of what is kept: policies, pins, and giving back space where nobody trains."""

from __future__ import annotations

from tests.mutation.mutation import Edit, Mutation, gone, killed, power

_SEALING = "offload/store/sealing.py"
_KEEPING = "offload/store/expiry.py"
_RETENTION = "offload/retention/policy.py"
_PINS = "offload/retention/pins.py"
_PINNING = "offload/store/maintenance/pinning.py"
_PRUNING = "offload/store/maintenance/pruning.py"
_STORE = "offload/store/store.py"
_WITHDRAWAL = "offload/store/withdrawal.py"
_ENGINE = "offload/engine/engine.py"
_RESUME = "offload/engine/resume.py"
_STEPS = "tests/crash/test_protocol_steps.py"
_CLI = "tests/cli/test_cli_retention.py"
_CONTRACT = "tests/torch_contract"
_POLICIES = f"{_CONTRACT}/test_retention.py::TestPolicies"
_OF_KEPT = "tests/crash/test_what_is_kept.py"
_OF_PINS = f"{_CONTRACT}/test_pins.py::TestPins"
_RACES = f"{_CONTRACT}/test_pin_races.py::TestRaces"
_FULL = f"{_CONTRACT}/test_retention_full_disk.py::TestFullDisk"
_PIN_FAULTS = "tests/crash/test_pin_faults.py::test_any_operation_of_pinning_may_fail"
_REPLACED = f"{_OF_PINS}::test_what_replaces_or_withdraws_a_pinned_one_is_refused"
_UNREADABLE = f"{_OF_PINS}::test_one_that_cannot_be_read_keeps_everything"
_NOT_SYNCED = f"{_STEPS}::test_pins_that_could_not_be_made_durable_end_all_reuse"
_PRUNE_VERIFY = (
    f"{_CLI}::test_prune_verify_refuses_before_anything_is_removed_if_what_is_kept_is_damaged"
)
_PRUNE_CRASH = f"{_STEPS}::test_power_lost_while_nothing_trains_and_a_store_is_pruned"

_PINNED = power("pinned-keep=1")
_PINNED_KILLED = killed("pinned-keep=1", "pinned-keep=2")
_ALWAYS = " | pinned | newest"
_WITHDRAWAL_SYNC = """\
        found = self._durable_pins()
        return bool("""
_REPLACEMENT_SYNC = """\
        found = self._durable_pins()
        if names := found.names_at(path)"""
_READ = "        found = self.pins()\n"
_READ_AND_SYNC = """\
        found = self.pins()
        with self._poison.fatal("the pins could not be made durable"):
            sync_pins(self._backend, self._directory)
"""
_WRITTEN = """\
            with guard:
                file.sync()
                backend.rename(new, f"{directory}/{pin.name}")
                backend.sync_dir(directory)
                backend.sync_dir(store)
"""
_REMOVED = """\
    with writing(store), guard or nullcontext():
        backend.remove(path)
        backend.sync_dir(f"{store}/{PINS_NAME}")
"""

KEEPING = (
    Mutation(
        "keep-newest-unasked",
        "the newest is kept, whatever the policy says",
        (
            Edit(
                _RETENTION,
                "policy.kept(ordered) | pinned | newest",
                "policy.kept(ordered) | pinned",
            ),
        ),
        (f"{_POLICIES}::test_every_third_step_stays_beside_the_newest", _POLICIES),
    ),
    Mutation(
        "keep-incoming-beside-its-step",
        "what is sealed takes the place of an older checkpoint of its step",
        (
            Edit(
                _KEEPING,
                "            current = [c for c in current if c.manifest.step != incoming.step]\n",
                "            pass\n",
            ),
        ),
        (f"{_STEPS}::test_sealing_a_step_again_costs_no_older_checkpoint",),
    ),
    Mutation(
        "keep-without-incoming",
        "what is sealed counts as the newest",
        (Edit(_KEEPING, "            records.append(incoming)\n", "            pass\n"),),
        (
            f"{_POLICIES}::test_as_many_slots_as_are_kept_and_one",
            "tests/crash/test_concurrency.py::test_there_is_never_more_than_one_slot_to_work_in",
        ),
    ),
    Mutation(
        "keep-by-metrics-of-incoming",
        "what is sealed displaces nobody by its metrics before it is durable",
        (
            Edit(
                _WITHDRAWAL,
                "        incoming = sealing and replace(sealing, metrics={})\n",
                "        incoming = sealing\n",
            ),
        ),
        (f"{_POLICIES}::test_the_best_stays_until_a_better_one_is_durable",),
    ),
    Mutation(
        "keep-what-was-given-up",
        "checkpoints of a history that was given up do not count",
        (
            Edit(
                _KEEPING,
                "[c for c in self._checkpoints if not c.superseded]",
                "[*self._checkpoints]",
            ),
        ),
        (
            f"{_STEPS}::test_a_history_that_was_given_up_is_gone_when_the_new_one_is_durable",
            *power("started-over-keep=2"),
        ),
    ),
    Mutation(
        "slots-of-pinned-not-counted",
        "pinned checkpoints need slots beside those that are recycled",
        (
            Edit(
                _KEEPING,
                "_records(self.current, self.pins())) + 1",
                "_records(self.current, FoundPins())) + 1",
            ),
        ),
        (f"{_FULL}::test_a_full_disk_is_found_at_construction_with_the_pins_counted",),
    ),
    Mutation(
        "slots-too-many",
        "slots that retention has no room for are removed",
        (
            Edit(
                _WITHDRAWAL,
                "        most = self._keeping.num_slots()\n",
                "        most = self._keeping.num_slots() + 1\n",
            ),
        ),
        (f"{_POLICIES}::test_a_narrower_policy_gives_slots_back",),
    ),
    Mutation(
        "pin-no-sync",
        "sync of a pin before it takes its name",
        (Edit(_PINS, _WRITTEN, _WRITTEN.replace("                file.sync()\n", "")),),
        _PINNED,
    ),
    Mutation(
        "pin-no-dir-sync",
        "sync of the name of a pin",
        (
            Edit(
                _PINS,
                _WRITTEN,
                _WRITTEN.replace("                backend.sync_dir(directory)\n", ""),
            ),
        ),
        _PINNED,
    ),
    Mutation(
        "pin-no-store-sync",
        "sync of the name of the directory of pins",
        (Edit(_PINS, _WRITTEN, _WRITTEN.replace("                backend.sync_dir(store)\n", "")),),
        _PINNED,
    ),
    Mutation(
        "pin-removed-first",
        "atomicity: a name is on the old checkpoint until it is on the new one",
        (
            Edit(
                _PINS,
                _WRITTEN,
                _WRITTEN.replace(
                    "                backend.rename(new",
                    '                if backend.stat(f"{directory}/{pin.name}") is not None:\n'
                    '                    backend.remove(f"{directory}/{pin.name}")\n'
                    "                backend.rename(new",
                ),
            ),
        ),
        (f"{_OF_PINS}::test_a_name_is_never_gone_while_it_moves",),
    ),
    Mutation(
        "pin-failed-sync-forgotten",
        "poison after a pin could not be made durable",
        (Edit(_PINS, _WRITTEN, _WRITTEN.replace("with guard", "with nullcontext()")),),
        (f"{_STEPS}::test_a_pin_that_could_not_be_made_durable_ends_all_reuse",),
    ),
    Mutation(
        "unpin-no-sync",
        "sync of the removal of a pin",
        (
            Edit(
                _PINS,
                _REMOVED,
                _REMOVED.replace('        backend.sync_dir(f"{store}/{PINS_NAME}")\n', ""),
            ),
        ),
        _PINNED,
    ),
    Mutation(
        "unpin-failed-sync-forgotten",
        "poison after the removal of a pin could not be made durable",
        (Edit(_PINS, _REMOVED, _REMOVED.replace("guard or nullcontext()", "nullcontext()")),),
        (f"{_STEPS}::test_a_pin_that_could_not_be_made_durable_ends_all_reuse",),
    ),
    Mutation(
        "pin-temporary-left",
        "what a pin that could not be made has left is removed",
        (
            Edit(
                _PINS,
                "                if backend.stat(new) is not None:\n"
                "                    backend.remove(new)\n            raise\n",
                "                pass\n            raise\n",
            ),
        ),
        (f"{_PIN_FAULTS}[moved]",),
    ),
    Mutation(
        "pins-found-not-synced",
        "sync of the pins that are gone by before a checkpoint is withdrawn",
        (Edit(_KEEPING, _WITHDRAWAL_SYNC, "        found = self.pins()\n        return bool("),),
        _PINNED_KILLED,
    ),
    Mutation(
        "pins-found-not-synced-before-exchange",
        "sync of the pins that are gone by before a checkpoint is replaced",
        (
            Edit(
                _KEEPING,
                _REPLACEMENT_SYNC,
                "        found = self.pins()\n        if names := found.names_at(path)",
            ),
        ),
        (f"{_STEPS}::test_a_pin_that_was_moved_away_is_durable_before_its_checkpoint_is_replaced",),
    ),
    Mutation(
        "pins-synced-too-early",
        "sync of the pins after they have been read: one may be moved in between",
        (
            Edit(
                _KEEPING,
                _READ_AND_SYNC,
                _READ_AND_SYNC.removeprefix(_READ) + _READ,
            ),
        ),
        (f"{_OF_KEPT}::TestPins::test_one_that_is_moved_away_meanwhile_is_lost_by_no_power_cut",),
    ),
    Mutation(
        "pins-failed-sync-forgotten",
        "poison after the pins could not be synced before a checkpoint goes",
        (
            Edit(
                _KEEPING,
                _READ_AND_SYNC,
                _READ_AND_SYNC.replace(
                    'with self._poison.fatal("the pins could not be made durable"):', "if True:"
                ),
            ),
        ),
        (f"{_NOT_SYNCED}[withdrawn]", f"{_NOT_SYNCED}[replaced]"),
    ),
    Mutation(
        "pins-not-counted",
        "a pinned checkpoint does not expire",
        (
            Edit(
                _RETENTION,
                "policy.kept(ordered) | pinned | newest",
                "policy.kept(ordered) | newest",
            ),
        ),
        (f"{_OF_PINS}::test_a_pinned_checkpoint_stays_whatever_keep_says",),
    ),
    Mutation(
        "pins-not-read-under-lock",
        "pins are read again with the lock without which nothing is withdrawn",
        (
            Edit(
                _WITHDRAWAL,
                "            if self._keeping.is_pinned(checkpoint):  # perhaps a new pin\n",
                "            if False:\n",
            ),
        ),
        (f"{_RACES}::test_before_it_is_locked_the_pin_is_in_time",),
    ),
    Mutation(
        "pins-read-before-lock",
        "order: the lock is taken, then pins are read",
        (
            Edit(
                _WITHDRAWAL,
                "        lock = try_lock(self._backend, checkpoint.path)\n",
                "        is_pinned = self._keeping.is_pinned(checkpoint)\n"
                "        lock = try_lock(self._backend, checkpoint.path)\n",
            ),
            Edit(
                _WITHDRAWAL,
                "            if self._keeping.is_pinned(checkpoint):  # perhaps a new pin\n",
                "            if is_pinned:\n",
            ),
        ),
        (f"{_RACES}::test_before_it_is_locked_the_pin_is_in_time",),
    ),
    Mutation(
        "pin-without-lock",
        "a checkpoint is locked while it is pinned from outside",
        (
            Edit(
                _PINNING,
                "        write_pin(opened.backend, store, pin_of(name, opened.path,"
                " opened.manifest))\n        return opened.path\n",
                "        made = pin_of(name, opened.path, opened.manifest)\n"
                "    write_pin(opened.backend, store, made)\n    return opened.path\n",
            ),
        ),
        (f"{_RACES}::test_while_the_pin_is_written_it_is_passed_over",),
    ),
    Mutation(
        "pin-of-what-was-recycled",
        "a handle's pin is refused when its generation is gone",
        (
            Edit(
                _PINNING,
                "if isinstance(checkpoint, Checkpoint) and opened.generation !="
                " checkpoint.generation:",
                "if False:",
            ),
        ),
        (f"{_OF_PINS}::test_of_a_generation_that_is_gone_pin_nothing",),
    ),
    Mutation(
        "pin-by-name-only",
        "a pin is of one generation of one store",
        (
            Edit(
                _PINS,
                "            manifest.store_id,\n            manifest.generation,\n        )\n",
                "            self.store_id,\n            self.generation,\n        )\n",
            ),
        ),
        (f"{_OF_PINS}::test_of_another_generation_of_the_same_name_keeps_nothing",),
    ),
    Mutation(
        "pin-digest-not-checked",
        "a pin is what its digest says",
        (
            Edit(
                "offload/format/document.py",
                'if not isinstance(body, dict) or document.get("digest") != _digest_or_none(body):',
                "if not isinstance(body, dict):",
            ),
        ),
        (f"{_UNREADABLE}[edited]",),
    ),
    Mutation(
        "unreadable-pin-expires",
        "nothing expires while a pin cannot be read",
        (
            Edit(
                _KEEPING,
                "        if found.unreadable:\n            return []\n",
                "",
            ),
        ),
        (f"{_UNREADABLE}[empty]",),
    ),
    Mutation(
        "unreadable-pin-under-lock",
        "a pin that has just become unreadable keeps what is about to be withdrawn",
        (
            Edit(
                _KEEPING,
                "bool(found.unreadable or found.names_of(checkpoint.path, checkpoint.manifest))",
                "bool(found.names_of(checkpoint.path, checkpoint.manifest))",
            ),
        ),
        (f"{_RACES}::test_before_it_is_locked_a_pin_has_become_unreadable",),
    ),
    Mutation(
        "unreadable-pin-replaced",
        "nothing is replaced while a pin cannot be read",
        (
            Edit(
                _KEEPING,
                "        if found.unreadable:\n"
                "            raise PinError(\n"
                '                f"{path}: would be replaced',
                "        if False:\n            raise PinError(\n"
                '                f"{path}: would be replaced',
            ),
        ),
        (f"{_OF_PINS}::test_nothing_is_replaced_while_one_cannot_be_read",),
    ),
    Mutation(
        "unreadable-pin-gone-back",
        "nothing is gone back from while a pin cannot be read",
        (
            Edit(
                _KEEPING,
                "            if found.unreadable:\n                raise PinError(\n"
                '                    f"{what}',
                "            if False:\n                raise PinError(\n"
                '                    f"{what}',
            ),
        ),
        (f"{_UNREADABLE}[empty]",),
    ),
    Mutation(
        "unreadable-pin-pruned",
        "nothing is pruned while a pin cannot be read",
        (
            Edit(
                _PRUNING,
                "    if unreadable := read_pins(backend, directory).unreadable:\n",
                "    if unreadable := ():\n",
            ),
        ),
        (f"{_UNREADABLE}[empty]",),
    ),
    Mutation(
        "pinned-replaced",
        "a pinned checkpoint is not replaced by another of its step",
        (
            gone(
                _SEALING,
                "            if replaced is not None:\n"
                "                self._keeping.require_replaceable(path)\n",
            ),
        ),
        (f"{_RACES}::test_while_a_seal_wants_its_place",),
    ),
    Mutation(
        "pinned-replaced-late",
        "a seal that would replace a pinned checkpoint is refused in the call",
        (
            gone(
                _ENGINE,
                "        store.keeping.require_replaceable("
                "store.sealing.path_of(state.num_steps))\n",
            ),
        ),
        (_REPLACED, f"{_OF_PINS}::test_an_unusable_one_is_not_replaced_either"),
    ),
    Mutation(
        "pinned-unusable-replaced",
        "a pin keeps what has its directory's name also when that is not usable",
        (
            Edit(
                _PINS,
                "pin.name for pin in self.pins if pin.checkpoint == os.path.basename(path)",
                "pin.name for pin in self.pins if False",
            ),
        ),
        (f"{_OF_PINS}::test_an_unusable_one_is_not_replaced_either",),
    ),
    Mutation(
        "pinned-gone-back",
        "order: going back is refused before the model is changed",
        (gone(_RESUME, "    store.keeping.require_no_newer_pins(found)\n"),),
        (_REPLACED,),
    ),
    Mutation(
        "pinned-gone-back-late",
        "pins are read again before anything newer is withdrawn",
        (gone(_STORE, "            self.keeping.require_no_newer_pins(checkpoint)\n"),),
        (f"{_RACES}::test_while_it_goes_back_nothing_is_withdrawn",),
    ),
    Mutation(
        "pinned-started-over",
        "fresh=True is refused while a checkpoint is pinned",
        (
            Edit(
                _STORE,
                '                self.keeping.require_no_pins("fresh=True")\n',
                "                pass\n",
            ),
        ),
        (_REPLACED,),
    ),
    Mutation(
        "refused-start-keeps-lock",
        "a refusal at construction lets go of the lock",
        (
            Edit(
                _STORE,
                "            except BaseException:\n                self.close()\n",
                "            except BaseException:\n",
            ),
        ),
        (_REPLACED,),
    ),
    Mutation(
        "dangling-pin-in-silence",
        "a pin of a checkpoint that is not there is reported",
        (
            Edit(
                _KEEPING,
                'if f"{self._directory}/{pin.checkpoint}" not in refused',
                "if False",
            ),
        ),
        (f"{_OF_PINS}::test_of_a_checkpoint_that_was_removed_by_hand_is_reported",),
    ),
    Mutation(
        "prune-verify-after",
        "order: what is kept is read before anything is removed",
        (
            Edit(
                _PRUNING,
                """\
            if verify:
                _require_whole(storage, opened, given, progress)
            return _prune(storage, opened, others, newest, owners, dry_run=dry_run, verified=verify)
""",
                """\
            report = _prune(
                storage, opened, others, newest, owners, dry_run=dry_run, verified=verify
            )
            if verify:
                _require_whole(storage, opened, given, progress)
            return report
""",
            ),
        ),
        (_PRUNE_VERIFY,),
    ),
    Mutation(
        "prune-no-store-sync",
        "sync of the store after it was pruned",
        (
            Edit(
                _STORE,
                "            drop_unfinished(self.backend, self.directory)\n"
                "            self.backend.sync_dir(self.directory)\n",
                "            drop_unfinished(self.backend, self.directory)\n",
            ),
        ),
        (_PRUNE_CRASH,),
    ),
    Mutation(
        "prune-not-withdrawn-durably",
        "order: what is pruned has durably lost its name before anything of it is removed",
        (
            Edit(
                _WITHDRAWAL,
                "                self._backend.sync_dir(self._directory)\n"
                "                if slot is not None and",
                "                if slot is not None and",
            ),
        ),
        (_PRUNE_CRASH,),
    ),
    Mutation(
        "prune-pinned",
        "what is pinned is not pruned",
        (
            Edit(
                _RETENTION,
                "policy.kept(ordered) | pinned | newest",
                "policy.kept(ordered) | newest",
            ),
            Edit(
                _WITHDRAWAL,
                "            if self._keeping.is_pinned(checkpoint):  # perhaps a new pin\n",
                "            if False:\n",
            ),
        ),
        (_PRUNE_CRASH,),
    ),
)
