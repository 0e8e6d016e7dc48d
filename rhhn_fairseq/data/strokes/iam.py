"""Reads IAM-OnDB, English lines on a whiteboard by 221 writers (Liwicki and Bunke 2005), from its archives.

These files are read, in a folder and the folders below it, plain or in the archives ``*.tar.gz``, ``*.tgz``,
``*.tar`` and ``*.zip`` there:

- ``lineStrokes/a01/a01-000/a01-000u-01.xml``: the strokes of a line, ``<Point x= y= time=>`` in ``<Stroke>``;
- ``ascii/a01/a01-000/a01-000u.txt``: after ``CSR:``, the text of each line of a form;
- ``trainset.txt``, ``testset_v.txt``, ``testset_t.txt``, ``testset_f.txt`` of the benchmark task: which forms
  are in which set. No writer is in two of them.

Archives with ``original`` or ``lineImages`` in their name are skipped.
"""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree

import numpy as np
from tqdm import tqdm

from rhhn_fairseq.data.common.sources import ARCHIVE_SUFFIXES, archive_members, check_directory
from rhhn_fairseq.data.strokes.points import Line, Loaded, StrokeCorpus, from_strokes
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import read_regular, read_within, readable

PROTOCOLS = {
    "task1": {
        "train": ["trainset"],
        "valid": ["testset_v"],
        "valid_second": ["testset_t"],
        "test": ["testset_f"],
    },
    "graves": {"train": ["trainset", "testset_t", "testset_f"], "valid": ["testset_v"]},
}
"""Which of the benchmark's sets make up each split.

``task1`` keeps them apart; fairseq-train ends where it sees files of a ``valid1`` that are not combined.
``graves`` trains on all but the smaller validation set (Graves 2013, section 4.2), so it has no test split.
"""

SETS = ("trainset", "testset_v", "testset_t", "testset_f")

LARGEST = 1 << 26
"""The most bytes that a file may have; those of IAM-OnDB have some hundred thousand at most."""

# A line's strokes, a form's text, and the sets.
_WANTED = re.compile(rf"\w+-\w+-\d+\.xml|\w+-\w+\.txt|({'|'.join(SETS)})\.txt")
_LEFT_ALONE = re.compile("original|lineimages", re.IGNORECASE)


def iam(from_dir: Path, protocol: str = "task1") -> StrokeCorpus:
    """Returns the lines of IAM-OnDB in the splits that ``protocol`` names."""
    return StrokeCorpus(
        "iam",
        f"IAM-OnDB, line strokes, {protocol} split",
        {"protocol": protocol},
        lambda: _load(Path(from_dir), PROTOCOLS[protocol]),
    )


def _load(from_dir: Path, protocol: dict[str, list[str]]) -> Loaded:
    strokes: dict[str, np.ndarray] = {}
    texts: dict[str, list[str]] = {}
    sets: dict[str, list[str]] = {}
    seen: dict[str, dict[str, str]] = {kind: {} for kind in ("lineStrokes", "ascii", *SETS)}
    sizes = dict.fromkeys(seen, 0)
    for place, content in tqdm(_files(from_dir), desc=f"reading {from_dir}", unit="file", disable=None):
        file = PurePosixPath(place).name
        name, _, suffix = file.partition(".")
        kind = name if name in SETS else "ascii" if suffix == "txt" else "lineStrokes"
        seen[kind][file] = hashlib.sha256(content).hexdigest()
        sizes[kind] += len(content)
        if kind in SETS:
            sets[name] = content.decode("latin-1").split()
        elif kind == "ascii":
            texts[name] = _transcripts(content)
        else:
            strokes[name] = _points(content, place)
    missing = [f"{name}.txt" for name in SETS if name not in sets]
    if not strokes or missing:
        raise UsageError(
            f"--from-dir {from_dir}: has no {', '.join(missing) if strokes else 'lineStrokes'}; expected are "
            "lineStrokes-all.tar.gz, ascii-all.tar.gz and task1.tar.gz, or their contents"
        )
    splits, notes = _assign(strokes, texts, sets, protocol)
    inputs = []
    for kind in filter(seen.get, seen):
        # Independent of the files' order and packing.
        listing = "".join(f"{seen[kind][name]}  {name}\n" for name in sorted(seen[kind]))
        sha256 = hashlib.sha256(listing.encode()).hexdigest()
        inputs.append({"name": kind, "files": len(seen[kind]), "bytes": sizes[kind], "sha256": sha256})
    return Loaded(splits, inputs, notes)


