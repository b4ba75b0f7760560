"""What may be tried: the settings that rules and policies declare (`engine/tuned.py`), sub-block sizes and joins."""

import hashlib
import itertools
import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

from stepsaver.engine import registry
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoders.speculative import Speculative
from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import Join
from stepsaver.engine.errors import UsageError
from stepsaver.engine.policies.policy import DEFAULT_POLICY, Policy
from stepsaver.engine.rules.rule import Rule, check_rules
from stepsaver.engine.tuned import BY_DRIFT, tuned_fields
from stepsaver.tune.race import Goal, Observed

logger = logging.getLogger(__name__)

RULES, POLICIES = "stepsaver.engine.rules", "stepsaver.engine.policies"
FIRST_RULES = ("previous_row", "trim", "near_rows", "light_commit")  # in the order in which they are applied
JOINS_TRIED: tuple[Join, ...] = ("on",)
LEAST_SUB_BLOCK = 4
LONGEST_NAME = 90
CHOICES = 3  # settings of a kind that are combined with others; as many of each policy
BEAM = 80  # combinations of a family that are grown further


class Setting(NamedTuple):
    """One change of plain decoding: a rule, a policy, a size of sub-blocks or a join."""

    kind: str
    value: Any
    ranks: tuple[int, ...] = ()  # of its ordered fields: the higher, the cheaper
    others: tuple[Any, ...] = ()  # the values of fields that have no order

    @property
    def label(self) -> str:
        """A short name; of a rule or policy, with the fields that differ from their defaults."""
        if not hasattr(self.value, "name"):
            return f"{self.kind}-{self.value}"
        said = [self.value.name]
        for field in fields(self.value):
            value = getattr(self.value, field.name)
            if value != field.default:
                named = "" if field.name == self.value.name else field.name
                said.append(f"{named}{registry.value_text(value)}".replace(",", "."))
        return "-".join(said)

    @property
    def group(self) -> Hashable:
        """What it is a value of: a rule, one policy, the sub-blocks or the joins."""
        return self.kind, self.others[:1]

    def costs_at_least(self, other: "Setting") -> bool:
        """Whether it is of the other's kind and nowhere cheaper."""
        is_same = self.kind == other.kind and self.others == other.others
        return is_same and all(ours <= theirs for ours, theirs in zip(self.ranks, other.ranks, strict=True))


@dataclass(frozen=True)
class Candidate:
    """A combination of settings, at most one of a kind."""

    settings: tuple[Setting, ...]

    def value(self, kind: str) -> Any:
        return next((each.value for each in self.settings if each.kind == kind), None)

    @property
    def rules(self) -> tuple[Rule, ...]:
        rules = [each.value for each in self.settings if isinstance(each.value, Rule)]
        return tuple(sorted(rules, key=_turn))

    @property
    def policy(self) -> Policy | None:
        return self.value("policy")

    @property
    def decoder(self) -> Decoder | None:
        return self.value("decode")

    @cached_property
    def name(self) -> str:
        label = "+".join(each.label for each in sorted(self.settings, key=lambda each: (each.kind, each.label)))
        if len(label) <= LONGEST_NAME:
            return label
        return f"{label[:LONGEST_NAME]}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"


def _turn(rule: Rule) -> tuple[int, str]:
    """Returns the key that rules are sorted by: `FIRST_RULES` in their order, then the rest by name."""
    return (FIRST_RULES.index(rule.name) if rule.name in FIRST_RULES else len(FIRST_RULES), rule.name)


