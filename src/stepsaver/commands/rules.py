"""`stepsaver rules`: every rule there is, what it is for, when it pays and what it was measured to be worth."""

import argparse
from typing import Any

from stepsaver.commands._registry_table import add_json_argument, print_registry

HELP = "the reuse rules there are, what each is for and what it was measured to be worth"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)


def run(options: argparse.Namespace) -> int:
    from stepsaver.bench.folders import experiments_folder
    from stepsaver.bench.rule_figures import figures_of, stored_figures
    from stepsaver.engine.rules.rule import rule_class

    figures = stored_figures(experiments_folder())

    def more(made: type) -> dict[str, Any]:
        rule = rule_class(made)
        found = figures_of(rule.name, figures)
        return {
            "for": getattr(rule, "purpose", "it does not say"),  # ours say it; another package's may not
            "pays": getattr(rule, "pays", "it does not say"),
            "measured": [each._asdict() for each in found]
            if options.json
            else list(map(str, found)) or ["nothing is stored of it here"],
        }

    print_registry("stepsaver.engine.rules", as_json=options.json, more=more)
    return 0
