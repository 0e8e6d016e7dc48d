"""Machines whose own names lead to themselves alone: the address that others reach, and a training of two."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers.cli import HANGS, fairseq_train, json_log, model_of
from helpers.in_process import LOG, char_lm
from helpers.torchrun_script import SCRIPT, environment

from scripts import network


def test_loopback_is_left_to_torchrun():
    name = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    assert network.reach("localhost:7")[1:] == (name, False)
    assert network.reach("127.0.0.1:7") == ("127.0.0.1", name, False)


def sources(monkeypatch, **known):
    """Pretends which address the machine would send from; names lead where Debian lets them."""
    resolved = {"vm": "127.0.1.1", "other": "10.0.0.2"}

    def getaddrinfo(name, port, **options):
        return [(None, None, None, None, (resolved.get(name, name), port))]

    monkeypatch.setattr(network.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(network, "_source", known.get)
    monkeypatch.setattr(network, "_interface", lambda address: f"interface of {address}")


def test_the_address_on_the_way_to_the_endpoint(monkeypatch):
    own, here = "10.0.0.1", "interface of 10.0.0.1"
    sources(monkeypatch, **{"10.0.0.1": own, "10.0.0.2": own, "192.0.2.1": own, "127.0.1.1": "127.0.1.1"})
    with monkeypatch.context() as patch:
        patch.setattr(network, "_answers", lambda address, port: False)
        assert network.reach("10.0.0.1:7") == (own, here, True)
    assert network.reach("10.0.0.2:7") == network.reach("other:7") == (own, here, False)
    # The machine's own name, which leads to itself alone.
    assert network.reach("vm:7") == (own, here, False)
    assert network.reach("10.0.0.3:7") == (None, None, False)


def test_the_second_agent_of_a_machine_is_no_host(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(network, "_is_loopback", lambda address: False)
        assert network.reach(f"127.0.0.1:{server.getsockname()[1]}")[2] is False


NAMES = "rhhn_test_a", "rhhn_test_b"
ADDRESSES = "10.177.0.1", "10.177.0.2"


def ip(*arguments) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_machines():
    """Two network namespaces with a cable between them, in which the machine's name leads to 127.0.1.1."""
    configuration = [Path("/etc/netns") / name for name in NAMES]
    try:
        for name, folder in zip(NAMES, configuration, strict=True):
            ip("netns", "add", name)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
        cable = ["veth0", "netns", NAMES[0], "type", "veth", "peer", "name", "veth0", "netns", NAMES[1]]
        ip("link", "add", *cable)
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "veth0")
            for device in ("lo", "veth0"):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name, folder in zip(NAMES, configuration, strict=True):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def machines():
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2")
    try:
        with two_machines():
            yield
    except (subprocess.CalledProcessError, OSError) as error:
        pytest.skip(f"network namespaces cannot be made here ({error})")


@pytest.mark.slow
@pytest.mark.timeout(HANGS)
def test_two_machines_train_what_one_process_trains(machines, tmp_path):
    end = ["--max-update", 8, *LOG]
    one = fairseq_train(char_lm(tmp_path, tmp_path / "one", *end))
    arguments = ["--nnodes", 2, "--nproc", 1, "--rdzv-endpoint", f"{ADDRESSES[0]}:29400", "--max-restarts", 0]
    arguments += char_lm(tmp_path, tmp_path / "two", *end, "--update-freq", 1)
    agents = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, "bash", str(SCRIPT), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(OMP_NUM_THREADS="1", PYTHON=sys.executable),
            start_new_session=True,
        )
        for name in NAMES
    ]
    try:
        logs = [agent.communicate(timeout=HANGS)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGTERM)
    assert [agent.returncode for agent in agents] == [0, 0], logs
    assert all("distributed init (rank" in log for log in logs)
    assert len(re.findall(r"initialized host .* as rank \d", "".join(logs))) == 2
    expected = [record["loss"] for record in json_log(one.stdout) if record["tag"] == "train_inner"]
    found = [record["loss"] for record in json_log("".join(logs)) if record["tag"] == "train_inner"]
    assert found == expected and len(found) == 8
    for key, value in model_of(tmp_path / "one").items():
        # Two gradients are added in another order; no difference was seen.
        torch.testing.assert_close(model_of(tmp_path / "two")[key], value, rtol=0, atol=1e-6)
