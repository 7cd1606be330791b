"""Settings that are declared once, as fields of a dataclass, and everything that is made from them.

A field states a setting's name and type, and `setting` its default, help, bounds and the rest:

    @dataclass(frozen=True)
    class Samples:
        samples: int = setting(10, "number of texts to run", "N", low=1)

`settings_of(Samples)` lists them. Options of a command line (`add_options`), keys of TOML and YAML
(`Setting.read`), environment variables (`read_environment`), `--help` and the documentation come
from that list.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from qgate.errors import QgateError, unknown
from qgate.loading import LateModule

if TYPE_CHECKING:
    from qgate import documents
else:
    documents = LateModule("qgate.documents")

T = typing.TypeVar("T")
Form = Literal["typed", "loose", "strict"]
"""How a value is written: as the words of a command line or of a variable; as YAML of other tools
has it, where 1e3 and yes are texts; as TOML and Python have it."""
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_NULL = ("null", "none", "~")
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_COUNTS = {2: "two", 3: "three"}
_LONGEST = 80


@dataclass(frozen=True, eq=False)
class Setting:
    """One setting. `settings_of` adds what the field says: name, kind, default and choices.

    help      what it does; the default is added to it
    metavar   what stands for its value in help
    about     groups settings, as their declaration explains it
    low, above, high   bounds of a number
    choices   the values allowed, where they are no Literal
    check     returns the value as it is kept; a ValueError says why it is none, and `allowed_as`
              what it has to be
    is_path   a text that is a path or URL
    is_repeatable   the option of a list is given several times, instead of once with commas
    empty     an empty list is the same as null
    variable  the environment variable that sets it
    option    the name of its option, where it is another one, or several; None without an option
    """

    help: str
    metavar: str | None = None
    about: str = "run"
    low: float | None = None
    above: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    check: Callable[[Any], Any] | None = None
    allowed_as: str = ""
    is_path: bool = False
    is_repeatable: bool = False
    empty: bool = False
    variable: str = ""
    option: str | None = ""
    # From the field: kind is the type, of the items where it is a list; `words` go beside numbers.
    name: str = ""
    kind: type = str
    default: Any = None
    is_list: bool = False
    length: int = 0
    nullable: bool = False
    words: tuple[str, ...] = ()

    def allowed(self, form: Form = "loose") -> str:
        """Describe the values that it may hold; TOML has no null."""
        item = self.allowed_as or ("a path" if self.is_path else _KINDS.get(self.kind, "a value"))
        if self.choices:
            item = "one of " + ", ".join(map(str, self.choices))
        bounds = {"from": self.low, "above": self.above, "to": self.high}
        text = " ".join([item, *(f"{word} {n:g}" for word, n in bounds.items() if n is not None)])
        if self.is_list:
            count = _COUNTS.get(self.length, "one or more")
            if text not in (*_KINDS.values(), "a path"):
                text = f"a list of {count}, each {text}"
            elif self.length:
                text = f"a list of {count} {text[2:]}s"
            else:
                text = f"{text} or a list of {text[2:]}s"
        has_null = self.nullable and form != "strict"
        return ", or ".join([text, *self.words, *["null"] * has_null])

    @property
    def help_text(self) -> str:
        """Return its help with its default."""
        if self.kind is bool or "(default" in self.help:
            return self.help
        text = self.default_text
        return f"{self.help} (default {text})" if text else self.help

    @property
    def default_text(self) -> str:
        """Return its default as it is typed; empty where it is null."""
        values = self.default if isinstance(self.default, tuple) else (self.default,)
        texts = (f"{x:g}" if isinstance(x, float) else str(x) for x in values if x is not None)
        return str(self.default).lower() if self.kind is bool else ",".join(texts)

    @property
    def argparse(self) -> dict[str, object]:
        """Return arguments of `add_argument`. What nobody types is None: a file may say it."""
        text = self.help_text
        if self.variable:
            default = f", or else {self.default_text}" if self.default_text else ""
            text = f"{self.help} (default: {self.variable}{default})"
        arguments: dict[str, object] = {"help": text, "default": None}
        if self.kind is bool:
            return {**arguments, "action": "store_true"}
        if self.choices and not self.is_list:
            return {**arguments, "choices": self.choices, "metavar": self.metavar}
        arguments["metavar"] = self.metavar
        if self.length:
            return {**arguments, "nargs": self.length, "metavar": tuple(str(self.metavar).split())}
        if self.is_repeatable:
            return {**arguments, "action": "append"}
        is_checked = self.kind in (int, float) or self.is_list or self.check is not None
        return {**arguments, "type": self.typed} if is_checked else arguments

    def read_word(self, text: str, start: str = "") -> Any:
        """Return the value of an option or a variable, where null is what nobody typed."""
        return dataclasses.replace(self, nullable=False).read(text, "typed", start)

    def typed(self, text: str) -> Any:
        """Return the value of an option, as `type` of argparse."""
        try:
            return self.read_word(text)
        except QgateError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def read(self, raw: Any, form: Form = "strict", start: str | None = None) -> Any:
        """Return a value as it is kept; an error repeats it and says what is allowed.

        Messages begin with `start`, by default the name of the setting and an equals sign.
        """
        start = f"{self.name} = " if start is None else start
        try:
            return self._value(raw, form)
        except ValueError as error:
            why = f" ({error})" if str(error) else ""
            text = "null" if raw is None else repr(raw)
            text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}…"
            raise QgateError(
                f"{start}{text} is not allowed{why}; it is {self.allowed(form)}."
            ) from None
        except QgateError as error:
            name = start.rstrip("= ")
            raise QgateError(f"{name}: {error}" if name else str(error)) from None

    def _value(self, raw: Any, form: Form) -> Any:
        is_text = isinstance(raw, str)
        if is_text and self.nullable and form != "strict" and raw.strip().lower() in _NULL:
            raw = None
        if (raw is None and self.nullable) or (is_text and raw in self.words):
            return raw
        if not self.is_list:
            return self._item(raw, form)
        items = documents.split_list(raw) if is_text and form == "typed" else raw
        items = [items] if isinstance(items, str) else items
        if not isinstance(items, list | tuple):
            raise ValueError
        if not items and self.empty:
            return None
        if not items or len(items) != (self.length or len(items)):
            raise ValueError
        return tuple(self._item(item, form) for item in items)

    def _item(self, raw: Any, form: Form) -> Any:
        value = _READERS[self.kind](raw, form)
        if self.choices and value not in self.choices:
            if self.is_list and isinstance(value, str):
                raise unknown("value", value, self.choices)
            raise ValueError
        fits = (self.low is None or value >= self.low) and (
            self.above is None or value > self.above
        )
        if not (fits and (self.high is None or value <= self.high)):
            raise ValueError
        return value if self.check is None else self.check(value)


# Values ------------------------------------------------------------------------------------------


def _text(raw: Any, form: Form) -> str:
    if not isinstance(raw, str):
        is_yaml = form == "loose" and raw is not None
        raise ValueError(f"it is {type(raw).__name__}; quote a text" if is_yaml else "")
    if not raw.strip():
        raise ValueError("it is empty")
    return raw.strip() if form == "typed" else raw


def _switch(raw: Any, form: Form) -> bool:
    if form == "strict" and type(raw) is bool:
        return raw
    word = str(raw).strip().lower()
    if form == "strict" or not isinstance(raw, bool | int | str) or word not in (*_TRUE, *_FALSE):
        raise ValueError
    return word in _TRUE


def _whole(raw: Any, form: Form) -> int:
    if form == "typed" and isinstance(raw, str) and re.fullmatch(r"\s*[+-]?\d{1,18}\s*", raw):
        return int(raw)
    if type(raw) is not int:  # true is no number
        raise ValueError
    return raw


def _number(raw: Any, form: Form) -> float:
    kinds = int | float if form == "strict" else int | float | str  # YAML 1.1 reads 1e3 as a text
    if isinstance(raw, bool) or not isinstance(raw, kinds):
        raise ValueError
    try:
        value = float(raw)
    except (ValueError, OverflowError):
        raise ValueError from None
    if not math.isfinite(value):
        raise ValueError
    return value


_READERS: dict[type, Callable[[Any, Form], Any]] = {
    str: _text,
    bool: _switch,
    int: _whole,
    float: _number,
    object: lambda raw, _form: raw,
}


def pattern(text: str) -> str:
    """Check that a text is a regular expression."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    return text


