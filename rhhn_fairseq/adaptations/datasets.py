"""Checks fairseq's data files before they are read.

fairseq maps an index into memory without checking it. A damaged index leads to a NumPy exception in the
middle of an epoch, to sentences that are silently left out, or to entries that are in no dictionary. Reading
a pipe or a device in place of a file never ends.
"""

import functools
import os
import struct

import numpy as np

from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import refuse_endless

MAGIC = b"MMIDIDX\0\0"
# Magic numbers of fairseq's older format and its compressed one, which are not checked here.
OTHER_MAGIC = (b"TNTIDX\0\0", b"HUFFIDX\0\0")
HEAD = struct.Struct("<9sQBQ")
TYPES = dict(enumerate((np.uint8, np.int8, np.int16, np.int32, np.int64), start=1)) | {8: np.uint16}
TYPES |= {9: np.uint32, 10: np.uint64}


def require_file(path: str) -> int:
    """Returns the size of a file in bytes. Raises UsageError if it cannot be read or is no regular file."""
    refuse_endless(path)
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error


def check_indexed(prefix: str, entries: int | None) -> None:
    """Checks that PREFIX.idx and PREFIX.bin belong together and hold only entries of a dictionary.

    Args:
        entries: size of the dictionary; None if there is none.

    Raises:
        UsageError: they do not.
    """
    index, content = f"{prefix}.idx", f"{prefix}.bin"
    size, content_size = require_file(index), require_file(content)
    with open(index, "rb") as file:
        head = file.read(HEAD.size)
    if head.startswith(OTHER_MAGIC):
        return
    if len(head) < HEAD.size or not head.startswith(MAGIC):
        raise UsageError(f"{index}: is damaged, or not an index of fairseq's; prepare the data again")
    _, version, code, sentences = HEAD.unpack(head)
    if version != 1 or code not in TYPES:
        raise UsageError(f"{index}: is of version {version} and type {code}, which fairseq does not know")
    if size != HEAD.size + 12 * sentences:
        raise UsageError(
            f"{index}: has {size:,} bytes, its {sentences:,} sentences take {HEAD.size + 12 * sentences:,}; "
            "prepare the data again"
        )
    kind = np.dtype(TYPES[code])
    rest = np.fromfile(index, np.uint8, offset=HEAD.size)
    lengths, places = rest[: 4 * sentences].view(np.int32), rest[4 * sentences :].view(np.int64)
    # Without a dictionary these are alignments, and a sentence may have none.
    shortest = 0 if entries is None else 1
    ends = np.cumsum(lengths, dtype=np.int64) * kind.itemsize
    if (lengths < shortest).any() or (places != ends - lengths.astype(np.int64) * kind.itemsize).any():
        raise UsageError(
            f"{index}: is damaged, its sentences do not follow each other; prepare the data again"
        )
    total = int(ends[-1]) if sentences else 0
    if content_size != total:
        raise UsageError(
            f"{content}: has {content_size:,} bytes, {index} tells of {total:,}; prepare the data again"
        )
    if sentences == 0 and entries is not None:
        raise UsageError(f"{index}: holds no sentences")
    if total and entries is not None:
        values = np.memmap(content, kind, mode="r")
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= entries:
            raise UsageError(
                f"{content}: has entry {high if high >= entries else low}, its dictionary has {entries} "
                "entries; data and dictionary do not belong together"
            )


def check_data_files() -> bool:
    """Checks dictionaries and data sets of fairseq's newer binary format; see the module's docstring."""
    from fairseq.data import Dictionary, data_utils
    from fairseq.tasks.translation import TranslationTask

    load, read, load_split = (
        data_utils.load_indexed_dataset,
        Dictionary.add_from_file,
        TranslationTask.load_dataset,
    )

    @functools.wraps(load)
    def load_indexed_dataset(path, dictionary=None, dataset_impl=None, *args, **kwargs):
        binary = any(os.path.lexists(f"{path}.{end}") for end in ("idx", "bin"))
        if binary and dataset_impl in (None, "mmap"):
            check_indexed(path, None if dictionary is None else len(dictionary))
        return load(path, dictionary, dataset_impl, *args, **kwargs)

    @functools.wraps(read)
    def add_from_file(self, f):
        if not isinstance(f, str):
            return read(self, f)
        require_file(f)
        try:
            return read(self, f)
        except UsageError:
            raise
        except (ValueError, RuntimeError) as error:
            text = " ".join(str(error).split())
            raise UsageError(f"{f}: is not a dictionary of fairseq's: {text[:160]}") from error

    @functools.wraps(load_split)
    def load_dataset(self, split, epoch=None, **kwargs):
        load_split(self, split, epoch=1 if epoch is None else epoch, **kwargs)
        # Only training passes the epoch.
        if epoch is not None and self.datasets[split].tgt is None:
            languages = f"{self.cfg.source_lang}-{self.cfg.target_lang}.{self.cfg.target_lang}"
            raise UsageError(f"{self.cfg.data} has no {split}.{languages}.bin and .idx, which training needs")

    data_utils.load_indexed_dataset = load_indexed_dataset
    Dictionary.add_from_file = add_from_file
    TranslationTask.load_dataset = load_dataset
    return True
