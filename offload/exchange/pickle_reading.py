"""Unpickler for other programs' files that runs no code, in bounded memory and time.

Python's own unpickler can only restrict the names that a pickle may use. Nine bytes make its C
version fill gigabytes (with a large index of the memo), and it sets attributes of any object on its
stack. The unpickler in this module knows the operations that picklers of data write, and refuses
all others. It looks up the names in a pickle in a table of stand-ins, which are functions of this
package. It imports nothing and sets no attribute. It counts the memory of the values, and stops at
a limit.

This module does not import torch.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_PICKLE_BYTES = 128 << 20
"""Largest pickle that is read, in bytes. The structure of a million tensors is about as large."""

_LEAST_BUDGET_BYTES = 16 << 20
_BUDGET_FACTOR = 56
MAX_BUDGET_BYTES = 2 << 30
"""Most memory that the values of a pickle may take. The limit of one pickle is 56 times its length
plus 16 MiB, but at most this. Pickles that torch writes take 20 to 35 times their length as this
module counts memory, and half of that in fact."""

_MAX_INTEGER_BYTES = 32
_MAX_KEY_BITS = 64
"""Most bits of an integer that is a key. Larger integers can be chosen so that their hashes
collide."""

_LIST_BYTES, _DICT_BYTES, _SET_BYTES, _TUPLE_BYTES = 80, 88, 240, 64
_TEXT_BYTES, _NUMBER_BYTES, _MARK_BYTES = 64, 40, 96
_MEMO_BYTES, _PAIR_BYTES, _ITEM_BYTES, _MADE_BYTES = 80, 100, 9, 160
"""Memory in bytes that objects of each type take with their place on the stack, rounded up."""


class PickleError(ValueError):
    """A pickle is damaged, or contains something that is not read. The message says what it is."""


@dataclass(frozen=True, slots=True)
class StandIn:
    """Stand-in for a function or class that a pickle names."""

    name: str
    """Name of the function or class, for messages."""

    call: Callable[..., Any] | None = None
    """Function that is called instead; None if a pickle may name it but not call it."""

    copies: bool = False
    """Whether the result holds a copy of the items of the arguments."""


class Record:
    """An object of a class that is known by name only, with the fields that the pickle gives it.

    Args:
        kind: Name of the class.
        arguments: Arguments of the constructor in the pickle, kept as the field ``arguments``.
    """

    __slots__ = ("fields", "kind")

    def __init__(self, kind: str, *arguments: Any) -> None:
        self.kind = kind
        self.fields: dict[str, Any] = {"arguments": arguments} if arguments else {}

    def set_state(self, state: Any) -> None:
        """Add the fields of a dict; keep a state of any other type as the field ``state``."""
        if isinstance(state, dict) and all(isinstance(key, str) for key in state):
            self.fields.update(state)
        else:
            self.fields["state"] = state


def read_pickle(
    data: bytes,
    names: Mapping[tuple[str, str], Any],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the value of a pickle."""
    if len(data) > MAX_PICKLE_BYTES:
        raise PickleError(f"a pickle of {len(data)} bytes, at most {MAX_PICKLE_BYTES} are read")
    return _Machine(data, names, persistent).run()


class _Stop(Exception):  # noqa: N818  (not an error: the value is complete)
    pass


