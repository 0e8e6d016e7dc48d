"""From a fairseq checkpoint to the two files of ``networks.files``, with the recipe beside them."""

from pathlib import Path

from rhhn_fairseq.adaptations.checkpoints import WeightsOnlyTorch, allow_namespace
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.models.handwriting_loading import load_handwriting
from rhhn_fairseq.models.loading import load_char_lm
from rhhn_fairseq.networks import files


def export(checkpoint: str | Path, directory: str | Path, data: str | None = None, dtype: str = "float16"):
    """Writes a character or handwriting model's two files.

    Args:
        data: the data directory of a character model, None for the one of its training.

    Returns:
        the network that was written.

    Raises:
        UsageError: the checkpoint is of another kind, or of words.
    """
    allow_namespace()
    try:
        weights = WeightsOnlyTorch.load(str(checkpoint), map_location="cpu", mmap=True)["model"]
    except OSError as error:
        raise UsageError(f"checkpoint {checkpoint} cannot be read: {error.strerror or error}") from error
    if "statistics" in weights:
        network, _ = load_handwriting(str(checkpoint))
        config = files.stroke_config(network)
    else:
        network, task = load_char_lm(str(checkpoint), data)
        if task.vocabulary.mode == "words":
            raise UsageError(f"{checkpoint} is a model of words; models of characters are exported")
        config = files.character_config(network, task.vocabulary)
    files.save(network, config, directory, dtype)
    return network