# Declarations ------------------------------------------------------------------------------------


def setting(default: T, help: str, metavar: str | None = None, **about: Any) -> T:
    """Declare a field of a dataclass as a setting; `about` are fields of `Setting`."""
    metadata = {"setting": Setting(help, metavar, **about)}
    return dataclasses.field(default=default, metadata=metadata)


def shared(declaration: type, name: str, **about: Any) -> Any:
    """Declare a setting that another dataclass has, too; `about` is what is different."""
    field = declaration.__dataclass_fields__[name]  # type: ignore[attr-defined]
    same = dataclasses.replace(field.metadata["setting"], **about)
    return dataclasses.field(default=field.default, metadata={"setting": same})


@functools.cache
def settings_of(declaration: Any, prefix: str = "") -> Mapping[str, Setting]:
    """List the settings of a dataclass by name; those of a section in it by dotted names.

    Fields without a `Setting` are none.
    """
    settings: dict[str, Setting] = {}
    hints = typing.get_type_hints(declaration)
    for field in dataclasses.fields(declaration):
        about, name, hint = (
            field.metadata.get("setting"),
            f"{prefix}{field.name}",
            hints[field.name],
        )
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            settings |= settings_of(hint, f"{name}.")
        elif about is not None:
            of_type = {} if about.kind is object else _of_type(hint)
            of_type |= {"choices": about.choices} if about.choices else {}
            settings[name] = dataclasses.replace(about, name=name, default=field.default, **of_type)
    return types.MappingProxyType(settings)


