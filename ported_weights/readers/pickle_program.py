"""Interpreter for the few pickle operations that weight files consist of.

A pickle is a program. Python's own unpickler would run whatever the pickle names. This interpreter
knows dictionaries, lists, tuples, numbers and texts. It calls nothing but `functions`, which its
caller vouches for. An empty dictionary stands for each object that `notes` lists, and anything else
is refused by name.
"""

import io
import itertools
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ported_weights.readers.notes import NOTES
from varjax.core.errors import UserError

# Far more than weights need: a tensor takes about 30 operations.
MAX_OPERATIONS = 2**20
LONGEST_NAME = 1024  # characters of a key
_MARK = object()
_SCALARS = (str, bytes, int, float, bool, type(None))
_PUSH = frozenset(
    "NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT"
    " UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8"
    " STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split()
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_INSTANCES = {"INST": 0, "OBJ": 0, "NEWOBJ": 2, "NEWOBJ_EX": 3}  # what a note's takes off the stack
_WAY_OUT = (
    "nothing of it was run; if you wrote this file, save its weights alone with PyTorch,"
    " torch.save(torch.load(file, weights_only=False)['model'], new_file) with their key in place"
    " of 'model'; else ask its author for .safetensors"
)


@dataclass(frozen=True)
class Symbol:
    """A name that the pickle refers to, `module.attribute`. It is never looked up in Python."""

    name: str


def is_note(item: object) -> bool:
    """Whether it is the name of a class of notes, or of a function that makes them."""
    return isinstance(item, Symbol) and NOTES.fullmatch(item.name) is not None


def name_of(item: object) -> str:
    """Return what a refusal calls an object: the symbol's name, or its type."""
    return item.name if isinstance(item, Symbol) else type(item).__name__


class Dictionary(dict):
    """A dictionary (or OrderedDict) of the pickle."""


class Note(Dictionary):
    """A stand-in for an object beside weights. It takes entries, since some are dictionaries."""


_EMPTY = {"EMPTY_DICT": Dictionary, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "EMPTY_SET": Note}


class PickleProgram:
    """Runs a pickle.

    Args:
      functions: {"module.attribute": function of the unpickled arguments}; the functions must
        check their arguments and raise `UserError`.
      constants: further names that may be mentioned but not called, as a predicate.
      storage: function of a persistent id.
      what: the file, for messages.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable],
        constants: Callable[[str], bool],
        storage: Callable,
        what: str,
    ):
        self.functions, self.constants, self.storage = functions, constants, storage
        self.what = what
        self.stack: list = []
        self.memo: dict = {}
        self.length = 0  # bytes of the pickle that was run

    def run(self, data: bytes):
        """Return the object that the pickle describes. `UserError` if it is damaged, names
        something that is not allowed, or has operations that weights never need, or too many."""
        try:
            operations = pickletools.genops(io.BytesIO(data))
            for operation, argument, place in itertools.islice(operations, MAX_OPERATIONS):
                if operation.name == "STOP":
                    self.length = place + 1
                    return self.stack.pop()
                self._step(operation.name, argument)
            if next(operations, None):
                raise self._refused(f"it has more than {MAX_OPERATIONS} pickle operations")
        except UserError:
            raise
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            raise UserError(
                f"{self.what}: the pickle inside is damaged ({error!s:.200})"
            ) from error
        raise UserError(f"{self.what}: the pickle inside is damaged (it does not end)")

    def _step(self, name: str, argument: object) -> None:
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":  # version and size of what follows
                pass
            case _ if name in _PUSH:
                stack.append(_CONSTANTS.get(name, argument))
            case _ if name in _EMPTY:
                stack.append(_EMPTY[name]())
            case "PUT" | "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                self.memo[len(self.memo) if name == "MEMOIZE" else argument] = stack[-1]
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "MARK":
                stack.append(_MARK)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = stack[-int(name[-1]) :]
                if len(items) < int(name[-1]) or _MARK in items:
                    raise ValueError("a tuple lacks items")
                stack[-len(items) :] = [tuple(items)]
            case "TUPLE" | "LIST":
                items = self._pop_mark()
                stack.append(tuple(items) if name == "TUPLE" else items)
            case "FROZENSET":
                self._pop_mark()
                stack.append(Note())
            case "DICT":
                items = self._pop_mark()
                stack.append(Dictionary())
                self._set(items)
            case "APPEND" | "APPENDS" | "ADDITEMS":  # the last: to a set
                items = [stack.pop()] if name == "APPEND" else self._pop_mark()
                if not isinstance(stack[-1], Note):  # those of a note, such as a set, are dropped
                    if type(stack[-1]) is not list:
                        raise TypeError("items are appended to something that is not a list")
                    stack[-1].extend(items)
            case "SETITEM" | "SETITEMS":
                self._set(
                    [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else self._pop_mark()
                )
            case "GLOBAL":
                stack.append(self._symbol(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                if not (isinstance(module, str) and isinstance(attribute, str)):
                    raise TypeError("a name is not a text")
                stack.append(self._symbol(module, attribute))
            case "BINPERSID":
                stack.append(self.storage(stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                known = self.functions.get(function.name) if isinstance(function, Symbol) else None
                if known is None and not is_note(function):
                    said = f"it calls {name_of(function)}, which is not a function here"
                    raise self._refused(said)
                if not isinstance(arguments, tuple):
                    raise TypeError(f"arguments of {function.name} are not a tuple")
                stack.append(known(*arguments) if known else Note())
            case "INST" | "OBJ" | "NEWOBJ" | "NEWOBJ_EX":
                self._make_note(name, argument)
            case "BUILD":
                # torch keeps notes on a state dict, training scripts keep arguments: neither means
                # anything here
                stack.pop()
                if not isinstance(stack[-1], Dictionary):
                    raise self._refused("it sets attributes of something")
            case _:
                raise self._refused(f"pickle operation {name} is not for weights")

    def _refused(self, reason: str) -> UserError:
        return UserError(f"{self.what}: refused, {reason}; {_WAY_OUT}")

    def _make_note(self, name: str, argument: object) -> None:
        """Put a note in place of a class and its arguments. Other classes are refused by name."""
        taken = _INSTANCES[name]
        if taken and is_note(self.stack[-taken]):
            self.stack[-taken:] = [Note()]
            return
        symbols = [s.name for s in self.stack if isinstance(s, Symbol)][-1:]
        target = argument.replace(" ", ".") if isinstance(argument, str) else "".join(symbols)
        raise self._refused(
            f"it would create an object of {target or 'an unnamed class':.80} ({name});"
            " a weights file holds tensors, numbers and texts only"
        )

    def _symbol(self, module: str, attribute: str) -> Symbol:
        symbol = Symbol(f"{module}.{attribute}")
        name = symbol.name
        if name not in self.functions and not is_note(symbol) and not self.constants(name):
            raise self._refused(
                f"it refers to {name:.80}, which is neither part of weights nor a note that is"
                " passed over"
            )
        return symbol

    def _pop_mark(self) -> list:
        """Take everything above the last mark off the stack, and the mark."""
        items: list = []
        while (item := self.stack.pop()) is not _MARK:  # without a mark: IndexError, "damaged"
            items.append(item)
        return items[::-1]

    def _set(self, items: list) -> None:
        """Set keys and values, given in turn. Keys are plain: hashing them runs no other code.
        No weights are under other keys, such as tuples."""
        target = self.stack[-1]
        if not isinstance(target, Dictionary) or len(items) % 2:
            raise TypeError("keys are set on something that is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            key = key.name if isinstance(key, Symbol) else key
            if not isinstance(key, _SCALARS):
                continue
            if isinstance(key, str) and len(key) > LONGEST_NAME:
                raise self._refused(f"a key is {len(key)} characters long: {key:.40}...")
            if isinstance(key, str):
                key.encode()  # half of a surrogate pair, which pickles may hold, cannot be shown
            target[key] = value