class DeclaredSpace:
    """All settings that make sense for a model and the way it is decoded."""

    def __init__(
        self, decoding: DecodingSettings, layers: int, layer_groups: Sequence[str] = (), *, is_scored: bool = False
    ) -> None:
        self.decoding, self.layers, self.layer_groups = decoding, layers, tuple(layer_groups)
        self.is_scored = is_scored
        self.known: dict[str, Candidate] = {}

    def candidate(self, name: str) -> Candidate:
        return self.known[name]

    def singles(self) -> list[str]:
        found = [Candidate((setting,)) for setting in self._settings()]
        possible = {each.name: each for each in found if self.is_possible(each)}
        self.known |= possible
        return _in_turns([each.settings[0] for each in possible.values()], list(possible))

    def family(self, name: str) -> str:
        return _family(self.known[name])

    def kind(self, name: str) -> Hashable:
        (setting,) = self.known[name].settings
        return setting.group

    def is_covered(self, name: str, hopeless: Sequence[str]) -> bool:
        (ours,) = self.known[name].settings
        return any(ours.costs_at_least(self.known[other].settings[0]) for other in hopeless)

    def combinations(self, known: Mapping[str, Observed], goal: Goal, most: int) -> list[str]:
        """Multiplies speed-ups and adds up drops; what looks promising by that is then run itself."""
        beam: list[tuple[Candidate, Observed | None]] = [(Candidate(()), None)]
        for choices in self._choices(known, goal).values():
            grown = [
                (Candidate((*candidate.settings, setting)), _joined(observed, known[single]))
                for candidate, observed in beam
                for single, setting in choices
            ]
            beam = [*beam, *(each for each in grown if self.is_possible(each[0]))]
            beam.sort(key=lambda each: -(goal.expected_gain(each[1], caution=0.0) if each[1] else 0.0))
            beam = [
                each
                for rank, each in zip(_ranks(_family(candidate) for candidate, _ in beam), beam, strict=True)
                if rank < BEAM
            ]
        several = {candidate.name: candidate for candidate, _ in beam if len(candidate.settings) > 1}
        self.known |= several
        return self._by_families(list(several))[:most]

    def _by_families(self, names: Sequence[str]) -> list[str]:
        """Returns the first of every family, then the next of every family."""
        families: dict[str, list[str]] = {}
        for name in names:
            families.setdefault(self.family(name), []).append(name)
        return _one_of_each(families.values())

    def _choices(self, known: Mapping[str, Observed], goal: Goal) -> dict[str, list[tuple[str, Setting]]]:
        """Returns, by kind, the few settings that promise most on their own; as many of each policy."""
        choices: dict[str, list[tuple[str, Setting]]] = {}
        for single in sorted(known, key=lambda each: -goal.expected_gain(known[each], caution=0.0)):
            (setting,) = self.known[single].settings
            same = choices.setdefault(setting.kind, [])
            alike = [name for name, _ in same if self.family(name) == self.family(single)]
            if known[single].expected_speed_up > 1 and len(alike) < CHOICES:
                same.append((single, setting))
        families = ("policy", "decode")  # first, so that every family grows
        return dict(sorted(choices.items(), key=lambda each: each[0] not in families))

    def is_possible(self, candidate: Candidate) -> bool:
        size = candidate.value("sub")
        decoding = replace(self.decoding, sub_block_size=size) if size else self.decoding
        try:
            check_rules(candidate.rules, decoding, self.layers)
        except UsageError:
            return False
        return candidate.decoder is None or self._is_possible_draft(candidate, candidate.decoder, decoding)

    def _is_possible_draft(self, candidate: Candidate, decoder: Decoder, decoding: DecodingSettings) -> bool:
        """Drafts have no rules, no policy and no sub-blocks, and of the joins only the prefill's."""
        if candidate.rules or candidate.policy or candidate.value("sub"):
            return False
        if candidate.value("join") not in (None, "on"):
            return False
        try:
            decoder.check(decoding, self.layers)
            if self.is_scored:
                decoder.estimator("trajectory", decoding)
        except UsageError:
            return False
        return True

    def _settings(self) -> Iterator[Setting]:
        seen: set[Any] = set()
        for name, made in _classes(RULES, Rule).items():
            for setting in self._declared(name, made):
                same = setting.value.same_answers_as()
                if same not in seen and not setting.value.inert_reason():
                    seen.add(same)
                    yield setting
        for made in _classes(POLICIES, object).values():
            yield from self._declared("policy", made)
        yield from self._declared("decode", Speculative)
        block = self.decoding.block_size
        for size in range(LEAST_SUB_BLOCK, block + 1):
            if block % size == 0 and size & (size - 1) == 0 and size != self.decoding.sub_block_size:
                yield Setting("sub", size, others=("sub", size))
        yield from (Setting("join", join, others=("join", join)) for join in JOINS_TRIED)

    def _declared(self, kind: str, made: type) -> Iterator[Setting]:
        """Yields every combination of the values that a rule or policy declares; nothing if it declares none."""
        declared = tuned_fields(made)
        if not declared:
            return
        tried = [self.layer_groups if each.values == (BY_DRIFT,) else each.values for each in declared.values()]
        for ranked in itertools.product(*(range(len(values)) for values in tried)):
            chosen = {name: values[rank] for name, values, rank in zip(declared, tried, ranked, strict=True)}
            try:
                value = made(**chosen)
            except UsageError:  # values that exclude each other
                continue
            ranks = tuple(rank for rank, each in zip(ranked, declared.values(), strict=True) if each.is_ordered)
            kinds = tuple(chosen[name] for name, each in declared.items() if not each.is_ordered)
            if registry.describe(value) != registry.describe(registry.parse(DEFAULT_POLICY, POLICIES, "policy")):
                yield Setting(kind, value, ranks, (value.name, *kinds))


