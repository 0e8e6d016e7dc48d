"""MNIST's files: reading them, finding and downloading them, and dealing them to the splits."""

import functools
import gzip
import hashlib
import http.server
import threading

import numpy as np
import pytest
from helpers.idx_files import idx_bytes, make_images, write_mnist

from rhhn_fairseq.data.problems import images as module
from rhhn_fairseq.data.problems.images import PUBLISHED, T10K_SPLIT, PixelSequences, load_mnist
from rhhn_fairseq.data.problems.registry import build_problem
from rhhn_fairseq.errors import UsageError

GOOD = idx_bytes(make_images(10, seed=1)[0])
PACKED = gzip.compress(GOOD, mtime=0)
BAD = {
    "labels": ("", idx_bytes(make_images(10)[1]), "is cut off, or no IDX file of 3 dimensions"),
    "huge": ("", bytes((0, 0, 8, 3)) + b"\xff" * 12 + b"abc", "is cut off, or no IDX file"),
    "packed truncated": (".gz", PACKED[:-12], "is cut off or damaged"),
    "of another number": ("", idx_bytes(make_images(9)[0]), "labels do not belong to the images"),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_files_are_one_line_with_the_name(tmp_path, case):
    suffix, data, reason = BAD[case]
    write_mnist(tmp_path, train=0)
    path = tmp_path / "t10k-images-idx3-ubyte"
    path.unlink()
    path.with_name(path.name + suffix).write_bytes(data)
    with pytest.raises(UsageError, match=reason) as caught:
        load_mnist(tmp_path, tmp_path, "t10k:6/2/2")
    assert "t10k" in str(caught.value) and "\n" not in str(caught.value)


def test_splits_are_parsed(tmp_path):
    for text in ("5/2", "0/1/1", "train:5/2/3", "5/2/x"):
        with pytest.raises(UsageError, match="TRAIN/VALID/TEST"):
            load_mnist(tmp_path, tmp_path, text)


@pytest.mark.parametrize("packed", [False, True])
def test_standard_split_is_both_ends_of_the_training_file_and_the_test_file(tmp_path, packed):
    write_mnist(tmp_path, packed=packed)
    splits = load_mnist(tmp_path, tmp_path / "unused", "12/5/7")
    train, train_labels = make_images(20, seed=0)
    test, labels = make_images(10, seed=1)
    assert (splits["train"][0] == train[:12]).all() and (splits["valid"][0] == train[15:]).all()
    assert (splits["train"][1] == train_labels[:12]).all() and (splits["valid"][1] == train_labels[15:]).all()
    assert (splits["test"][0] == test[:7]).all() and (splits["test"][1] == labels[:7]).all()
    assert not (tmp_path / "unused").exists(), "nothing is downloaded or written"


def test_t10k_split_deals_every_image_to_one_split(tmp_path):
    write_mnist(tmp_path, train=0)
    splits = load_mnist(tmp_path, tmp_path, "t10k:6/2/2")
    images, labels = make_images(10, seed=1)
    numbers = [splits[name][0][:, 0, 0].tolist() for name in ("train", "valid", "test")]
    assert [len(part) for part in numbers] == [6, 2, 2]
    # The order of earlier versions, on which figures were measured.
    assert numbers == [[8, 6, 1, 0, 2, 7], [9, 5], [3, 4]]
    for name in splits:
        assert (splits[name][1] == labels[splits[name][0][:, 0, 0]]).all(), "labels go with their images"
    fewer = load_mnist(tmp_path, tmp_path, "t10k:5/1/2")
    assert [fewer[name][0][:, 0, 0].tolist() for name in splits] == [[8, 6, 1, 0, 2], [7], [9, 5]]


def test_names_with_a_dot_are_found(tmp_path):
    write_mnist(tmp_path, train=0)
    for path in list(tmp_path.iterdir()):
        path.rename(path.with_name(path.name.replace("-idx", ".idx")))
    assert len(load_mnist(tmp_path, tmp_path, "t10k:6/2/2")["train"][0]) == 6


def test_splits_that_are_too_large_are_refused(tmp_path):
    with pytest.raises(UsageError, match="--mnist-split 16/5/1 takes 21 images of a file that holds 20"):
        load_mnist(write_mnist(tmp_path), tmp_path, "16/5/1")


def test_labels_and_sizes_that_are_not_digits(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.full(10, 11)))
    with pytest.raises(UsageError, match="the t10k files of MNIST: .* no digits"):
        load_mnist(tmp_path, tmp_path, "t10k:6/2/2")
    write_mnist(tmp_path)
    images, _ = make_images(10, rows=5)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(images))
    with pytest.raises(UsageError, match=r"training images \(4, 3\) and test images \(5, 3\) differ"):
        load_mnist(tmp_path, tmp_path, "12/5/7")


