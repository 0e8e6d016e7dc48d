"""GNMT's score and pruning inside fairseq's beam search.

Shapes: B unfinished sentences, K beams, V vocabulary.
"""

import functools

import torch
from fairseq import utils
from fairseq.search import BeamSearch
from fairseq.sequence_generator import SequenceGenerator

from rhhn_fairseq.generate.gnmt_score import GNMTScore, Pruning

ALIGNMENTS = {"hard": utils.extract_hard_alignment, "soft": utils.extract_soft_alignment}


class PrunedBeamSearch(BeamSearch):
    """fairseq's beam search on the candidates that ``Pruning`` leaves.

    Attributes:
        best: the best score of a finished translation for every sentence of the batch.
        rows: the places in the batch of the unfinished sentences.
    """

    def __init__(self, dictionary, pruning: Pruning):
        super().__init__(dictionary)
        self.pruning, self.best, self.rows = pruning, None, None

    def begin(self, sentences: int, device) -> None:
        """Forgets the previous batch."""
        self.best = torch.full((sentences,), float("-inf"), device=device)

    @torch.jit.unused
    def step(self, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
        self.rows = original_batch_idxs
        # At first all hypotheses of a sentence are the same, and fairseq reads the first only.
        previous = None if step == 0 else scores[:, :, step - 1]
        lprobs = self.pruning(lprobs, previous, step, self.best[self.rows])
        return super().step(step, lprobs, scores, prev_output_tokens, original_batch_idxs)


class GNMTGenerator(SequenceGenerator):
    """fairseq's generator; finished translations are scored and ordered by a ``GNMTScore``.

    The bound of ``--max-len-a`` is that of every sentence's own length, where fairseq takes the width of the
    batch. A sentence with no candidate left but its end is finished, with fewer hypotheses than beams.

    Args:
        gnmt_score: the score. pruning: what drops candidates of the plain beam search, or None.
        print_alignment: 'hard' or 'soft', or None for no alignments.
    """

    def __init__(self, *args, gnmt_score: GNMTScore, pruning: Pruning | None, print_alignment=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.gnmt_score, self.pruned = gnmt_score, None
        self.align = ALIGNMENTS[print_alignment] if print_alignment else None
        if pruning is not None:
            self.search = self.pruned = PrunedBeamSearch(self.tgt_dict, pruning)
        self.is_bounded = bool(self.max_len_a) and not self.match_source_len
        self.should_set_src_lengths |= self.is_bounded
        self.search.step = functools.partial(self._bounded_step, self.search.step)
        self.exhausted_B: torch.Tensor | None = None

    @torch.no_grad()
    def generate(self, models, sample, **kwargs):
        """Returns, as fairseq's does, the translations of every sentence, the best first."""
        src_tokens = sample["net_input"]["src_tokens"]
        if self.pruned is not None:
            self.pruned.begin(len(src_tokens), src_tokens.device)
            # Without ids, the search knows sentences by their place in this batch, not in the corpus.
            sample = {key: value for key, value in sample.items() if key != "id"}
        hypotheses = self._generate(sample, **kwargs)
        return [self._rank(*pair) for pair in zip(hypotheses, src_tokens, strict=True)]

    def _rank(self, hypotheses, source):
        for hypothesis in hypotheses:
            log_p, attention = hypothesis["positional_scores"].sum(), hypothesis["attention"]
            length, real = len(hypothesis["tokens"]), source != self.pad
            hypothesis["score"] = self.gnmt_score.finished(log_p, length, attention, real)
            if self.align is not None:
                tokens = hypothesis["tokens"].cpu()
                weights = attention.cpu().transpose(0, 1)
                hypothesis["alignment"] = self.align(weights, source.cpu(), tokens, self.pad, self.eos)
        return sorted(hypotheses, key=lambda hypothesis: -float(hypothesis["score"]))

    def _bounded_step(self, search_step, step, lprobs_BKV, *rest):
        end = self.eos
        if self.is_bounded:
            bound_B = (self.max_len_a * self.search.src_lengths.double() + self.max_len_b).long()
            # Where a prefix or a minimal length excludes the end, the sentence goes on.
            ends_BK = (step >= bound_B).unsqueeze(1) & ~torch.isneginf(lprobs_BKV[..., end])
            going_on_V = torch.arange(lprobs_BKV.shape[-1], device=lprobs_BKV.device) != end
            lprobs_BKV = lprobs_BKV.masked_fill(ends_BK.unsqueeze(2) & going_on_V, float("-inf"))
        scores, symbols, beams = search_step(step, lprobs_BKV, *rest)
        self.exhausted_B = ((symbols == end) | torch.isneginf(scores)).all(dim=1)
        return scores, symbols, beams

    def finalize_hypos(self, step, bbsz_idx, eos_scores, *args, **kwargs):
        if self.pruned is not None:
            row = torch.div(bbsz_idx, self.beam_size, rounding_mode="floor")
            scores = self.gnmt_score.normalise(eos_scores.float(), step + 1)
            self.pruned.best.scatter_reduce_(0, self.pruned.rows[row], scores, "amax")
        return super().finalize_hypos(step, bbsz_idx, eos_scores, *args, **kwargs)

    def is_finished(self, step, unfin_idx, max_len, finalized_sent_len, beam_size):
        assert self.exhausted_B is not None
        return bool(self.exhausted_B[unfin_idx]) or super().is_finished(
            step, unfin_idx, max_len, finalized_sent_len, beam_size
        )
