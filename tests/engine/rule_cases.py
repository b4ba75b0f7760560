"""Every rule of the registry in the settings that the truths are proved for. A new rule adds its line here."""

from stepsaver.engine import registry
from stepsaver.engine.rules.rule import Rule, parse_rule

# Settings that must change nothing: same shapes, same bits.
NEUTRAL = {
    "layer_reuse": ["layer_reuse:k=1,mode=output", "layer_reuse:k=1,mode=delta", "layer_reuse:k=1,mode=mlp"],
    "window": ["window:refresh=drift,limit=0"],
    "trim": ["trim:level=drift,budget=64,age=1", "trim:level=random,budget=64"],
    "adaptive_layers": ["adaptive_layers:probe=1,threshold=0"],
    "suffix_dropout": [],  # a setting that hides nothing is refused
    "partial_commit": ["partial_commit:settle=all"],
}

# Settings that act.
ACTING = {
    "layer_reuse": [
        "layer_reuse:k=2,layers=first,mode=output",
        "layer_reuse:k=3,layers=last,mode=output",
        "layer_reuse:k=2,layers=all,mode=delta",
        "layer_reuse:k=3,layers=last,mode=delta,kv=freeze",
        "layer_reuse:k=2,layers=0,mode=delta",
        "layer_reuse:k=3,layers=thirds:2,mode=mlp",
    ],
    "window": ["window:refresh=block", "window:refresh=sub-block", "window:refresh=drift"],
    "trim": [
        "trim:level=structural",
        "trim:level=drift,budget=1",
        "trim:level=changed,settle=0",
        "trim:level=random,budget=2",
    ],
    "adaptive_layers": ["adaptive_layers:probe=1,threshold=0.5", "adaptive_layers:probe=2,threshold=5,max_age=1"],
    "suffix_dropout": ["suffix_dropout", "suffix_dropout:ahead=2"],
    "partial_commit": ["partial_commit", "partial_commit:settle=0"],
}

COMBINED = [
    ("window:refresh=block", "trim:level=changed"),
    ("window:refresh=sub-block", "trim:level=drift", "layer_reuse:k=2,layers=first,mode=delta"),
    ("trim:level=structural", "layer_reuse:k=3,layers=all,mode=mlp"),
    ("window:refresh=drift", "adaptive_layers:probe=1,threshold=0.5"),
    ("window:refresh=block", "trim:level=changed", "suffix_dropout", "partial_commit"),
    ("suffix_dropout", "layer_reuse:k=3,layers=all,mode=delta,kv=freeze", "partial_commit:settle=0"),
    ("suffix_dropout:ahead=1", "window:refresh=drift", "adaptive_layers:probe=1,threshold=0.5"),
    ("suffix_dropout", "layer_reuse:k=2,mode=output"),
]


def names_in_the_registry() -> set[str]:
    return set(registry.found_in("stepsaver.engine.rules"))


def rule_sets(texts: dict[str, list[str]]) -> list[tuple[Rule, ...]]:
    return [(parse_rule(text),) for group in texts.values() for text in group]


def combined_rule_sets() -> list[tuple[Rule, ...]]:
    return [tuple(parse_rule(text) for text in texts) for texts in COMBINED]
