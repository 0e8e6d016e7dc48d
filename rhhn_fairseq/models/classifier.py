"""Model ``classifier``: recurrent layers that read numbers and answer at every step or after the last.

The problem of ``--task synthetic`` defines inputs and answers. To answer after the last step, a layer that
reads in both directions gives the forward cell's output at the last step and the backward cell's at the
first, each of which has read the whole sequence.

Shapes: T time, B batch, C numbers per step, H width of the layers' output, K width of an answer.
"""

import torch
import torch.nn.functional as F
from fairseq.models import BaseFairseqModel, register_model
from torch import Tensor, nn

from rhhn_fairseq.cells.contract import glorot_
from rhhn_fairseq.compat.recipes import typed_config
from rhhn_fairseq.data.problems.generated import Problem
from rhhn_fairseq.data.problems.registry import blank_problem
from rhhn_fairseq.layers.stack import Stack, StackConfig
from rhhn_fairseq.models.classifier_table import ARCHITECTURES, BASE_PROBLEM, recipe_of
from rhhn_fairseq.models.options import STACK, HasRecipe, fairseq_dataclass, register_architectures, taken

LAYERS = (*STACK, "bidirectional_layers")

ClassifierConfig = fairseq_dataclass(
    "ClassifierConfig", __name__, {StackConfig: LAYERS}, cell="lstm", hidden_size=128
)


@register_model("classifier", dataclass=ClassifierConfig)
class Classifier(HasRecipe, BaseFairseqModel):
    """See the module's docstring. The output layer starts as Glorot uniform with zero bias.

    Args:
        config: sizes and options, a ``ClassifierConfig``. problem: defines inputs and answers.
    """

    RECIPE = recipe_of(BASE_PROBLEM)

    def __init__(self, config, problem: Problem):
        super().__init__()
        self.per_step = problem.per_step
        self.stack = Stack(StackConfig(input_size=problem.input_size, **taken(config, LAYERS)))
        self.both_ways = config.bidirectional_layers == config.layers
        self.weight_out = nn.Parameter(torch.empty(self.stack.output_size, problem.output_size))
        self.bias_out = nn.Parameter(torch.zeros(problem.output_size))
        glorot_(self.weight_out)

    @classmethod
    def build_model(cls, cfg, task):
        """Builds the model for the task's problem; UsageError names an invalid option."""
        return cls(typed_config(cfg, cls), task.problem)

    @classmethod
    def recipe(cls, given):
        """Returns the recipe of the given problem, or else of the one that the architecture is for."""
        return recipe_of(given.get("problem", cls.RECIPE["problem"]))

    @classmethod
    def for_problem(cls, config, name: str):
        """Returns a model without data, for counting its parameters."""
        return cls(config, blank_problem(name))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns answers [B, T, K] if the problem has one per step, else [B, K]; inputs are [B, T, C]."""
        # fairseq-validate casts the model alone.
        y_TBH, _ = self.stack(inputs.transpose(0, 1).to(self.weight_out.dtype))
        y = y_TBH.transpose(0, 1) if self.per_step else self._last(y_TBH)
        return F.linear(y, self.weight_out.T, self.bias_out)

    def _last(self, y_TBH: Tensor) -> Tensor:
        """Returns the last layer's output after it has read everything, [B, H]."""
        if not self.both_ways:
            return y_TBH[-1]
        forwards, backwards = y_TBH.chunk(2, dim=-1)
        return torch.cat([forwards[-1], backwards[0]], dim=-1)


register_architectures(
    ARCHITECTURES, Classifier, ClassifierConfig, lambda name: recipe_of(ARCHITECTURES[name].problem)
)
