"""Numbers in a checkpoint are Python's: NumPy's are no plain data, and the safe loader refuses them."""

import functools

import numpy as np
import torch

from rhhn_fairseq.adaptations import mentions


def save_python_numbers() -> bool:
    """fairseq's BLEU of a validation (--eval-bleu) is a NumPy number, and its n-gram counts are arrays.

    They were saved as such, with the metrics and as the best score, and the run could not be resumed.
    """
    from fairseq import checkpoint_utils

    inner = checkpoint_utils.torch_persistent_save
    if mentions(inner, "plain"):
        return False

    @functools.wraps(inner)
    def torch_persistent_save(obj, filename, *args, **kwargs):
        return inner(plain(obj), filename, *args, **kwargs)

    checkpoint_utils.torch_persistent_save = torch_persistent_save
    return True


def plain(value):
    """The same containers, with Python's numbers in place of NumPy's and tensors in place of numeric arrays.

    What holds neither is the same object, not a copy.
    """
    if isinstance(value, np.bool_ | np.number):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value)
    if isinstance(value, dict):
        changed = {key: plain(item) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        # Of the same class, as an OrderedDict.
        copied = value.copy()
        copied.update(changed)
        return copied
    if type(value) in (list, tuple):
        changed = [plain(item) for item in value]
        if all(new is old for new, old in zip(changed, value, strict=True)):
            return value
        return type(value)(changed)
    return value
