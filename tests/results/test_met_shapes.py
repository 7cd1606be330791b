"""The shapes that modules met: how they are put together, and said."""

from __future__ import annotations

from qgate.results.coverage import (
    ModuleShapes,
    mode_shapes_texts,
    shape_groups,
    shapes_text,
    unmet_text,
)


def shapes(*listed: tuple[int, ...], channels: int = -1, strided: bool = False) -> ModuleShapes:
    of_module = ModuleShapes(channels)
    for shape in listed:
        of_module.add(shape, is_strided=strided)
    return of_module


def test_shapes_are_samples_and_tokens_wherever_the_channels_lie() -> None:
    assert shapes((3, 77, 64), (17, 64), (64,)).met == {
        (3, 77, False),
        (0, 17, False),
        (0, 1, False),
    }
    assert shapes((2, 16, 5, 5), channels=-3).met == {(2, 25, False)}
    assert shapes((2, 8), channels=-3).met == {(0, 2, False)}  # a vector at a shared activation


def test_modules_that_met_the_same_are_one_row_and_those_that_met_least_come_first() -> None:
    many = shapes((1, 1029, 8), (64, 1, 8), (129, 8))
    many.add((3, 7, 8), is_strided=True)
    of_modules = {"a": many, "b": many, "c": shapes((2, 48, 8))}
    groups = shape_groups({name: of.statement() for name, of in of_modules.items()})
    assert [group["modules"] for group in groups] == [["c"], ["a", "b"]]
    assert groups[0]["never"] == [
        "other numbers of tokens", "other numbers of samples", "inputs without a batch axis",
        "strided memory",
    ]  # fmt: skip
    assert groups[1]["never"] == []
    assert shapes_text(groups[1]) == (
        "1 to 1,029 tokens (4 numbers), batches of 1 to 64, without a batch axis, strided memory"
    )


def test_a_statement_read_from_json_is_the_same() -> None:
    statement = shapes((1, 4, 8), (2, 8)).statement()
    as_json = [[*part] if isinstance(part, tuple) else part for part in statement]
    assert shape_groups({"a": as_json}) == shape_groups({"a": statement})


def test_modules_of_one_shape_alone_are_named() -> None:
    one, several = shapes((2, 48, 8)), shapes((2, 48, 8), (1, 7, 8))
    coverage = [
        {"mode": mode, "shapes": shape_groups({"a": one.statement(), "b": several.statement()})}
        for mode in ("int8", "mxfp4")
    ]
    assert unmet_text(coverage) == "one shape alone was met by 1 module: a"
    assert mode_shapes_texts(coverage)[0].startswith(
        "shapes met in int8, mxfp4: 1 module 48 tokens"
    )
    assert unmet_text([{"mode": "int8", "shapes": shape_groups({"b": several.statement()})}]) == ""
    assert unmet_text([{"mode": "int8"}]) == ""
