"""What may be tried: declared by the fields of rules and policies, and ordered by what costs less."""

import dataclasses
from typing import ClassVar

import pytest

from stepsaver.bench.experiment import ConfigSpec
from stepsaver.engine import registry
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.errors import UsageError
from stepsaver.engine.policies.policy import parse_policy
from stepsaver.engine.registry import tuned, tuned_fields
from stepsaver.tune.observed import Goal, Observed
from stepsaver.tune.space import DECODERS, MOST_COMBINATIONS, POLICIES, RULES, DeclaredSpace
from stepsaver.tune.tuning import config_of
from tests.conftest import tiny_config

DECLARED = [(package, made) for package in (RULES, POLICIES, DECODERS) for made in registry.found_in(package).values()]
GOAL = Goal(0.03, 0.95, 5000)


@pytest.fixture
def space() -> DeclaredSpace:
    config = tiny_config(block_size=32, layers=4)
    return DeclaredSpace(resolve_decoding(config, sub_block_size=8, join="off"), config.layers, is_scored=False)


@pytest.mark.parametrize(("package", "made"), DECLARED, ids=lambda each: getattr(each, "name", ""))
def test_every_value_that_is_tried_alone_is_allowed(package: str, made: type) -> None:
    first = {name: each.values[0] for name, each in tuned_fields(made).items()}
    for name, each in tuned_fields(made).items():
        assert len(set(each.values)) == len(each.values) > 0
        for value in each.values:
            text = registry.describe(made(**(first | {name: value, **({"mode": "delta"} if name == "kv" else {})})))
            assert registry.describe(registry.parse(text, package, "setting")) == text


def test_single_changes_begin_with_the_cheapest_of_every_kind(space: DeclaredSpace) -> None:
    names = space.singles()
    assert len(names) == len(set(names))
    kinds = [space.kind(name) for name in names]
    first = len(set(kinds))
    assert len(set(kinds[:first])) == first
    assert {"threshold-0.5", "partial_commit-settle0", "suffix_dropout", "window", "trim-settle0", "factor-2.0"} <= {
        *names[:first]
    }
    assert [name for name in names if name.startswith("suffix_dropout")] == [
        "suffix_dropout",
        "suffix_dropout-ahead4",
        "suffix_dropout-ahead8",
    ]
    assert {"sub-4", "sub-16", "sub-32", "join-on"} <= {*names}
    assert "sub-8" not in names
    policies = [space.known[name].policy for name in names]
    assert registry.describe(parse_policy("threshold")) not in [registry.describe(each) for each in policies if each]


def test_candidates_become_configs_that_say_all_that_is_changed(space: DeclaredSpace) -> None:
    for name in space.singles():
        config = config_of(space.known[name])
        assert ConfigSpec.model_validate(config.model_dump()) == config
        assert config.decode or config.rules or config.policy or config.sub_block_size or config.join


def known(ups: dict[str, float]) -> dict[str, Observed]:
    return {name: Observed(640, 4.0, 4.0, (up,)) for name, up in ups.items()}


def test_combinations_grow_plain_decoding_and_the_best_of_every_policy(space: DeclaredSpace) -> None:
    space.singles()
    ups = {"suffix_dropout": 1.3, "suffix_dropout-ahead4": 1.2, "trim": 1.1, "sub-16": 0.9}
    ups |= {"threshold-0.5": 1.5, "threshold-0.6": 1.4, "factor-2.0": 1.05}
    ups |= {"join-on": 1.02, "speculative-positions16": 1.9}
    names = space.combinations(known(ups), GOAL)
    assert names == [
        "join-on+suffix_dropout+trim",
        "speculative-positions16+join-on",
        "join-on+threshold-0.5+suffix_dropout+trim",
        "join-on+factor-2.0+suffix_dropout+trim",
        "suffix_dropout+trim",
        "threshold-0.5+suffix_dropout+trim",
        "factor-2.0+suffix_dropout+trim",
        "threshold-0.5+suffix_dropout",
        "factor-2.0+suffix_dropout",
    ]
    assert [rule.name for rule in space.known["suffix_dropout+trim"].rules] == ["trim", "suffix_dropout"]


def test_what_costs_more_than_it_gains_or_slows_down_is_in_no_combination(space: DeclaredSpace) -> None:
    space.singles()
    seen = known({"suffix_dropout": 1.3, "trim": 1.3, "sub-16": 0.9})
    assert space.combinations(seen, GOAL) == ["suffix_dropout+trim"]
    assert space.combinations(seen | {"trim": Observed(640, 40.0, 0.0, (1.3,))}, GOAL) == []


def test_combinations_are_few_and_possible(space: DeclaredSpace) -> None:
    names = space.combinations(known(dict.fromkeys(space.singles(), 1.2)), GOAL)
    assert len(names) == MOST_COMBINATIONS
    for name in names:
        kinds = [each.kind for each in space.known[name].settings]
        assert 1 < len(kinds) == len(set(kinds))
        assert space.is_possible(space.known[name])


def test_a_task_that_is_scored_has_no_drafts_in_committed_blocks(space: DeclaredSpace) -> None:
    scored = DeclaredSpace(space.decoding, space.layers, is_scored=True)
    drafts = [name for name in space.singles() if name.startswith("speculative")]
    found = [name for name in scored.singles() if name.startswith("speculative")]
    assert found == [name for name in drafts if "contextblock" not in name]
    assert 0 < len(found) < len(drafts)


@dataclasses.dataclass(frozen=True)
class Needs:
    """No rule, and a field that nobody gives a value."""

    wanted: int
    tried: int = dataclasses.field(default=1, metadata=tuned(2, 1))
    name: ClassVar[str] = "needs"


def test_plug_ins_that_are_broken_or_lack_a_value_end_no_tuning(
    space: DeclaredSpace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(package_name: str) -> dict[str, type]:
        raise UsageError("broken: cannot be imported")

    expected, ours = space.singles(), registry.all_of
    monkeypatch.setattr(registry, "all_of", lambda package: ours(package) | {"needs": Needs})
    assert space.singles() == expected
    monkeypatch.setattr(registry, "all_of", broken)
    assert space.singles() == expected
    assert "not tried: broken: cannot be imported" in caplog.text
