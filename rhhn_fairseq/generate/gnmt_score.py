"""GNMT's score of a translation, and its beam pruning (Wu et al. 2016, arXiv 1609.08144, section 7).

    score(Y, X) = log P(Y | X) / lp(Y) + cp(X, Y)
    lp(Y) = ((5 + |Y|) / 6) ** alpha
    cp(X, Y) = beta * sum_i log(min(sum_j p_ij, 1))

|Y| and log P include the end of sentence; i runs over the source's real symbols with its end, j over all
steps of the target; p_ij is the attention.

Shapes: T target, S source, B sentences, K beams, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rhhn_fairseq.errors import UsageError

LENGTH_PENALTIES = "fairseq, none, gnmt:ALPHA"
# Lengths to far higher powers overflow.
LARGEST_ALPHA = 10.0


@dataclass(frozen=True)
class GNMTScore:
    """The score of a finished translation.

    Attributes:
        alpha: exponent of GNMT's length penalty. beta: weight of the coverage penalty.
        lenpen: if it is not None, log P is divided by ``|Y| ** lenpen`` instead, as fairseq does.
    """

    alpha: float = 0.0
    beta: float = 0.0
    lenpen: float | None = None

    @classmethod
    def parse(cls, length_penalty: str, beta: float, lenpen: float) -> "GNMTScore":
        """Reads the command line's values; ``lenpen`` is fairseq's exponent for ``fairseq``.

        Raises:
            UsageError: a value is invalid; the message says what would be valid.
        """
        name, colon, number = length_penalty.partition(":")
        if length_penalty == "fairseq":
            return cls(0.0, beta, lenpen)
        if length_penalty == "none":
            return cls(0.0, beta)
        try:
            alpha = float(number) if name == "gnmt" and colon else math.nan
        except ValueError:
            alpha = math.nan
        if not 0 <= alpha <= LARGEST_ALPHA:
            raise UsageError(
                f"--length-penalty {length_penalty} is unknown, choose from {LENGTH_PENALTIES} with ALPHA "
                f"from 0 to {LARGEST_ALPHA:g} (0.2 in the paper)"
            )
        return cls(alpha, beta)

    def normalise(self, log_p, length: int):
        """Returns ``log P / lp`` of a translation of ``length`` symbols."""
        if self.lenpen is not None:
            return log_p / length**self.lenpen
        return log_p / ((5.0 + length) / 6.0) ** self.alpha

    def finished(self, log_p: Tensor, length: int, attention_ST: Tensor, real_S: Tensor) -> Tensor:
        """Returns the score of one translation.

        Args:
            log_p: its log-probability. length: its symbols, including the end of sentence.
            attention_ST: attention weights of every step; empty from a model that gives none.
            real_S: bool, false at the source's padding.

        Raises:
            UsageError: there is a coverage penalty but no attention.
        """
        score = self.normalise(log_p, length)
        if self.beta:
            if not attention_ST.numel():
                raise UsageError(
                    f"--coverage-penalty {self.beta} needs attention, which this model does not have"
                )
            covered = attention_ST[real_S].sum(dim=1)
            # A symbol that no step has attended to costs much, but not infinitely much.
            covered = covered.clamp(min=torch.finfo(covered.dtype).tiny, max=1.0)
            score = score + self.beta * covered.log().sum()
        return score


class Pruning:
    """Drops candidates of a beam search that are far behind (Wu et al. 2016, section 7).

    A symbol is dropped if its log-probability is more than ``threshold`` below the best symbol's after the
    same hypothesis, and a hypothesis if its normalised score is more than that below the best finished
    one's, both without the coverage penalty. The paper compares finished hypotheses alone; here unfinished
    ones are dropped too. The best candidate of a sentence always stays.
    """

    def __init__(self, threshold: float, score: GNMTScore):
        self.threshold, self.score = threshold, score

    def __call__(
        self, log_probs_BKV: Tensor, previous_BK: Tensor | None, step: int, best_B: Tensor
    ) -> Tensor:
        """Returns the log-probabilities with dropped candidates at -inf.

        Args:
            log_probs_BKV: of the next symbol. previous_BK: the hypotheses' own; None at first.
            step: symbols that each hypothesis has. best_B: best finished score, -inf if there is none.
        """
        top_BK1 = log_probs_BKV.amax(dim=2, keepdim=True)
        dropped = log_probs_BKV < top_BK1 - self.threshold
        total = log_probs_BKV if previous_BK is None else log_probs_BKV + previous_BK.unsqueeze(2)
        normal = self.score.normalise(total, step + 1)
        dropped |= normal < (best_B - self.threshold).view(-1, 1, 1)
        dropped &= total < total.flatten(1).amax(dim=1).view(-1, 1, 1)
        return log_probs_BKV.masked_fill(dropped, float("-inf"))