def _assign(strokes, texts, sets, protocol) -> tuple[dict[str, list[Line]], dict[str, int]]:
    """Returns the lines of each split, in the order of their names, and the notes."""
    by_form: dict[str, list[str]] = {}
    for name in sorted(strokes):
        by_form.setdefault(name.rpartition("-")[0], []).append(name)
    splits: dict[str, list[Line]] = {}
    used, without_text, without_lines = set(), 0, 0
    for split, set_names in protocol.items():
        # A set may name whole forms or single lines.
        selected: set[str] = set()
        for entry in (entry for set_name in set_names for entry in sets[set_name]):
            line_names = by_form.get(entry, [entry] if entry in strokes else [])
            without_lines += not line_names
            selected.update(line_names)
        doubled = sorted(selected & used)
        if doubled:
            raise UsageError(f"{doubled[0]}: is in two of the benchmark's sets, which have no line in common")
        used |= selected
        splits[split] = []
        for name in sorted(selected):
            form, _, number = name.rpartition("-")
            lines = texts.get(form, [])
            text = lines[int(number) - 1] if 0 < int(number) <= len(lines) else None
            without_text += text is None
            splits[split].append(Line(name, strokes[name], text))
    notes = {
        "lines in no set": len(strokes) - len(used),
        "entries of sets without a line": without_lines,
        "lines without a text": without_text,
    }
    return splits, notes


def _points(content: bytes, place: str) -> np.ndarray:
    """Returns the points of a line's XML, y downwards as on the whiteboard."""
    try:
        root = ElementTree.fromstring(content)
    # The last two come from encodings that Python does not know or the parser does not accept.
    except (ElementTree.ParseError, LookupError, ValueError) as error:
        raise UsageError(f"{place}: is not well-formed XML ({error})") from error
    strokes_element = root.find("StrokeSet")
    if strokes_element is None:
        raise UsageError(f"{place}: has no StrokeSet, so it is not a line of IAM-OnDB")
    strokes: list[list[tuple[float, float]]] = []
    # Every element once, whatever is nested in what.
    for element in strokes_element.iter():
        if element.tag == "Stroke":
            strokes.append([])
        elif element.tag == "Point" and strokes:
            try:
                strokes[-1].append((float(element.get("x")), float(element.get("y"))))
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"{place}: a point of stroke {len(strokes)} has no number for x or y"
                ) from error
    return from_strokes([np.array(stroke, dtype=np.float64).reshape(-1, 2) for stroke in strokes], place)


def _transcripts(content: bytes) -> list[str]:
    """Returns the texts of a form's lines, after the heading CSR: (corrected by hand, as OCR: is not)."""
    text = content.decode("latin-1").replace("\r", "\n")
    # In some files a row of percent signs marks the end of a line.
    lines = [line.strip() for line in re.sub("%{5,}", "\n", text).split("\n")]
    if "CSR:" not in lines:
        return []
    return [line for line in lines[lines.index("CSR:") + 1 :] if line]


def _files(from_dir: Path) -> Iterator[tuple[str, bytes]]:
    """Yields place and content of every file that is wanted, below a folder and then in its archives.

    A file that occurs twice, because an archive was unpacked beside itself, is yielded once.
    """
    check_directory(from_dir)
    paths = sorted(path for path in from_dir.rglob("*") if path.is_file())
    seen: set[str] = set()

    def wanted(name: str) -> bool:
        new = bool(_WANTED.fullmatch(name)) and name not in seen
        seen.add(name)
        return new

    for path in paths:
        if wanted(path.name):
            yield path.as_posix(), read_regular(path, LARGEST)
    for path in paths:
        if path.name.endswith(ARCHIVE_SUFFIXES) and not _LEFT_ALONE.search(path.name):
            with readable(str(path)):
                for name, open_member in archive_members(path):
                    if wanted(PurePosixPath(name).name):
                        place = f"{path.as_posix()}:{name}"
                        with open_member() as file:
                            yield place, read_within(file, LARGEST, place)
