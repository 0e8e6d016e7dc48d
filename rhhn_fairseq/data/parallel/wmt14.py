"""WMT 2014, English to French: five corpora to train on, newstest2012 and 2013 to validate, 2014 to test."""

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rhhn_fairseq.data.common.download import download
from rhhn_fairseq.data.common.manifest import describe_file
from rhhn_fairseq.data.common.sources import FileSource, archive_members
from rhhn_fairseq.data.parallel.corpora import Corpus, TextPairs
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.files import readable, replace_file

SERVER = "http://www.statmt.org/"


@dataclass(frozen=True)
class Archive:
    """An archive of the shared task.

    path: below ``SERVER``. members: the English and the French file in it. sha256: as published.
    """

    path: str
    members: tuple[str, ...] = ()
    sha256: str | None = None


# SHA-256 as in tensorflow/datasets, tensorflow_datasets/url_checksums/wmt14_translate.txt
# (europarl, commoncrawl, news-commentary) and wmt15_translate.txt (un, giga), for the same addresses.
TRAINING = {
    "europarl": Archive(
        "wmt13/training-parallel-europarl-v7.tgz",
        ("europarl-v7.fr-en.en", "europarl-v7.fr-en.fr"),
        "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
    ),
    "commoncrawl": Archive(
        "wmt13/training-parallel-commoncrawl.tgz",
        ("commoncrawl.fr-en.en", "commoncrawl.fr-en.fr"),
        "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
    ),
    "un": Archive(
        "wmt13/training-parallel-un.tgz",
        ("undoc.2000.fr-en.en", "undoc.2000.fr-en.fr"),
        "29141b5c1eba149a94f7a59d3b1a834b2e47fe0f8758d68dcd77a3d3f497ee47",
    ),
    "news-commentary": Archive(
        "wmt14/training-parallel-nc-v9.tgz",
        ("news-commentary-v9.fr-en.en", "news-commentary-v9.fr-en.fr"),
        "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
    ),
    "giga": Archive(
        "wmt10/training-giga-fren.tar",
        ("giga-fren.release2.fixed.en.gz", "giga-fren.release2.fixed.fr.gz"),
        "3ff8319f6919393520559bfbc7ad6a747ec81b3abc7be9993b338d4b017b4d9a",
    ),
}
"""The training archives by the names that ``--parts`` takes."""

_DEV = Archive("wmt14/dev.tgz")
_TEST = Archive("wmt14/test-full.tgz", ("newstest2014-fren-src.en.sgm", "newstest2014-fren-ref.fr.sgm"))
# The text is there plain and as SGML; either will do.
_DEV_MEMBERS = (
    ("newstest{year}.en", "newstest{year}.fr"),
    ("newstest{year}-src.en.sgm", "newstest{year}-ref.fr.sgm"),
)


def wmt14(corpora: Sequence[str], from_dir: Path | None, download_dir: Path, verify: bool) -> Corpus:
    """Returns the corpus with the training archives named in ``corpora``.

    from_dir: where the archives are; without it they are downloaded to ``download_dir``.
    verify: compare the archives with published checksums; if none is published, with the checksum
        that was recorded beside the archive when it was first downloaded.

    Raises UsageError for an unknown or repeated name, and for an archive that is missing, cannot be
    downloaded or does not match its checksum.
    """
    if unknown := sorted(set(corpora).difference(TRAINING)):
        raise UsageError(f"--parts {unknown[0]}: choose from {', '.join(TRAINING)}")
    if len(set(corpora)) < len(corpora):
        raise UsageError(f"--parts {' '.join(corpora)}: names a part twice")
    shelf = _Shelf(from_dir, download_dir, verify)
    valid = []
    dev = shelf.fetch(_DEV)
    with readable(str(dev)):
        present = {PurePosixPath(name).name for name, _ in archive_members(dev)}
    for year in (2012, 2013):
        choices = [tuple(name.format(year=year) for name in pair) for pair in _DEV_MEMBERS]
        # If neither is there, reading the first says so.
        members = next((pair for pair in choices if present.issuperset(pair)), choices[0])
        valid.append(_pairs(f"newstest{year}", dev, members))
    test = _pairs("newstest2014", shelf.fetch(_TEST), _TEST.members)
    train = [_pairs(name, shelf.fetch(TRAINING[name]), TRAINING[name].members) for name in corpora]
    return Corpus(
        "wmt14-en-fr",
        "en",
        "fr",
        tuple(train),
        tuple(valid),
        (test,),
        options={"parts": list(corpora)},
        known_files=shelf.files,
    )


def _pairs(name: str, path: Path, members: tuple[str, str]) -> TextPairs:
    kind = Sgml if members[0].endswith(".sgm") else FileSource
    return TextPairs(name, tuple(kind(path, member) for member in members))


class Sgml(FileSource):
    """An SGML document in an archive: the text of each <seg> is a line, with entities such as &amp; resolved.

    Bytes that are not UTF-8 stay as they are.
    """

    def chunks(self) -> Iterator[bytes]:
        """Yields the lines."""
        text = b"".join(super().chunks()).decode("utf-8", "surrogateescape")
        for segment in re.findall(r"<seg\b[^>]*>(.*?)</seg>", text, re.DOTALL | re.IGNORECASE):
            line = " ".join(html.unescape(segment).split())
            yield f"{line}\n".encode("utf-8", "surrogateescape")


class _Shelf:
    """The archives on this machine. files: size and SHA-256 of those that were fetched."""

    def __init__(self, from_dir: Path | None, download_dir: Path, verify: bool):
        self.files: dict[Path, dict] = {}
        self._from_dir = from_dir
        self._download_dir = download_dir
        self._verify = verify

    def fetch(self, archive: Archive) -> Path:
        """Returns the path of an archive, downloaded if needed, and compared with its checksum."""
        if self._from_dir is None:
            path = download(SERVER + archive.path, self._download_dir)
        else:
            path = Path(self._from_dir) / PurePosixPath(archive.path).name
            if not path.is_file():
                raise UsageError(f"{path}: no such file; it is at {SERVER}{archive.path}")
        actual = describe_file(path)
        self.files[path] = actual
        if self._verify:
            self._check(path, archive, actual)
        return path

    def _check(self, path: Path, archive: Archive, actual: dict) -> None:
        record = path.with_name(path.name + ".sha256")
        expected = archive.sha256
        if not expected and record.is_file():
            expected = record.read_text(encoding="utf-8").partition(" ")[0]
        elif not expected and self._from_dir is None:
            with replace_file(record, follow=False) as file:
                # In the format of sha256sum, which can check it as well.
                file.write(f"{actual['sha256']}  {path.name}\n".encode())
        if expected and actual["sha256"] != expected:
            raise UsageError(
                f"{path}: expected SHA-256 {expected}, found {actual['sha256']}; "
                "remove the file and fetch it again, or pass --no-verify to accept it"
            )
