"""Loading trained models for use outside of fairseq's own programs."""

from fairseq import checkpoint_utils

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.char_lm import CharLM


def load_char_lm(path: str, data: str | None = None):
    """A trained character language model and its task, on the CPU and in evaluation.

    Args:
        path: the checkpoint. data: the data directory, None for the one it was trained with.

    Raises:
        UsageError: no such file, not a checkpoint of a character language model, or other symbols.
    """
    overrides = {} if data is None else {"data": data}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([path], arg_overrides=overrides)
    if not isinstance(model, CharLM):
        raise UsageError(f"{path} holds a {type(model).__name__}, not a character language model")
    return model.eval(), task
