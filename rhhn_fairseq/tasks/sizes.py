"""fairseq's options for the size of an update, as read by tasks that cut their own batches."""

from collections.abc import Sequence

from rhhn_fairseq.errors import UsageError


def rows_of(max_sentences: int | None, max_tokens: int | None, steps: int) -> int:
    """Returns the rows of a batch, each of ``steps`` steps: what --batch-size and --max-tokens allow.

    Raises:
        UsageError: --batch-size is below 1.
    """
    if max_sentences is None:
        return max(1, (max_tokens or 0) // steps)
    if max_sentences < 1:
        raise UsageError(f"--batch-size {max_sentences} is too small, the smallest is 1")
    return max_sentences if max_tokens is None else max(1, min(max_sentences, max_tokens // steps))


def frequency_of(update_freq: Sequence[int], why: str) -> int:
    """Returns --update-freq, which must be the same for all epochs.

    Args:
        why: the reason for that, for the message.

    Raises:
        UsageError: it differs between epochs, or is below 1.
    """
    given = f"--update-freq {','.join(map(str, update_freq))}"
    if len(set(update_freq)) != 1:
        raise UsageError(f"{given}: {why}, so every epoch needs the same value")
    if update_freq[0] < 1:
        raise UsageError(f"{given} is too small, the smallest is 1")
    return update_freq[0]
