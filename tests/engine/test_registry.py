"""Texts of rules and policies whose fields have types that ours do not have: those of plug-ins."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import pytest

from stepsaver.engine import registry
from stepsaver.engine.errors import UsageError


@dataclass(frozen=True)
class Odd:
    name: ClassVar[str] = "odd"
    span: Literal["auto"] | int = "auto"
    side: Literal["left"] | Literal["right"] | None = None
    made: str = field(default_factory=lambda: "here")


def parse(text: str, monkeypatch: pytest.MonkeyPatch) -> Odd:
    monkeypatch.setattr(registry, "_find", lambda *_: Odd)
    return registry.parse(text, "stepsaver.engine.rules", "rule")


def test_a_word_may_come_before_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("odd:span=12", monkeypatch) == Odd(span=12)
    assert parse("odd:span=auto,side=left", monkeypatch) == Odd(side="left")
    assert parse("odd:side=none", monkeypatch) == Odd()


@pytest.mark.parametrize(
    ("text", "message"),
    [("odd:span=x", "span 'x' is not a whole number"), ("odd:side=up", "unknown rule odd: side 'up'; nearest: left")],
)
def test_what_fits_none_of_them_is_one_line(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=message):
        parse(text, monkeypatch)


def test_a_registry_has_its_own_classes_and_none_that_its_modules_import() -> None:
    assert registry.found_in("stepsaver.engine.decoders").keys() == {"autoregressive", "block", "speculative"}
