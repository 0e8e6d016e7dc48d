"""Evaluation protocols of character language models, and the sums that are reported.

``carry``        one lane: the whole split in order, the state carried, every symbol scored.
``carry:L``      L lanes, each first reading the 1,000 preceding symbols, which are not scored there.
``window:N/C``   windows of N symbols from the zero state, the first C of which are context only.
"""

import logging
import math
import re
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from rhhn_fairseq.data.text.vocabulary import PAD, UNK
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.tasks.carry import Carry
from rhhn_fairseq.tasks.dynamic_evaluation import DynamicEvaluation
from rhhn_fairseq.tasks.lanes import Lanes, Windows

logger = logging.getLogger(__name__)

CONTEXT = 1000

# The most logits that are computed at a time. Several tensors of this size exist together: 1.5 GB in float32.
MOST_LOGITS = 1 << 26

PROGRESS_SECONDS = 60


@dataclass(frozen=True)
class Protocol:
    """A parsed protocol: either ``lanes`` or a ``window`` with its ``context`` is set."""

    text: str
    lanes: int = 0
    window: int = 0
    context: int = 0

    @classmethod
    def parse(cls, text: str, option: str = "--protocol") -> "Protocol":
        """Reads ``carry``, ``carry:L`` or ``window:N/C``; raises UsageError for anything else.

        option: what the error names.
        """
        if text == "carry":
            # With several workers there are more lanes than one, and each needs its context.
            return cls(text, lanes=1, context=CONTEXT)
        lanes = re.fullmatch(r"carry:(\d+)", text)
        if lanes and int(lanes[1]) > 0:
            return cls(text, lanes=int(lanes[1]), context=CONTEXT)
        window = re.fullmatch(r"window:(\d+)/(\d+)", text)
        if window and int(window[2]) < int(window[1]):
            return cls(text, window=int(window[1]), context=int(window[2]))
        raise UsageError(
            f"{option} {text} is not possible: carry, carry:LANES with LANES from 1, or "
            "window:LENGTH/CONTEXT with CONTEXT below LENGTH"
        )

    def cut(self, stream, first_input: int, T: int, B: int, groups: int = 1, entries: int = 1):
        """Returns the batches of a split under this protocol.

        Args:
            stream: indices [N]. T: symbols in a chunk of a lane. B: windows in a batch.
            groups: workers among which lanes are divided; there are at least as many lanes.
            entries: size of the vocabulary. A large one makes chunks and batches smaller, which changes
                no figure.
        """
        most = MOST_LOGITS // entries
        if self.window:
            B = max(1, min(B, most // self.window))
            return Windows(stream, first_input, self.window, self.context, B)
        # A lane shorter than a chunk is not worth its context: short texts get fewer lanes.
        lanes = min(self.lanes, max(1, len(stream) // T))
        lanes = -(-lanes // groups) * groups
        T = max(1, min(T, most * groups // lanes))
        return Lanes(stream, first_input, lanes, groups, T, self.context if lanes > 1 else 0)


class Tally:
    """Sums over a split, in float64, because fairseq-eval-lm's own float32 sum rounds too much.

    Models report their scores; with several models (an ensemble) their probabilities are averaged, as
    fairseq's scorer does.
    """

    def __init__(self):
        self.nats, self.correct, self.scored, self.unknown = 0.0, 0, 0, 0
        self._seen: dict[int, list[tuple[Tensor, Tensor, bool]]] = {}

    def see(self, model: int, scores: Tensor, target: Tensor, log_probs: bool) -> None:
        """Records one model's log-probabilities or probabilities [..., V] of targets [...]."""
        flat = scores.detach().reshape(-1, scores.shape[-1]), target.reshape(-1), log_probs
        self._seen.setdefault(model, []).append(flat)

    def close_batch(self) -> None:
        """Adds what the models reported for one batch to the sums."""
        if not self._seen:
            return
        pieces = list(self._seen.values())
        target = torch.cat([piece[1] for piece in pieces[0]])
        scores = sum(torch.cat([piece[0] for piece in model]) for model in pieces)
        in_logs = pieces[0][0][2]
        self._seen = {}
        here = (target != PAD) & (target != UNK)
        self.unknown += int((target == UNK).sum())
        scores, target = scores[here], target[here]
        probability = scores.gather(1, target.unsqueeze(1)).double()
        nats = -probability if in_logs else math.log(len(pieces)) - probability.log()
        self.nats += nats.sum().item()
        self.correct += int((scores.argmax(dim=1) == target).sum())
        self.scored += len(target)

    @property
    def bpc(self) -> float:
        """Bits per scored character."""
        return self.nats / math.log(2) / max(self.scored, 1)

    def summary(self, total: int, unit: str = "character") -> str:
        """Returns the figures in one line; ``total`` is the split's number of symbols, ``unit`` names one."""
        share = 100.0 * self.scored / max(total, 1)
        accuracy = 100.0 * self.correct / max(self.scored, 1)
        return (
            f"{self.bpc:.6f} bits per {unit}, perplexity {2**self.bpc:.4f}, "
            f"accuracy {accuracy:.2f} %, {self.scored:,} of {total:,} symbols scored ({share:.2f} %), "
            f"{self.unknown:,} unknown"
        )


class ScoredBatches:
    """The batches of an evaluation, with carried state and a tally; logs the sums each minute and at the end.

    Args:
        batches: samples as ``BatchDataset.collater`` makes them.
        total: symbols of the split. title: what is evaluated, for the log.
        unit: what a symbol is.
        learner: learns from each batch after it is scored, see ``DynamicEvaluation``.
    """

    def __init__(self, batches, total: int, title: str, unit: str, learner: DynamicEvaluation | None = None):
        self.batches, self.total, self.title, self.unit, self.learner = batches, total, title, unit, learner
        self.tally, self.n = Tally(), 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        carry = Carry()
        started = told = time.monotonic()
        for sample in self.batches:
            net_input = sample["net_input"] | {"carry": carry.open(sample["chunk"])}
            sample = sample | {"net_input": net_input}
            yield sample | {"tally": self.tally}
            self.tally.close_batch()
            if self.learner is not None:
                self.learner.learn(sample)
            self.n += 1
            if time.monotonic() - told >= PROGRESS_SECONDS:
                told = time.monotonic()
                logger.info("so far: %s", self.tally.summary(self.total, self.unit))
        seconds = time.monotonic() - started
        logger.info("%s: %s, %.1f s", self.title, self.tally.summary(self.total, self.unit), seconds)
