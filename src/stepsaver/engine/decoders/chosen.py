"""Which decoder a user chose: by text on the command line, in experiments and recipes, by text or object in Python."""

from collections.abc import Sequence
from typing import cast

from stepsaver.engine import registry
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.defaults import DECODE, DEFAULT_POLICY
from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.policies.policy import Policy, chosen_policy
from stepsaver.engine.rules.rule import Rule, chosen_rules

# options that speculative decoding had, and what to say instead
RENAMED = {
    "span=auto": "positions=auto",
    "ahead=auto": "positions=auto",
    "ahead=always": "positions=auto",
    "ahead=never": "positions=0",
}


def chosen_decoder(
    decode: str | Decoder | None = None,
    *,
    policy: str | Policy | None = None,
    threshold: float | None = None,
    rules: str | Rule | Sequence[str | Rule] = (),
    default_policy: str = DEFAULT_POLICY,
) -> Decoder:
    """The decoder that a text or object stands for; None: block diffusion. Only that takes a policy and rules.

    `default_policy` is the one of the model's architecture.
    """
    if decode is None or (isinstance(decode, str) and decode == DECODE):
        return Denoise(chosen_policy(policy, threshold, default_policy), chosen_rules(rules))
    decoder = decode if isinstance(decode, Decoder) else parse_decoder(decode)
    if policy is not None or threshold is not None:
        raise UsageError(f"a policy belongs to block diffusion, not to {decoder.text}")
    if chosen_rules(rules):
        raise UsageError(f"rules belong to block diffusion, not to {decoder.text}")
    return decoder


def parse_decoder(text: str) -> Decoder:
    """A decoder from `block` or `name:field=value,...`."""
    if not isinstance(text, str):
        raise UsageError(f"{shown(text)} is no decoder: expected text such as 'autoregressive'")
    if text == DECODE:
        return Denoise()
    if text.partition(":")[0] == DECODE:
        raise UsageError(f"decoder {shown(text)}: {DECODE} has no fields; policy and rules are options of their own")
    for old, new in RENAMED.items():
        if text.startswith("speculative:") and old in text.partition(":")[2].split(","):
            raise UsageError(f"decoder {shown(text)}: {old} is now {new}")
    if text.startswith("speculative:") and "ahead=" in text:
        raise UsageError(f"decoder {shown(text)}: ahead is gone: use positions=auto, or positions=0 for ahead=never")
    return cast(Decoder, registry.parse(text, "stepsaver.engine.decoders", "decoder"))
