"""What you need to write your own rules, policies, architectures and tasks. `examples/own_rule` is a whole example.

A package declares them as entry points of the groups `stepsaver.rules`, `stepsaver.policies`,
`stepsaver.architectures` and `stepsaver.tasks`, under the name by which they are used; rules and policies can also be
given to `Model.generate` and `stepsaver.compare` as objects. Rules and policies are frozen dataclasses:
`name:field=value` sets their fields, which are part of a run's identity.
"""

from typing import TYPE_CHECKING, Any

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.architecture import Architecture
from stepsaver.engine.plan import LayerRows, StepPlan
from stepsaver.engine.policies.policy import Candidates, Policy, by_confidence
from stepsaver.engine.rows import Rows, row_list, rows_between
from stepsaver.engine.rules.rule import Rule
from stepsaver.engine.view import StepView

if TYPE_CHECKING:
    from stepsaver.evaluation.task_registry import TaskDeclaration

__all__ = [
    "Architecture",
    "Candidates",
    "DecodingSettings",
    "LayerRows",
    "Policy",
    "Rows",
    "Rule",
    "StepPlan",
    "StepView",
    "TaskDeclaration",
    "UsageError",
    "by_confidence",
    "row_list",
    "rows_between",
]


def __getattr__(name: str) -> Any:
    if name != "TaskDeclaration":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stepsaver.evaluation.task_registry import TaskDeclaration  # it needs the extra `bench`

    return TaskDeclaration
