"""One call of an operator: what it got, what it gave, and which operators made what it got."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Arguments = Callable[[Sequence[Any]], Sequence[Any]]
Result = Callable[[Sequence[Any], Any], Any]
LARGEST = 2**22
"""Elements of tensors up to which it is known what made them, which keeps them in memory."""
COPIES = frozenset({"clone", "_to_copy", "lift_fresh", "detach", "alias"})
_NAMES = {
    "_softmax": "softmax", "mm": "a matrix product", "bmm": "a matrix product",
    "addmm": "a matrix product", "mul": "a multiplication", "add": "an addition",
    "sub": "a subtraction", "div": "a division", "pow": "a power", "sum": "a sum",
    "mean": "a mean", "rsqrt": "a root", "sqrt": "a root",
}  # fmt: skip


def words_of(operator: str) -> str:
    """Name what an operator gave."""
    return f"the result of {_NAMES.get(operator, operator)}"


@dataclass(frozen=True)
class CallFault:
    """Other arguments or another result of an operator than the right ones.

    arguments  makes other arguments of its own
    result     makes another result of its arguments and its own result
    """

    words: str
    arguments: Arguments | None = None
    result: Result | None = None


@dataclass(frozen=True)
class Maker:
    """The operator that made a tensor, and what it got; an argument has words alone."""

    name: str
    args: Sequence[Any]
    result: Any
    words: str


class Makers:
    """The operators that made tensors, found by the memory of these."""

    def __init__(self, arguments: Sequence[Any]) -> None:
        self._made: dict[int, Maker] = {}
        for position, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                maker = Maker("argument", (), argument, f"argument {position}")
                self._made.setdefault(_address(argument), maker)

    def note(self, function: Any, name: str, args: Sequence[Any], result: Any) -> None:
        """Keep what made a result; views are made by what made the whole."""
        if function.is_view:
            return
        own = function._schema.is_mutable  # whose first argument is no longer what it was
        before = set() if own else {_address(x) for x in args if isinstance(x, Tensor)}
        for value in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(value, Tensor) or not 0 < value.numel() <= LARGEST:
                continue
            address = _address(value)
            if address in before:
                continue
            copied = self.of(args[0]) if name in COPIES and args else None
            if copied is not None:
                self._made[address] = Maker(copied.name, copied.args, value, copied.words)
                continue
            made_of = () if own else tuple(args)
            self._made[address] = Maker(name, made_of, value, words_of(name))

    def of(self, value: Any) -> Maker | None:
        """Return what made a tensor, if it is known."""
        if not isinstance(value, Tensor):
            return None
        return self._made.get(_address(value))

    def words(self, value: Any) -> str:
        """Name an operand: an argument, a number, or what an operator gave."""
        if isinstance(value, int | float):
            return f"{value:g}"
        maker = self.of(value)
        if maker is None:
            return "a constant"
        return maker.words


def _address(value: Tensor) -> int:
    try:
        return value.untyped_storage().data_ptr()
    except RuntimeError:  # of a tensor that a device of Python code holds
        return id(value)


@dataclass(frozen=True)
class Call:
    """An operator with its arguments and its result."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any
    makers: Makers

    @property
    def is_float(self) -> bool:
        """Tell if the result is a tensor of floating-point values."""
        return isinstance(self.result, Tensor) and self.result.is_floating_point()

    def made(self, position: int) -> Maker | None:
        """Return what made an argument, if that is the whole of what was made."""
        if len(self.args) <= position:
            return None
        value = self.args[position]
        maker = self.makers.of(value)
        if maker is None or not isinstance(maker.result, Tensor):
            return None
        return maker if maker.result.shape == value.shape else None
