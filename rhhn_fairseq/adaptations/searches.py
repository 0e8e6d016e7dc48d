"""Fixes for fairseq's search algorithms."""

import torch

from rhhn_fairseq.adaptations import in_place_of, mentions


def number_diverse_groups_by_batch() -> bool:
    """--diverse-beam-groups indexes a table of one batch by a sentence's number in the data.

    Every batch but one that begins the data ends in an IndexError. Here a sentence's number is its position
    among the sentences with which the search of the batch began.
    """
    from fairseq.search import DiverseBeamSearch

    if mentions(DiverseBeamSearch.step, "argmax"):
        return False

    @in_place_of(DiverseBeamSearch, "step")
    def step(inner, self, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
        if original_batch_idxs is not None:
            if step == 0:
                self.sentences = original_batch_idxs
            same = original_batch_idxs.unsqueeze(1) == self.sentences
            original_batch_idxs = same.to(torch.uint8).argmax(dim=1)
        return inner(self, step, lprobs, scores, prev_output_tokens, original_batch_idxs)

    return True


def leave_out_symbols_without_a_score() -> bool:
    """``fairseq-eval-lm --output-word-probs`` and ``--output-word-stats`` need a score for every symbol.

    A character model gives the unknown symbol no probability. fairseq's program then drops the score and
    keeps the symbol. Here the scorer leaves out both.
    """
    from fairseq.sequence_scorer import SequenceScorer

    @in_place_of(SequenceScorer, "generate")
    def generate(inner, self, models, sample, **kwargs):
        results = inner(self, models, sample, **kwargs)
        if "tally" in sample:
            for hypothesis in (hypothesis for hypotheses in results for hypothesis in hypotheses):
                scored = hypothesis["positional_scores"].isfinite()
                for name in ("tokens", "positional_scores"):
                    hypothesis[name] = hypothesis[name][scored]
        return results

    return True