class _Machine:
    """Stack machine that runs the operations of a pickle.

    The methods are the operations and their parts. They raise `PickleError`, or an error that `run`
    turns into one.
    """

    def __init__(
        self,
        data: bytes,
        names: Mapping[tuple[str, str], Any],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self._data = data
        self._at = 0
        self._names = names
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._left = min(_LEAST_BUDGET_BYTES + _BUDGET_FACTOR * len(data), MAX_BUDGET_BYTES)

    def run(self) -> Any:
        """Run all operations, and return the value of the pickle."""
        data, operations = self._data, _OPERATIONS
        try:
            while True:
                code = data[self._at]
                self._at += 1
                operation = operations.get(code)
                if operation is None:
                    raise PickleError(f"operation {bytes([code])!r} is not supported")
                operation(self)
        except _Stop:
            return self._stack[-1]
        except PickleError as error:
            raise PickleError(f"{error}, at byte {self._at}") from error
        except (IndexError, KeyError, struct.error) as error:
            raise PickleError(f"cut or damaged, at byte {self._at}") from error
        except (TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
            raise PickleError(f"damaged, at byte {self._at}: {error}") from error

    def spend(self, num_bytes: int) -> None:
        """Subtract from the memory left, and refuse the pickle if none is left."""
        self._left -= num_bytes
        if self._left < 0:
            raise PickleError(
                f"its {len(self._data)} bytes would need more memory than any valid file of this "
                "kind"
            )

    def push(self, value: Any, num_bytes: int) -> None:
        """Push a value on the stack, and count its memory."""
        self.spend(num_bytes)
        self._stack.append(value)

    def read(self, num: int) -> bytes:
        """Consume the next bytes of the pickle."""
        start = self._at
        if num > len(self._data) - start:
            raise IndexError
        self._at = start + num
        return self._data[start : start + num]

    def read_unsigned(self, num_bytes: int) -> int:
        """Consume an unsigned integer of this many bytes."""
        return int.from_bytes(self.read(num_bytes), "little")

    def read_line(self) -> str:
        """Consume a line of at most 300 bytes, and return it without its end."""
        end = self._data.index(b"\n", self._at, self._at + 300)
        text = self._data[self._at : end].decode()
        self._at = end + 1
        return text

    def push_text(self, num: int) -> None:
        """Consume bytes, and push them as text."""
        data = self.read(num)
        width = 1 if data.isascii() else 4
        self.push(data.decode("utf-8", "surrogatepass"), _TEXT_BYTES + num * width)

    def push_bytes(self, num: int) -> None:
        """Consume bytes, and push them as `bytes`."""
        self.push(self.read(num), _TEXT_BYTES + num)

    def push_bytearray(self, num: int) -> None:
        """Consume bytes, and push them as `bytearray`."""
        self.push(bytearray(self.read(num)), _TEXT_BYTES + num)

    def push_integer(self, num: int) -> None:
        """Consume a signed integer of this many bytes, and push it."""
        if num > _MAX_INTEGER_BYTES:
            raise PickleError(f"an integer of {num} bytes, at most {_MAX_INTEGER_BYTES} are read")
        self.push(int.from_bytes(self.read(num), "little", signed=True), _NUMBER_BYTES)

    def memoize(self, index: int) -> None:
        """Store the top of the stack in the memo."""
        self.spend(_MEMO_BYTES)
        self._memo[index] = self._stack[-1]

    def mark(self) -> None:
        """Set a mark: begin a new stack above the present one."""
        self.spend(_MARK_BYTES)
        self._marks.append(self._stack)
        self._stack = []

    def pop_mark(self) -> list[Any]:
        """Remove the last mark and the values above it, and return these values."""
        items, self._stack = self._stack, self._marks.pop()
        return items

    def tuple_of(self, num: int) -> None:
        """Replace the topmost values by a tuple of them."""
        stack = self._stack
        if len(stack) < num:
            raise IndexError
        items = tuple(stack[-num:])
        del stack[-num:]
        self.push(items, _TUPLE_BYTES + 8 * num)

    def marked_tuple(self) -> None:
        """Replace the values above the mark by a tuple of them."""
        items = tuple(self.pop_mark())
        self.push(items, _TUPLE_BYTES + 8 * len(items))

    def marked_list(self) -> None:
        """Replace the values above the mark by a list of them."""
        items = self.pop_mark()
        self.push(items, _LIST_BYTES + 8 * len(items))

    def marked_dict(self) -> None:
        """Replace the keys and values above the mark by a dict of them."""
        items = self.pop_mark()
        self.push({}, _DICT_BYTES)
        self.set_items(items)

    def append(self, items: list[Any]) -> None:
        """Append values to the list on top of the stack."""
        target = self._stack[-1]
        if type(target) is not list:
            raise PickleError(f"it appends to a {type(target).__name__}")
        self.spend(_ITEM_BYTES * len(items))
        target.extend(items)

    def add(self, items: list[Any]) -> None:
        """Add values to the set on top of the stack."""
        target = self._stack[-1]
        if type(target) is not set:
            raise PickleError(f"it adds to a {type(target).__name__}")
        self.spend(_PAIR_BYTES * len(items))
        for item in items:
            check_key(item)
            target.add(item)

    def set_items(self, items: list[Any]) -> None:
        """Add alternating keys and values to the dict on top of the stack."""
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise PickleError(f"it sets items of a {type(target).__name__}")
        self.spend(_PAIR_BYTES * (len(items) // 2))
        for at in range(0, len(items), 2):
            check_key(items[at])
            target[items[at]] = items[at + 1]

    def push_global(self, module: object, name: object) -> None:
        """Push the stand-in for a name."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("the name of a global is not text")
        found = self._names.get((module, name))
        if found is None:
            raise PickleError(f"it refers to the global {module:.80}.{name:.80}")
        self.push(found, 8)

    def stack_global(self) -> None:
        """Replace a module and a name on the stack by the stand-in for them."""
        name, module = self._stack.pop(), self._stack.pop()
        self.push_global(module, name)

    def call(self) -> None:
        """Replace a stand-in and a tuple of arguments on the stack by the result of a call."""
        arguments, function = self._stack.pop(), self._stack.pop()
        if not isinstance(function, StandIn) or type(arguments) is not tuple:
            raise PickleError("it calls an object that is not a function")
        if function.call is None:
            raise PickleError(f"it calls {function.name}")
        if function.copies:
            sized = (list, tuple, dict, set, str, bytes)
            self.spend(_PAIR_BYTES * sum(len(a) for a in arguments if isinstance(a, sized)))
        self.push(function.call(*arguments), _MADE_BYTES)

    def build(self) -> None:
        """Remove a state from the stack, and give it to the `Record` below it."""
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Record):
            target.set_state(state)
            self.spend(_MADE_BYTES)
        elif type(target) is not dict:  # attributes of a dict are not its entries, and are dropped
            raise PickleError(f"it sets attributes of a {type(target).__name__}")

    def persistent(self) -> None:
        """Replace a persistent id on the stack by its value."""
        if self._persistent is None:
            raise PickleError("it has a persistent id")
        self.push(self._persistent(self._stack.pop()), _MADE_BYTES)

    def stop(self) -> NoReturn:
        """End the run, if exactly one value is left."""
        if len(self._stack) != 1 or self._marks:
            raise PickleError("it does not end with exactly one value")
        raise _Stop

    def skip_protocol(self) -> None:
        """Consume the version of the protocol, and refuse an unknown one."""
        version = self.read_unsigned(1)
        if version > pickle.HIGHEST_PROTOCOL:
            raise PickleError(f"protocol {version}, at most {pickle.HIGHEST_PROTOCOL} are read")


def check_key(key: Any, depth: int = 0) -> None:
    """Refuse keys whose hashes can be made to collide, and keys that are not plain values."""
    if isinstance(key, tuple) and depth == 0 and len(key) <= 8:
        for part in key:
            check_key(part, 1)
    elif type(key) is int:
        if key.bit_length() > _MAX_KEY_BITS:
            raise PickleError("an integer of more than 64 bits is a key")
    elif not isinstance(key, str | bytes | bool | float | Record | None):
        raise PickleError(f"a {type(key).__name__} is a key")


_Operation = Callable[[_Machine], object]

_OPERATIONS: dict[int, _Operation] = {
    code[0]: operation
    for code, operation in {
        pickle.PROTO: _Machine.skip_protocol,
        pickle.FRAME: lambda m: m.read(8),
        pickle.STOP: _Machine.stop,
        pickle.MARK: _Machine.mark,
        pickle.POP: lambda m: m._stack.pop() if m._stack else m.pop_mark(),
        pickle.POP_MARK: _Machine.pop_mark,
        pickle.NONE: lambda m: m.push(None, 8),
        pickle.NEWTRUE: lambda m: m.push(True, 8),
        pickle.NEWFALSE: lambda m: m.push(False, 8),
        pickle.BININT: lambda m: m.push_integer(4),
        pickle.BININT1: lambda m: m.push(m.read_unsigned(1), 8),
        pickle.BININT2: lambda m: m.push(m.read_unsigned(2), _NUMBER_BYTES),
        pickle.LONG1: lambda m: m.push_integer(m.read_unsigned(1)),
        pickle.BINFLOAT: lambda m: m.push(struct.unpack(">d", m.read(8))[0], _NUMBER_BYTES),
        pickle.BINUNICODE: lambda m: m.push_text(m.read_unsigned(4)),
        pickle.SHORT_BINUNICODE: lambda m: m.push_text(m.read_unsigned(1)),
        pickle.BINUNICODE8: lambda m: m.push_text(m.read_unsigned(8)),
        pickle.BINBYTES: lambda m: m.push_bytes(m.read_unsigned(4)),
        pickle.SHORT_BINBYTES: lambda m: m.push_bytes(m.read_unsigned(1)),
        pickle.BINBYTES8: lambda m: m.push_bytes(m.read_unsigned(8)),
        pickle.BYTEARRAY8: lambda m: m.push_bytearray(m.read_unsigned(8)),
        pickle.EMPTY_TUPLE: lambda m: m.push((), 8),
        pickle.TUPLE1: lambda m: m.tuple_of(1),
        pickle.TUPLE2: lambda m: m.tuple_of(2),
        pickle.TUPLE3: lambda m: m.tuple_of(3),
        pickle.TUPLE: _Machine.marked_tuple,
        pickle.EMPTY_LIST: lambda m: m.push([], _LIST_BYTES),
        pickle.LIST: _Machine.marked_list,
        pickle.APPEND: lambda m: m.append([m._stack.pop()]),
        pickle.APPENDS: lambda m: m.append(m.pop_mark()),
        pickle.EMPTY_DICT: lambda m: m.push({}, _DICT_BYTES),
        pickle.DICT: _Machine.marked_dict,
        pickle.SETITEM: lambda m: m.set_items([m._stack.pop(-2), m._stack.pop()]),
        pickle.SETITEMS: lambda m: m.set_items(m.pop_mark()),
        pickle.EMPTY_SET: lambda m: m.push(set(), _SET_BYTES),
        pickle.ADDITEMS: lambda m: m.add(m.pop_mark()),
        pickle.GLOBAL: lambda m: m.push_global(m.read_line(), m.read_line()),
        pickle.STACK_GLOBAL: _Machine.stack_global,
        pickle.REDUCE: _Machine.call,
        pickle.NEWOBJ: _Machine.call,
        pickle.BUILD: _Machine.build,
        pickle.BINPERSID: _Machine.persistent,
        pickle.BINGET: lambda m: m.push(m._memo[m.read_unsigned(1)], 8),
        pickle.LONG_BINGET: lambda m: m.push(m._memo[m.read_unsigned(4)], 8),
        pickle.BINPUT: lambda m: m.memoize(m.read_unsigned(1)),
        pickle.LONG_BINPUT: lambda m: m.memoize(m.read_unsigned(4)),
        pickle.MEMOIZE: lambda m: m.memoize(len(m._memo)),
    }.items()
}
"""Function for each operation of a pickle, by the operation's byte."""
