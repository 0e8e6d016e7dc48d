"""NumPy's files without NumPy's trust: lists of arrays are pickles, and a pickle can run any program.

Here a pickle may hold arrays and numbers, and nothing else is ever looked up.
"""

import codecs
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rhhn_fairseq.errors import UsageError

# What NumPy names in a pickled array, by the last part of the module: it has moved between versions.
_FUNCTIONS = {
    ("multiarray", "_reconstruct"): np.zeros(1).__reduce__()[0],
    ("multiarray", "scalar"): np.float64(0).__reduce__()[0],
    ("numeric", "_frombuffer"): np.zeros(1).__reduce_ex__(5)[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
}


class ArrayUnpickler(pickle.Unpickler):
    """Reads arrays of arrays, also those that Python 2 wrote."""

    def __init__(self, file: BinaryIO):
        # Python 2's pickles hold bytes as text, which latin1 maps one to one.
        super().__init__(file, encoding="latin1")

    def find_class(self, module: str, name: str):
        found = _FUNCTIONS.get((module.rpartition(".")[2], name))
        if found is None or module.partition(".")[0] not in ("numpy", "_codecs"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")
        return found


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a .npz file by name, or that of a .npy file under the name "".

    Raises:
        UsageError: the file cannot be read, is damaged, or holds something that is no array.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(6)
            file.seek(0)
            if not start:
                raise UsageError(f"{path}: is empty")
            if start.startswith(b"PK"):
                with zipfile.ZipFile(file) as archive:
                    return {
                        name.removesuffix(".npy"): _read(archive.open(name)) for name in archive.namelist()
                    }
            if start.startswith(b"\x93NUMPY"):
                return {"": _read(file)}
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from error
    # A damaged pickle or header may raise nearly anything while it is read.
    except (Exception, zlib.error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{path}: is damaged or holds something that is no array ({reason})") from error
    raise UsageError(f"{path}: is neither a .npy nor a .npz file")


def _read(file: BinaryIO) -> np.ndarray:
    version = np.lib.format.read_magic(file)
    read_header = (
        np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    )
    shape, fortran, dtype = read_header(file)
    if dtype.hasobject:
        array = ArrayUnpickler(file).load()
        if not isinstance(array, np.ndarray):
            raise ValueError(f"a {type(array).__name__}")
        return array
    count = int(np.prod(shape, dtype=np.int64))
    content = file.read(count * dtype.itemsize)
    if len(content) < count * dtype.itemsize:
        raise EOFError("it ends too early")
    array = np.frombuffer(content, dtype=dtype, count=count)
    return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)