def sections_of(declaration: type, prefix: str = "") -> Mapping[str, str]:
    """Return the docstrings of the sections in a dataclass, without dot, by dotted names."""
    sections: dict[str, str] = {}
    for name, hint in typing.get_type_hints(declaration).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            sections[f"{prefix}{name}"] = (hint.__doc__ or "").partition("\n")[0].rstrip(".")
            sections |= sections_of(hint, f"{prefix}{name}.")
    return sections


def struct_of(declaration: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Make a dataclass with these values by dotted names, and defaults for the others."""
    hints = typing.get_type_hints(declaration)
    own = {}
    for name, hint in hints.items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            own[name] = struct_of(hint, values, f"{prefix}{name}.")
        elif f"{prefix}{name}" in values:
            own[name] = values[f"{prefix}{name}"]
    return declaration(**own)


def values_of(struct: Any) -> Mapping[str, Any]:
    """Return the value of every setting of a dataclass by its dotted name."""
    declaration: Any = type(struct)
    reach = functools.partial(functools.reduce, getattr)
    return {name: reach(name.split("."), struct) for name in settings_of(declaration)}


def _of_type(hint: Any) -> dict[str, object]:
    """Return what the type of a field says of its setting."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for kind in inside if kind is not types.NoneType]
        literals = [kind for kind in kinds if typing.get_origin(kind) is Literal]
        others = [kind for kind in kinds if kind not in literals]
        (kind,) = others or literals
        words = tuple(text for literal in literals for text in typing.get_args(literal))
        of_type = _of_type(kind) | {"nullable": len(kinds) < len(inside)}
        return of_type | ({"words": words} if others else {})
    if origin is Literal:
        return {"choices": inside, "kind": type(inside[0])}
    if origin in (tuple, Sequence):
        length = 0 if origin is Sequence or inside[-1] is Ellipsis else len(inside)
        return {**_of_type(inside[0]), "is_list": True, "length": length}
    if hint not in _READERS:
        names = ", ".join(kind.__name__ for kind in _READERS)
        raise TypeError(f"a setting of type {hint}: write one of {names}, a tuple or a Literal.")
    return {"kind": hint}


# Sources ----------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser, declaration: type) -> None:
    """Add an option for each setting that has one; `typed_values` returns what was typed."""
    add: Callable[..., object] = parser.add_argument
    for name, of in settings_of(declaration).items():
        if of.option is not None:
            names = (of.option or name.replace("_", "-")).split()
            add(*(f"--{each}" for each in names), dest=name, **of.argparse)


def typed_values(args: argparse.Namespace, declaration: type) -> Mapping[str, Any]:
    """Return what a command line says of the settings, without what nobody typed."""
    values = {name: getattr(args, name, None) for name in settings_of(declaration)}
    return {name: value for name, value in values.items() if value is not None}


def variables_of(declaration: type) -> dict[str, Setting]:
    """Return the settings that an environment variable sets, by its name."""
    return {each.variable: each for each in settings_of(declaration).values() if each.variable}


def read_environment(declaration: type, environment: Mapping[str, str]) -> Mapping[str, Any]:
    """Return what variables say of the settings; an empty one says nothing."""
    return {
        setting.name: setting.read_word(environment[variable], f"{variable}=")
        for variable, setting in variables_of(declaration).items()
        if environment.get(variable, "").strip()
    }


def check_values(values: Any, start: str = "{}=") -> None:
    """Refuse values of a dataclass that its declaration does not allow; keep lists as tuples.

    Messages begin with `start`, which has the name of the setting in place of braces.
    """
    declaration: Any = type(values)
    for name, of in settings_of(declaration).items():
        value = getattr(values, name)
        if value != of.default:
            checked = of.read(value, start=start.format(name))
            if of.is_list:
                object.__setattr__(values, name, checked)


# Documentation ----------------------------------------------------------------------------------


def help_table(declaration: type) -> str:
    """Return the table of settings that a docstring has: names, and what they do."""
    settings = settings_of(declaration)
    width = max(map(len, settings)) + 2
    wrapped = textwrap.TextWrapper(100, subsequent_indent=" " * width)
    return "\n".join(
        wrapped.fill(name.ljust(width) + of.help_text) for name, of in settings.items()
    )
