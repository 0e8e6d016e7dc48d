"""Options, markers and fixtures for all tests."""

import gc
import os
import signal
from pathlib import Path

import pytest
import torch
from helpers import settings
from helpers.cli import UNREAD, preprocess
from omegaconf import OmegaConf

from rhhn_fairseq.ops import backends, policy
from rhhn_fairseq.ops.matmul import gemm

# The tests' tensors are small, and threads that wait for each other cost more than they bring.
torch.set_num_threads(1)
# A shell that starts the tests in the background tells them, and all that they start, to ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = (
    "test_imitated_gpu.py",
    "test_char_lm_cli.py",
    "test_triton.py",
    "test_gnmt_cli.py",
    "test_hostile.py",
)
"""Files of tests that take minutes. They run first, so that no process is left alone with one at the end."""


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        # Skipping thousands takes longer than leaving them out.
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


def pytest_collection_finish():
    """Leaves what is loaded by then, millions of objects, out of every later collection of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def settings_of_each_test(monkeypatch):
    """The environment is read anew at every pass, and nothing is remembered from other tests.

    A variable that a test leaves would make every later command of the process a new one in place of a fork,
    which takes seconds more.
    """
    before = set(os.environ)
    monkeypatch.setattr(policy, "in_force", None)
    monkeypatch.setattr(policy, "current", settings.current)
    for remembered in (backends._select, backends._log_once, gemm.preferred):
        remembered.cache_clear()
    yield
    for name in os.environ.keys() - before - UNREAD:
        del os.environ[name]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with the real corpora, named by RHHN_DATA_DIR."""
    if not os.environ.get("RHHN_DATA_DIR"):
        pytest.skip("RHHN_DATA_DIR names no folder with the corpora")
    return Path(os.environ["RHHN_DATA_DIR"])


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory) -> Path:
    """A few sentences in fairseq's binary format, made by fairseq-preprocess."""
    return preprocess(tmp_path_factory.mktemp("tiny_corpus"))


@pytest.fixture
def worker(monkeypatch):
    """The environment of worker 3 of 4, the second on its node, and a configuration."""
    values = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "4", "RANK": "3"}
    for name, value in {**values, "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    return OmegaConf.create(
        {
            "common": {"cpu": False, "bf16": False, "tpu": False},
            "distributed_training": {
                "distributed_world_size": 1,
                "distributed_rank": 0,
                "distributed_backend": "nccl",
                "distributed_init_method": None,
                "distributed_no_spawn": False,
                "device_id": 0,
                "pipeline_model_parallel": False,
                "tpu": "${common.tpu}",
            },
        }
    )
