"""What may be tried: declared by every field of every rule and policy, and ordered by what costs less."""

import dataclasses
from typing import ClassVar

import pytest

from stepsaver.bench.experiment import ConfigSpec
from stepsaver.engine import registry
from stepsaver.engine.decoders.speculative import Speculative
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.errors import UsageError
from stepsaver.engine.policies.policy import parse_policy
from stepsaver.engine.tuned import BY_DRIFT, NOT_TUNED, TUNED, tuned, tuned_fields
from stepsaver.tune.race import Goal, Observed
from stepsaver.tune.space import POLICIES, RULES, DeclaredSpace
from stepsaver.tune.tuning import config_of
from tests.conftest import tiny_config

DECLARED = [*registry.found_in(RULES).values(), *registry.found_in(POLICIES).values()]


@pytest.fixture
def space() -> DeclaredSpace:
    config = tiny_config(block_size=32, layers=4)
    return DeclaredSpace(resolve_decoding(config, sub_block_size=8, join="off"), config.layers, ("1", "0-2"))


@pytest.mark.parametrize("made", DECLARED, ids=lambda made: str(made.name))
def test_every_field_says_what_is_tried_or_why_nothing(made: type) -> None:
    for field in dataclasses.fields(made):
        assert (TUNED in field.metadata) != (NOT_TUNED in field.metadata), f"{made.__name__}.{field.name}"
        if NOT_TUNED in field.metadata:
            assert field.metadata[NOT_TUNED]
        else:
            values = field.metadata[TUNED].values
            assert values
            assert len(set(values)) == len(values)


@pytest.mark.parametrize("made", DECLARED, ids=lambda made: str(made.name))
def test_every_value_that_is_tried_alone_is_allowed(made: type) -> None:
    required = {name: each.values[0] for name, each in tuned_fields(made).items()}
    for name, each in tuned_fields(made).items():
        for value in each.values:
            if value != BY_DRIFT and made.__name__ != "LayerReuse":
                kind = "stepsaver.engine.rules" if made in registry.found_in(RULES).values() else POLICIES
                text = registry.describe(made(**(required | {name: value})))
                assert registry.describe(registry.parse(text, kind, "setting")) == text


def test_the_cheapest_of_each_kind_come_first_and_cover_what_costs_more(space: DeclaredSpace) -> None:
    names = space.singles()
    assert len(names) == len(set(names))
    assert {"threshold-0.5", "previous_row", "near_rows", "light_commit-settle0", "sub-16", "join-on"} <= {
        name.replace("threshold-threshold", "threshold-") for name in names
    }
    near = [name for name in names if name.startswith("near_rows")]
    assert near[0] == "near_rows"
    assert all(space.is_covered(name, [near[0]]) for name in near)
    assert not space.is_covered(near[0], near[1:])
    assert not space.is_covered("sub-16", near)
    assert not any(space.is_covered("sub-4", [name]) for name in names if name != "sub-4")


def test_candidates_become_configs_that_say_all_that_is_changed(space: DeclaredSpace) -> None:
    for name in space.singles():
        config = config_of(space.candidate(name))
        assert ConfigSpec.model_validate(config.model_dump()) == config
        assert config.decode or config.rules or config.policy or config.sub_block_size or config.join


def test_combinations_have_one_of_a_kind_and_nothing_that_excludes_itself(space: DeclaredSpace) -> None:
    names = space.singles()
    known = {name: Observed(64, 1.0, 1.0, (1.2,), 1.2) for name in names}
    combined = space.combinations(known, Goal(0.03, 0.95, 5000), 40)
    assert combined
    for name in combined:
        candidate = space.candidate(name)
        kinds = [each.kind for each in candidate.settings]
        assert len(kinds) > 1
        assert len(kinds) == len(set(kinds))
        assert space.is_possible(candidate)
        if isinstance(candidate.decoder, Speculative):  # all else would change nothing and look like another candidate
            assert [each.value for each in candidate.settings if each.kind != "decode"] == ["on"]
        turns = [rule.name for rule in candidate.rules if rule.name in ("previous_row", "trim", "near_rows")]
        assert turns == sorted(turns, key=("previous_row", "trim", "near_rows").index)


def test_every_kind_of_policy_is_in_some_combination(space: DeclaredSpace) -> None:
    """However much better one of them looks: few problems may flatter all of its combinations at once."""
    names = space.singles()
    ups = {name: 3.0 if name.startswith("threshold") else 1.1 for name in names}
    known = {name: Observed(64, 0.0, 0.0, (up,), up) for name, up in ups.items()}
    combined = space.combinations(known, Goal(0.03, 0.95, 5000), 24)
    assert {space.family(name) for name in combined} == {"", *(space.family(name) for name in names)}
    assert any("join-on" in name and "speculative" in name for name in combined)


def test_a_task_that_is_scored_has_no_drafts_in_committed_blocks(space: DeclaredSpace) -> None:
    scored = DeclaredSpace(space.decoding, space.layers, is_scored=True)
    wanted = [name for name in space.singles() if name.startswith("speculative")]
    found = [name for name in scored.singles() if name.startswith("speculative")]
    assert found == [name for name in wanted if "contextblock" not in name]
    assert len(found) < len(wanted)


def test_a_broken_plug_in_ends_no_tuning(
    space: DeclaredSpace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def all_of(package_name: str) -> dict[str, type]:
        raise UsageError("broken: cannot be imported")

    expected = space.singles()
    monkeypatch.setattr(registry, "all_of", all_of)
    assert space.singles() == expected
    assert "not tried: broken: cannot be imported" in caplog.text


@dataclasses.dataclass(frozen=True)
class Needs:
    """No rule, and a field that nobody gives a value."""

    wanted: int
    tried: int = dataclasses.field(default=1, metadata=tuned(2, 1))
    name: ClassVar[str] = "needs"


def test_what_is_no_rule_or_lacks_a_value_is_not_tried(space: DeclaredSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, ours = space.singles(), registry.all_of
    monkeypatch.setattr(registry, "all_of", lambda package: ours(package) | {"needs": Needs})
    assert space.singles() == expected


def test_the_luck_of_one_change_makes_up_for_no_loss_of_another(space: DeclaredSpace) -> None:
    space.singles()
    seen = {"near_rows": (12.0, 0.0, 1.5), "join-on": (0.0, 12.0, 1.29), "sub-16": (6.0, 6.0, 1.3)}
    known = {name: Observed(320, lost, won, (up,), up) for name, (lost, won, up) in seen.items()}
    combined = space.combinations(known, Goal(0.03, 0.95, 5000), 40)
    assert combined.index("near_rows+sub-16") < combined.index("join-on+near_rows")


def test_what_slows_down_is_in_no_combination(space: DeclaredSpace) -> None:
    names = space.singles()
    known = {name: Observed(64, 0.0, 0.0, (1.5 if name.startswith("near_rows") else 0.9,)) for name in names}
    assert space.combinations(known, Goal(0.03, 0.95, 5000), 40) == []


def test_policies_that_are_tuned_are_not_the_baselines(space: DeclaredSpace) -> None:
    plain = registry.describe(parse_policy("threshold"))
    policies = [space.candidate(name).policy for name in space.singles()]
    assert plain not in [registry.describe(each) for each in policies if each]
