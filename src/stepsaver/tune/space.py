"""What may be tried: what rules, policies and decoders declare (`engine/registry.py`), sub-block sizes and joins."""

import hashlib
import itertools
import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from stepsaver.engine import registry
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import DEFAULT_POLICY, Join
from stepsaver.engine.errors import UsageError
from stepsaver.engine.policies.policy import Policy
from stepsaver.engine.registry import tuned_fields
from stepsaver.engine.rules.rule import Rule
from stepsaver.tune.observed import Goal, Observed

Item = TypeVar("Item")
logger = logging.getLogger(__name__)

RULES, POLICIES, DECODERS = (f"stepsaver.engine.{kind}" for kind in ("rules", "policies", "decoders"))
FIRST_RULES = ("window", "trim", "suffix_dropout", "partial_commit")  # in the order in which they are applied
JOINS_TRIED: tuple[Join, ...] = ("on",)
LEAST_SUB_BLOCK = 4
LONGEST_NAME = 90
MOST_COMBINATIONS = 12


class Setting(NamedTuple):
    """One change of plain decoding: a rule, a policy, a decoder, a size of sub-blocks or a join."""

    kind: str
    value: Any
    group: Hashable  # what it is a value of: a rule, one policy or decoder, the sub-blocks or the joins
    rank: int = 0  # the higher, the cheaper

    @property
    def label(self) -> str:
        """A short name; of a rule, policy or decoder, with the fields that differ from their defaults."""
        if not hasattr(self.value, "name"):
            return f"{self.kind}-{self.value}"
        said = [self.value.name]
        for field in fields(self.value):
            value = getattr(self.value, field.name)
            if value != field.default:
                named = "" if field.name == self.value.name else field.name
                said.append(f"{named}{registry.value_text(value)}".replace(",", "."))
        return "-".join(said)


@dataclass(frozen=True)
class Candidate:
    """A combination of settings, at most one of a kind."""

    settings: tuple[Setting, ...] = ()

    def value(self, kind: str) -> Any:
        return next((each.value for each in self.settings if each.kind == kind), None)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """In the order of `FIRST_RULES`, then by name."""
        rules = [each.value for each in self.settings if isinstance(each.value, Rule)]
        return tuple(sorted(rules, key=lambda rule: ((*FIRST_RULES, rule.name).index(rule.name), rule.name)))

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


class DeclaredSpace:
    """All settings that make sense for a model and the way it is decoded."""

    def __init__(self, decoding: DecodingSettings, layers: int, *, is_scored: bool) -> None:
        self.decoding, self.layers, self.is_scored = decoding, layers, is_scored
        self.known: dict[str, Candidate] = {}

    def singles(self) -> list[str]:
        found = (Candidate((setting,)) for setting in self._settings())
        possible = {each.name: each for each in found if self.is_possible(each)}
        self.known |= possible
        groups: dict[Hashable, list[str]] = {}
        for name in sorted(possible, key=lambda name: -possible[name].settings[0].rank):
            groups.setdefault(self.kind(name), []).append(name)
        return _one_of_each(groups.values())

    def kind(self, name: str) -> Hashable:
        (setting,) = self.known[name].settings
        return setting.group

    def combinations(self, known: Mapping[str, Observed], goal: Goal) -> list[str]:
        """Grows plain decoding, and the best of each policy and decoder, by one promising setting after the other, as
        long as the product of the speed-ups and the sum of the drops promise more.

        Every step of that is a candidate. Few problems flatter one policy and all that is combined with it, so none is
        left out.
        """
        promising = [
            name for name in sorted(known, key=lambda each: -goal.gain(known[each])) if known[name].speed_up > 1
        ]
        starts = {self.kind(name): name for name in reversed(promising) if self._is_start(name)}
        chains = [self._grown(start, promising, known, goal) for start in (None, *reversed(starts.values()))]
        chosen = {each.name: each for each in _one_of_each(chain[::-1] for chain in chains)}
        self.known |= chosen
        return list(chosen)[:MOST_COMBINATIONS]

    def _is_start(self, name: str) -> bool:
        return bool(self.known[name].policy or self.known[name].decoder)

    def _grown(
        self, start: str | None, promising: Sequence[str], known: Mapping[str, Observed], goal: Goal
    ) -> list[Candidate]:
        candidate, seen = (self.known[start], known[start]) if start else (Candidate(), None)
        chain = []
        for name in promising:
            (setting,) = self.known[name].settings
            grown = Candidate((*candidate.settings, setting))
            together = known[name] if seen is None else _together(seen, known[name])
            is_free = not self._is_start(name) and candidate.value(setting.kind) is None
            is_better = seen is None or goal.gain(together) > goal.gain(seen)
            if is_free and is_better and self.is_possible(grown):
                candidate, seen = grown, together
                chain.append(candidate)
        return [each for each in chain if len(each.settings) > 1]

    def is_possible(self, candidate: Candidate) -> bool:
        size, decoder = candidate.value("sub"), candidate.decoder or Denoise(rules=candidate.rules)
        decoding = replace(self.decoding, sub_block_size=size) if size else self.decoding
        try:
            decoder.check(decoding, self.layers)
            if self.is_scored:
                decoder.estimator("trajectory", decoding)
        except UsageError:
            return False
        return candidate.decoder is None or not (
            candidate.rules or candidate.policy or size
        )  # which mean nothing to it

    def _settings(self) -> Iterator[Setting]:
        for package, kind in ((RULES, None), (POLICIES, "policy"), (DECODERS, "decode")):
            for name, made in _classes(package).items():
                yield from self._declared(kind or name, made)
        block = self.decoding.block_size
        for size in range(LEAST_SUB_BLOCK, block + 1):
            if block % size == 0 and size & (size - 1) == 0 and size != self.decoding.sub_block_size:
                yield Setting("sub", size, "sub", size)
        yield from (Setting("join", join, "join") for join in JOINS_TRIED)

    def _declared(self, kind: str, made: type) -> Iterator[Setting]:
        """Yields every combination of the values that a class declares; nothing if it declares none."""
        declared = tuned_fields(made)
        default = registry.describe(registry.parse(DEFAULT_POLICY, POLICIES, "policy"))
        for ranks in itertools.product(*(range(len(each.values)) for each in declared.values())) if declared else ():
            chosen = {name: each.values[rank] for (name, each), rank in zip(declared.items(), ranks, strict=True)}
            try:
                value = made(**chosen)
            except (UsageError, TypeError):  # values that exclude each other, or a field that nobody gives one
                continue
            if registry.describe(value) != default:
                cheaper = sum(rank for rank, each in zip(ranks, declared.values(), strict=True) if each.is_ordered)
                yield Setting(kind, value, (kind, made), cheaper)


def _classes(package: str) -> Mapping[str, type]:
    """Returns ours, and unless one is broken those of other packages: what nobody asked for must not end a tuning."""
    try:
        return registry.all_of(package)
    except UsageError as error:
        logger.warning("rules and policies of other packages are not tried: %s", error)
        return registry.found_in(package)


def _one_of_each(groups: Iterable[Sequence[Item]]) -> list[Item]:
    """Returns the first of every group, then the next of every group."""
    return [item for each in itertools.zip_longest(*groups) for item in each if item is not None]


def _together(one: Observed, other: Observed) -> Observed:
    """Returns what two changes would do together if each did what it does alone."""
    scale = one.problems / other.problems
    ups = (one.speed_up * other.speed_up,)
    return Observed(one.problems, one.lost + scale * other.lost, one.won + scale * other.won, ups)
