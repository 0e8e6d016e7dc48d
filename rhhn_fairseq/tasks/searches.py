"""Searches that do what their options promise. They take the place of fairseq's, for the models of both.

Shapes: B sentences, K beams, V vocabulary, G groups of K / G beams.
"""

import math

import torch
from fairseq import search, sequence_generator
from fairseq.search import BeamSearch, Search
from torch import nn


class NGramBlock(nn.Module):
    """``--no-repeat-ngram-size``: no n-gram occurs twice in a hypothesis.

    fairseq's block takes the padding behind the symbols written so far for the last symbols. A prefix that
    has to be written stays possible even if it repeats itself.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(self, tokens, lprobs, bsz: int, beam_size: int, step: int):
        """Returns ``lprobs`` [B K, V] with -inf where ``tokens`` [B K, T] would repeat an n-gram."""
        behind = self.size - 1
        for row, hypothesis in enumerate(tokens[:, 1 : step + 1].tolist()):
            last = hypothesis[len(hypothesis) - behind :]
            ends = range(behind, len(hypothesis))
            banned = [hypothesis[end] for end in ends if hypothesis[end - behind : end] == last]
            rest = lprobs[row].index_fill(0, lprobs.new_tensor(banned, dtype=torch.long), -math.inf)
            if not torch.isneginf(rest).all():
                lprobs[row] = rest
        return lprobs


class SourceLengthSearch(BeamSearch):
    """``--match-source-len``: as many symbols as the source, and the end costs what the model says.

    fairseq gives the end of the sentence probability 1, and writes one symbol too many.
    """

    needs_src_lengths = True

    def __init__(self, dictionary, **bounds):
        super().__init__(dictionary)

    def step(self, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
        # The source's length includes its end. An empty source has a translation of one symbol.
        last_B = step >= (self.src_lengths - 1).clamp(min=1)
        end_V = torch.arange(lprobs.shape[-1], device=lprobs.device) == self.eos
        allowed_BV = last_B.unsqueeze(1) == end_V
        lprobs = lprobs.masked_fill(~allowed_BV.unsqueeze(1), -math.inf)
        return super().step(step, lprobs, scores)


class DiverseGroups(Search):
    """``--diverse-beam-groups``: Vijayakumar et al. 2018 (arXiv 1610.02424), with Hamming diversity.

    Every group searches with K / G beams, and each time that a group before it in the same step goes on with
    a symbol costs that symbol the strength. Each group finishes K / G hypotheses. fairseq's search lets a
    beam that has ended go on behind its </s>, and mixes groups then.
    """

    def __init__(self, dictionary, num_groups: int, diversity_strength: float):
        super().__init__(dictionary)
        self.groups, self.strength, self.beam = num_groups, diversity_strength, BeamSearch(dictionary)

    def step(self, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
        B, K, V = lprobs.shape
        width = K // self.groups
        if step == 0:
            device = lprobs.device
            self.group_BK = torch.arange(K, device=device).remainder(self.groups).expand(B, K)
            self.finished_BG = torch.zeros(B, self.groups, dtype=torch.long, device=device)
        penalty_BV = lprobs.new_zeros(B, V)
        found, kinds = [], []
        for group in range(self.groups):
            beams = (self.group_BK == group).nonzero()[:, 1].view(B, width)
            log_p = lprobs.gather(1, beams.unsqueeze(2).expand(-1, -1, V)) - penalty_BV.unsqueeze(1)
            before = scores.gather(1, beams.unsqueeze(2).expand(-1, -1, scores.shape[2]))
            value, symbol, beam = self.beam.step(step, log_p, before)
            end = symbol == self.eos
            possible = end & ~torch.isneginf(value)
            possible[:, width:] = False
            room = width - self.finished_BG[:, group : group + 1]
            finishing = possible & (possible.cumsum(1) <= room)
            going_on = ~end & ((~end).cumsum(1) <= width)
            self.finished_BG[:, group] += finishing.sum(1)
            active = going_on & (room > 0)
            penalty_BV.scatter_add_(1, symbol, active.to(penalty_BV) * self.strength)
            found.append((value, symbol, beams.gather(1, beam), torch.full_like(symbol, group)))
            kinds.append(2 - going_on.long() - 2 * finishing.long())
        # The generator ends what ends within the first K candidates, and goes on with the first K others.
        order = torch.cat(kinds, dim=1).argsort(dim=1, stable=True)
        value, symbol, beam, group = (
            torch.cat(part, dim=1).gather(1, order) for part in zip(*found, strict=True)
        )
        self.candidate_groups = group
        return value, symbol, beam

    def prune_sentences(self, batch_idxs):
        """Keeps the unfinished sentences."""
        self.candidate_groups = self.candidate_groups[batch_idxs]
        self.finished_BG = self.finished_BG[batch_idxs]

    def update_constraints(self, active_hypos):
        """Notes the groups of the candidates with which the search goes on."""
        self.group_BK = self.candidate_groups.gather(1, active_hypos)


search.DiverseBeamSearch = DiverseGroups
search.LengthConstrainedBeamSearch = SourceLengthSearch
sequence_generator.NGramRepeatBlock = NGramBlock
