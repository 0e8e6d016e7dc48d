"""Checks fairseq's data files before they are read.

fairseq maps an index into memory without checking it. A damaged index leads to a NumPy exception in the
middle of an epoch, to sentences that are silently left out, or to entries that are in no dictionary. Reading
a pipe or a device in place of a file never ends.
"""

import os

import numpy as np

from rhhn_fairseq.compat import in_place_of
from rhhn_fairseq.data.text.stream import OTHER_FORMATS, read_index
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import refuse_endless


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
    _, content_size = require_file(index), require_file(content)
    with open(index, "rb") as file:
        if file.read(8).startswith(tuple(OTHER_FORMATS)):
            return
    # Without a dictionary these are alignments, and a sentence may have none.
    sentences = read_index(prefix, shortest=0 if entries is None else 1)
    total = sentences.symbols * sentences.dtype.itemsize
    if content_size != total:
        raise UsageError(
            f"{content}: has {content_size:,} bytes, {index} tells of {total:,}; prepare the data again"
        )
    if sentences.items == 0 and entries is not None:
        raise UsageError(f"{index}: holds no sentences")
    if total and entries is not None:
        values = np.memmap(content, sentences.dtype, mode="r")
        low, high = int(values.min()), int(values.max())
        if low < 0 or high >= entries:
            raise UsageError(
                f"{content}: has entry {high if high >= entries else low}, its dictionary has {entries} "
                "entries; data and dictionary do not belong together"
            )


def check_data_files() -> bool:
    """Checks dictionaries and data sets of fairseq's newer binary format; see the module's docstring."""
    from fairseq.data import Dictionary, FastaDataset, data_utils
    from fairseq.tasks.translation import TranslationTask

    @in_place_of(data_utils, "load_indexed_dataset")
    def load_indexed_dataset(load, path, dictionary=None, dataset_impl=None, *args, **kwargs):
        binary = any(os.path.lexists(f"{path}.{end}") for end in ("idx", "bin"))
        if binary and dataset_impl in (None, "mmap"):
            check_indexed(path, None if dictionary is None else len(dictionary))
        return load(path, dictionary, dataset_impl, *args, **kwargs)

    @in_place_of(Dictionary, "add_from_file")
    def add_from_file(read, self, f):
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

    @in_place_of(TranslationTask, "load_dataset")
    def load_dataset(load_split, self, split, epoch=None, **kwargs):
        load_split(self, split, epoch=1 if epoch is None else epoch, **kwargs)
        # Only training passes the epoch.
        if epoch is not None and self.datasets[split].tgt is None:
            languages = f"{self.cfg.source_lang}-{self.cfg.target_lang}.{self.cfg.target_lang}"
            raise UsageError(f"{self.cfg.data} has no {split}.{languages}.bin and .idx, which training needs")

    FastaDataset._build_index = index_fasta
    return True


def index_fasta(dataset, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the sequences of PATH.fasta begin and how long they are.

    fairseq hands the path to a shell, which runs what stands in it, such as ``$(...)`` in a language's name.
    """
    begins, lengths, place = [], [], 0
    with open(f"{path}.fasta", "rb") as file:
        for line in file:
            if line.startswith(b">"):
                begins.append(place)
                lengths.append(0)
            elif lengths:
                lengths[-1] += len(line.strip())
            place += len(line)
    return np.array(begins, np.int64), np.array(lengths, np.int64)
