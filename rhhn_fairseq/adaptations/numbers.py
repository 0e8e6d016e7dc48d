"""Numbers in a checkpoint are Python's: NumPy's are no plain data, and the safe loader refuses them."""

import contextlib
import functools

import numpy as np
import torch

from rhhn_fairseq.adaptations import mentions

# The types of NumPy's scalars that may come out of a checkpoint, as NumPy names them in a pickle.
NUMERIC = {name: np.dtype(name) for name in "b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8".split()}


def save_python_numbers() -> bool:
    """fairseq's BLEU of a validation (--eval-bleu) is a NumPy number, and stands in the checkpoint as such.

    It did so in the metrics and as the best score, and the run could not be resumed.
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
    """The same containers with Python's numbers in place of NumPy's; what holds none is not copied."""
    if isinstance(value, np.bool_ | np.number):
        return value.item()
    if isinstance(value, dict):
        changed = {key: plain(item) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        # Of the same class, as an OrderedDict or a defaultdict.
        copied = value.copy()
        copied.update(changed)
        return copied
    if type(value) in (list, tuple):
        changed = [plain(item) for item in value]
        if all(new is old for new, old in zip(changed, value, strict=True)):
            return value
        return type(value)(changed)
    return value


class NumericType:
    """Stands for ``numpy.dtype`` while a checkpoint is read: the name of a numeric type and nothing else.

    A real one takes flags and sizes from the file, and with forged ones NumPy reads memory it must not.
    """

    def __init__(self, name, align=False, copy=True):
        if name not in NUMERIC:
            raise ValueError(f"NumPy's type {name!r} is not numeric")
        self.name = name

    def __setstate__(self, state):
        # (version, byte order, then nothing of structured types, no sizes, no flags).
        if not (len(state) == 8 and state[1] in "<|" and state[2:] == (None, None, None, -1, -1, 0)):
            raise ValueError("not the state of a numeric type of NumPy")


def numeric_scalar(kind, content):
    """Stands for NumPy's function that makes a scalar of bytes; returns a number of Python's."""
    if type(kind) is not NumericType or type(content) is not bytes:
        raise ValueError("not a scalar of a numeric type")
    if len(content) != NUMERIC[kind.name].itemsize:
        raise ValueError(f"{len(content)} bytes are no scalar of the type {kind.name}")
    return np.frombuffer(content, NUMERIC[kind.name].newbyteorder("<"))[0].item()


def numeric_scalars() -> contextlib.AbstractContextManager:
    """Lets ``torch.load(weights_only=True)`` read NumPy's numeric scalars, as numbers of Python's.

    Checkpoints that were saved without ``save_python_numbers`` hold some.
    """
    scalars = [(numeric_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")]
    return torch.serialization.safe_globals([*scalars, (NumericType, "numpy.dtype"), NumericType])