def test_pixels_are_read_row_by_row_or_permuted(tmp_path):
    write_mnist(tmp_path)
    options = {"mnist_dir": str(tmp_path), "mnist_split": "12/5/7"}
    plain = build_problem("mnist", options)
    images, labels = make_images(20, seed=0)
    inputs, targets = plain.render(plain.splits["train"])
    assert plain.steps == 12 and (targets == labels[:12]).all()
    np.testing.assert_array_equal(inputs[..., 0], images[:12].reshape(12, 12).astype(np.float32) / 255)
    permuted = build_problem("pmnist", options | {"permutation_seed": 3})
    mixed, _ = permuted.render(permuted.splits["train"])
    assert (mixed == inputs[:, permuted.order]).all() and not (mixed == inputs).all()
    default = build_problem("pmnist", options)
    assert (default.order == build_problem("pmnist", options | {"permutation_seed": 0}).order).all()
    assert isinstance(default, PixelSequences) and default.name == "pmnist"


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves the files of ``folder`` and counts what was asked for."""

    def do_GET(self):  # noqa: N802 (the name is http.server's)
        self.asked.append(self.path)
        path = self.folder / self.path.rpartition("/")[2]
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        """Keep the test's output clean."""


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of small files in place of the real one; the handler's class."""

    class Serving(Handler):
        folder, asked = write_mnist(tmp_path / "served", packed=True), []

    published = {
        path.name.removesuffix(".gz"): hashlib.md5(gzip.decompress(path.read_bytes())).hexdigest()
        for path in Serving.folder.iterdir()
    }
    assert published.keys() == PUBLISHED.keys()
    http_server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Serving)
    thread = threading.Thread(target=functools.partial(http_server.serve_forever, 0.01))
    thread.start()
    monkeypatch.setattr(module, "URL", f"http://127.0.0.1:{http_server.server_port}/mnist/")
    monkeypatch.setattr(module, "PUBLISHED", published)
    yield Serving
    http_server.shutdown()
    http_server.server_close()
    thread.join()


def test_files_are_downloaded_once(server, tmp_path):
    cache = tmp_path / "cache" / "mnist"
    for _ in range(2):
        splits = load_mnist(None, cache, "12/5/7")
        assert (splits["test"][0] == make_images(10, seed=1)[0][:7]).all()
    assert len(server.asked) == 4
    assert sorted(path.name for path in cache.glob("*ubyte*")) == sorted(f"{name}.gz" for name in PUBLISHED)


def test_only_what_is_needed_is_downloaded(server, tmp_path):
    load_mnist(None, tmp_path / "cache", "t10k:6/2/2")
    assert sorted(server.asked) == [f"/mnist/t10k-{name}-ubyte.gz" for name in ("images-idx3", "labels-idx1")]


@pytest.mark.parametrize(
    "data, reason",
    [(gzip.compress(b"!", mtime=0), "MD5 is .* not"), (b"<html>", "is not a gzip file, and is removed")],
)
def test_a_download_of_something_else_is_removed(server, tmp_path, data, reason):
    (server.folder / "t10k-images-idx3-ubyte.gz").write_bytes(data)
    with pytest.raises(UsageError, match=reason):
        load_mnist(None, tmp_path / "cache", "t10k:6/2/2")
    assert not list((tmp_path / "cache").glob("*ubyte*"))


def test_the_published_test_images(data_dir):
    directory = data_dir / "mnist"
    for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        unpacked = gzip.decompress((directory / f"{name}.gz").read_bytes())
        assert hashlib.md5(unpacked).hexdigest() == PUBLISHED[name]
    problem = build_problem("mnist", {"mnist_dir": str(directory), "mnist_split": T10K_SPLIT})
    assert problem.steps == 784
    assert [len(problem.splits[name][1]) for name in ("train", "valid", "test")] == [8000, 1000, 1000]
    for _, labels in problem.splits.values():
        assert np.bincount(labels, minlength=10).min() > 0.07 * len(labels), "every digit is in every split"