def _classes(package: str, kind: type) -> dict[str, type]:
    """Returns ours, and unless one is broken those of other packages: what nobody asked for must not end a tuning."""
    try:
        found = registry.all_of(package)
    except UsageError as error:
        logger.warning("rules and policies of other packages are not tried: %s", error)
        found = registry.found_in(package)
    return {name: made for name, made in found.items() if issubclass(made, kind) and _has_defaults(made)}


def _has_defaults(made: type) -> bool:
    """Whether every field that is not tuned has a default."""
    tried = tuned_fields(made)
    return all(
        each.name in tried or each.default is not MISSING or each.default_factory is not MISSING
        for each in fields(made)
    )


def _family(candidate: Candidate) -> str:
    """Returns the name of its decoder or policy: whatever is combined with it loses the answers that it loses."""
    found = candidate.decoder or candidate.policy
    return "" if found is None else found.name


def _ranks(families: Iterable[str]) -> Iterator[int]:
    """Yields the rank of each within its family, in the order given."""
    counts: dict[str, int] = {}
    for family in families:
        counts[family] = counts.get(family, -1) + 1
        yield counts[family]


def _in_turns(settings: Sequence[Setting], names: Sequence[str]) -> list[str]:
    """Returns the cheapest of every kind, then the next of every kind: what comes first tells most if time is short."""
    kinds: dict[Hashable, list[tuple[int, str]]] = {}
    for setting, name in zip(settings, names, strict=True):
        kinds.setdefault(setting.group, []).append((-sum(setting.ranks), name))
    ordered = [[name for _, name in sorted(each, key=lambda one: one[0])] for each in kinds.values()]
    return _one_of_each(ordered)


def _one_of_each(groups: Iterable[Sequence[str]]) -> list[str]:
    """Returns the first of every group, then the next of every group."""
    return [name for each in itertools.zip_longest(*groups) for name in each if name is not None]


def _joined(one: Observed | None, other: Observed) -> Observed:
    """Returns what two changes would do together if each did what it does alone. One's luck makes up for no loss."""
    if one is None:
        return other
    one, other = one.without_luck(), other.without_luck()
    scale = one.problems / other.problems
    up = one.expected_speed_up * other.expected_speed_up
    return Observed(one.problems, one.lost + scale * other.lost, one.won + scale * other.won, (up,), up)
