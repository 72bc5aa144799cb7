"""The provider that leads on from global tensors to those of a Hugging Face checkpoint.

A checkpoint in Hugging Face's form is one more layout: with this provider the load planner reads
it into any parallel configuration, and `bridge` turns it into a checkpoint of our names and back.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from shardplan.layouts import EXPERT, Level, ParamInfo, Stage

_HOLES = {"{layer}": r"(?P<layer>\d+)", "{expert}": r"(?P<expert>\d+|\{expert\})"}


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of parameter is called and cut in another project's checkpoints.

    Attributes:
        name: The parameter's name, where `{layer}` and `{expert}` stand for numbers.
        to: What the name becomes; the last stage's suffixes are appended.
        stages: Stages that lead from our global tensors to theirs.

    >>> Rule("decoder.layers.{layer}.mlp.router.weight", "model.layers.{layer}.mlp.gate.weight")
    Rule(name='decoder.layers.{layer}.mlp.router.weight', to='model.layers.{layer}.mlp.gate.weight', stages=())
    """

    name: str
    to: str
    stages: tuple[Stage, ...] = ()

    def pattern(self) -> re.Pattern[str]:
        """Returns the expression that whole names are matched with."""
        text = re.escape(self.name)
        for hole, expression in _HOLES.items():
            text = text.replace(re.escape(hole), expression)
        return re.compile(text + "$")


class HuggingFaceNames:
    """Names and reshapes parameters as a Hugging Face checkpoint has them.

    A parameter that no rule names keeps its own name and shape.

    Args:
        rules: One rule for each kind of parameter; the first that matches counts.
    """

    name = "hugging-face"
    level = Level.FORMAT

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self._patterns = [(rule.pattern(), rule) for rule in self.rules]

    def rule(self, name: str) -> tuple[Rule, re.Match[str]] | None:
        """Returns the rule for a name and how it matches, None if there is none."""
        for pattern, rule in self._patterns:
            found = pattern.match(name)
            if found is not None:
                return rule, found
        return None

    def claims(self, param: ParamInfo) -> bool:
        return self.rule(param.fqn) is not None

    def stages(self, param: ParamInfo) -> tuple[Stage, ...]:
        found = self.rule(param.fqn)
        return () if found is None else found[0].stages

    def rename(self, param: ParamInfo, name: str) -> str:
        """Returns the name there, with the layer's global number and a hole for the expert."""
        found = self.rule(name)
        if found is None:
            return name
        rule, match = found
        renamed = rule.to.replace("{layer}", match.groupdict().get("layer") or "")
        # A stage that stacks experts leaves no hole; otherwise the hole stays for the index.
        return renamed.replace("{expert}", EXPERT)
