"""Beam search whose step is one function of static buffers, so that a single CUDA graph holds all of it.

Today a graph holds the decoder; softmax, top-k, bookkeeping and reordering are fairseq's, some thirty
launches and several waits for the device in each step. Here they are in the graph too, with the finished
hypotheses. The host looks only every ``CHECKED`` steps whether all sentences are done; finished ones stay in
the batch until then, where fairseq drops them.

Expected for 8 + 8 layers and one sentence: a step took 4.1 ms. Reading the decoder's 160 million weights
takes 0.1 ms, some 100 kernels in a row about 0.6 ms; so most of a step is the host's, and 1.5 to 3 times
today's speed is expected. The target, 5 times the loop's, is 1.5 times today's.

Shapes: N sentences, K beams, R = N K rows, V dictionary, M longest hypothesis without its end.
"""

import torch
from torch import Tensor, nn

from rhhn_fairseq.layers.attention import Memory
from rhhn_fairseq.ops import policy
from rhhn_fairseq.ops.backends import graphs
from rhhn_fairseq.ops.loop import State

CHECKED = 4
"""Steps between two looks at whether all sentences are done."""

NEVER = float("-inf")


class GraphSearch:
    """fairseq's plain beam search for one shape of batches.

    Args:
        decoder: a ``GNMTDecoder`` in evaluation mode. dictionary: of the target, of more than 2 K entries.
        sentences, beam, longest: N, K and M. shortest: least length without the end.
    """

    def __init__(self, decoder: nn.Module, dictionary, sentences: int, beam: int, longest: int, shortest=1):
        self.decoder, self.N, self.K, self.M, self.shortest = decoder, sentences, beam, longest, shortest
        self.eos, self.pad, self.V = dictionary.eos(), dictionary.pad(), len(dictionary)
        device = next(decoder.parameters()).device
        rows, width = sentences * beam, longest + 2
        # In ``found`` the last place of a sentence takes what is not kept.
        whole = [(1,), (rows, width), (sentences, beam + 1, width), (sentences, 1)]
        whole = [torch.zeros(shape, dtype=torch.long, device=device) for shape in whole]
        self.position, self.tokens, self.found, self.count = whole
        self.scores = torch.zeros(rows, device=device)
        self.found_scores = torch.zeros(sentences, beam + 1, device=device)
        self.buffers = [*whole, self.scores, self.found_scores]
        entries, self.rank = torch.arange(self.V, device=device), torch.arange(2 * beam, device=device)
        self.is_end, self.is_pad = entries == self.eos, entries == self.pad
        self.first_row = torch.arange(0, rows, beam, device=device).unsqueeze(1)
        self.memory: Memory | None = None
        self.state: list[Tensor] = []
        self.graph: graphs.Recording | None = None

    @torch.no_grad()
    def search(self, memory: Memory) -> list[list[tuple[list[int], float]]]:
        """Returns each sentence's hypotheses, the best first: symbols up to the end, and the score.

        The memory has N sentences, and in all calls the same number of source positions.
        """
        if self.memory is None:
            self.memory = Memory(*(tensor.clone() for tensor in memory[:3]), self.K)
        for own, given in zip(self.memory[:3], memory[:3], strict=True):
            own.copy_(given)
        self.memory = self.memory._replace(start=memory.start)
        for buffer, value in zip(self.buffers, (0, self.pad, self.pad, 0, NEVER, NEVER), strict=True):
            buffer.fill_(value)
        self.tokens[:, 0] = self.eos
        # At first all beams of a sentence are the same; only one of them may be continued.
        self.scores.view(self.N, self.K)[:, 0] = 0.0
        # The first step has no state to read, and a cell may treat it otherwise.
        after = self.step(None)
        self.state = self.state or [torch.empty_like(tensor) for tensor in after]
        self._keep(after)
        if self.position.is_cuda and self.graph is None:
            self.graph = self._record()
        for n in range(1, self.M + 1):
            if self.graph is None:
                self._keep(self.step(tuple(self.state)))
            else:
                self.graph.replay()
            if n % CHECKED == 0 and bool((self.count == self.K).all()):
                break
        return self._hypotheses()

    def _record(self) -> graphs.Recording:
        """Captures a step that reads and writes the buffers, which are then as before."""
        changed = self.buffers + self.state
        before = [buffer.clone() for buffer in changed]
        with policy.using(graphs=False):
            recording = graphs.record(lambda _: self._keep(self.step(tuple(self.state))) or (), [])
        for buffer, value in zip(changed, before, strict=True):
            buffer.copy_(value)
        return recording

    def _keep(self, state: State) -> None:
        for own, new in zip(self.state, state, strict=True):
            own.copy_(new)

    def step(self, state: State | None) -> State:
        """Runs a step on the buffers, the first without a state; returns that of the beams that go on."""
        now, later = self.position, self.position + 1
        logits, _, after = self.decoder._scores(self.tokens.index_select(1, now), self.memory, state)
        logs_RV = logits[:, -1].log_softmax(dim=-1, dtype=torch.float32)
        refused_V = self.is_pad | torch.where(self.is_end, now < self.shortest, now >= self.M)
        totals_RV = logs_RV.masked_fill(logs_RV.isnan() | refused_V, NEVER) + self.scores.unsqueeze(1)
        best, index = totals_RV.view(self.N, -1).topk(2 * self.K)
        symbol, row = index % self.V, index // self.V + self.first_row
        ends = (symbol == self.eos) & (best != NEVER)
        self._finish(ends[:, : self.K], best[:, : self.K], row[:, : self.K], later)
        # The first K that do not end go on, in the order of their scores.
        _, going = (ends * (2 * self.K) + self.rank).topk(self.K, largest=False)
        order = row.gather(1, going).flatten()
        self.tokens.copy_(self.tokens.index_select(0, order))
        self.tokens.index_copy_(1, later, symbol.gather(1, going).view(-1, 1))
        self.scores.copy_(best.gather(1, going).flatten())
        self.position.copy_(later)
        return tuple(tensor.index_select(0, order) for tensor in after)

    def _finish(self, ends: Tensor, totals: Tensor, row: Tensor, later: Tensor) -> None:
        """Keeps the hypotheses [N, K] that end, up to K for each sentence."""
        place = self.count + ends.cumsum(1) - 1
        place = torch.where(ends & (place < self.K), place, self.K)
        self.found_scores.scatter_(1, place, totals / later)
        history = self.tokens[row].index_fill(2, later, self.eos)
        self.found.scatter_(1, place.unsqueeze(-1).expand_as(history), history)
        self.count.copy_((self.count + ends.sum(1, keepdim=True)).clamp(max=self.K))

    def _hypotheses(self) -> list[list[tuple[list[int], float]]]:
        results, kept = [], (self.found, self.found_scores, self.count.flatten())
        for rows, scores, count in zip(*(tensor.tolist() for tensor in kept), strict=True):
            pairs = sorted(list(zip(scores, rows, strict=True))[:count], reverse=True)
            results.append([(row[1 : row.index(self.eos, 1) + 1], score) for score, row in pairs])
        return results
