"""The page to play with: what its streams say, what the server refuses, and the page in a browser."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest
import torch
from helpers.browser import opened_page
from helpers.tiny_char_lm import build_model, build_task, write_corpus
from helpers.tiny_char_lm import save as save_characters
from helpers.tiny_handwriting import build as build_strokes
from helpers.tiny_handwriting import save as save_strokes
from helpers.tiny_reader import build as build_characters
from starlette.testclient import TestClient

from rhhn_fairseq import nn
from rhhn_fairseq.cli import demo
from rhhn_fairseq.data.strokes.points import Line, from_strokes
from rhhn_fairseq.data.strokes.stroke3 import read_line
from rhhn_fairseq.demo import server
from rhhn_fairseq.demo.streams import Models, line_rows, measure, text_rows
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.generate.characters import SamplingConfig, generate
from rhhn_fairseq.generate.strokes import WritingConfig
from rhhn_fairseq.generate.strokes import write as write_lines
from rhhn_fairseq.inspection.weights import read_text
from rhhn_fairseq.models.handwriting import HandwritingConfig

ADDRESS = "http://127.0.0.1:8000"
TEXT = {"prompt": "def ", "length": 20, "temperature": 0.5, "seed": 4}
LINE = {"text": "hi", "bias": 0.5, "temperature": 1.0, "seed": 2}
DRAWINGS = {"bias": 0.5, "temperature": 1.0, "seed": 2, "count": 2, "points": 30}


@pytest.fixture(scope="module")
def models() -> Models:
    return demo.load_models([], None)


@pytest.fixture(scope="module")
def app(models):
    return server.make_app(models)


@pytest.fixture
def client(app) -> TestClient:
    return TestClient(app, base_url=ADDRESS)


def rows_of(response) -> list[dict]:
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_the_page_runs_its_own_script_only(client):
    response = client.get("/")
    page, policy = response.text, response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe-eval" not in policy
    assert not re.search(r"(?:src|href)=\"(?!data:,)|https?://(?!www\.w3\.org/2000/svg)|@import|url\(", page)
    about = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert about["text"]["names"] == about["line"]["names"] == list("ifgo")
    assert about["text"]["prompt"] == "def " and about["line"]["text"] == "hello world"
    assert about["text"]["limit"] > 0 and about["line"]["limit"] > 0 and about["line"]["width"] > 1


def test_the_text_is_that_of_sampling_and_its_changes_those_of_reading(client, models):
    rows = rows_of(client.post("/text", json=TEXT))
    prompt = [row["symbol"] for row in rows if row["given"]]
    assert "".join(prompt) == "def " and len(rows) == 24 and not rows[4]["given"]
    vocabulary = models.vocabulary
    entries = [vocabulary.encode("\n")[0], *vocabulary.encode("def ")]
    drawn = generate(models.characters, entries, SamplingConfig(0.5, seed=4))
    entries += [next(drawn)[0] for _ in range(20)]
    reading = read_text(models.characters, vocabulary, entries)
    assert tuple(row["symbol"] for row in rows) == reading.symbols
    # Rows have five digits. The first change is that from the zero state, which both leave out.
    changes = np.array([row["changes"] for row in rows])
    np.testing.assert_allclose(changes, reading.changes, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose([row["probability"] for row in rows], reading.probabilities, rtol=1e-4)
    assert rows_of(client.post("/text", json=TEXT)) == rows


def test_the_line_is_that_of_writing(client, models):
    *rows, last = rows_of(client.post("/line", json=LINE))
    (line,) = write_lines(models.handwriting, WritingConfig(lines=1, bias=0.5, seed=2), ["hi"])
    # The last stroke belongs to a word that nobody asked for, and is not drawn.
    assert last == {"stub": len(rows) - len(line.points), "finished": True}
    found = np.array([[row["dx"], row["dy"], row["pen"]] for row in rows])
    count = len(line.points)
    np.testing.assert_allclose(found[: count - 1], line.points[:-1], rtol=1e-4, atol=1e-4)
    change = np.sqrt(np.square(line.changes).mean(axis=1))
    np.testing.assert_allclose([row["change"] for row in rows[:count]], change, rtol=1e-4)


STROKES = [[[5, 5], [5, 20]], [[5.5, 12], [9, 11], [10, 20]]]


def test_a_drawn_line_is_read_before_writing(client, models):
    fields = LINE | {"prime": STROKES, "prime_text": "h "}
    rows = rows_of(client.post("/line", json=fields))[:-1]
    prime = Line("drawing", from_strokes(STROKES, "drawing"), "h")
    (line,) = write_lines(models.handwriting, WritingConfig(lines=1, bias=0.5, seed=2), ["hi"], prime)
    found = np.array([[row["dx"], row["dy"], row["pen"]] for row in rows])
    np.testing.assert_allclose(found[:5], prime.points, rtol=1e-4, atol=1e-4)
    count = len(line.points) - 1
    assert count > 20
    np.testing.assert_allclose(found[:count], line.points[:-1], rtol=1e-4, atol=1e-4)


def test_drawings_are_those_of_writing_one_after_another(client, models):
    rows = rows_of(client.post("/drawings", json=DRAWINGS))
    lines = write_lines(models.kanji, WritingConfig(lines=2, points=30, bias=0.5, seed=2))
    ends = [number for number, row in enumerate(rows) if "stub" in row]
    assert ends == [31, 63] and all(rows[end]["finished"] for end in ends)
    for line, drawn in zip(lines, (rows[:31], rows[32:63]), strict=True):
        found = np.array([[row["dx"], row["dy"], row["pen"]] for row in drawn])
        np.testing.assert_allclose(found[:-1], line.points[:-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("path", "fields", "line"),
    [
        ("drawings", {"count": 13}, "count: expected a whole number from 1 to 12"),
        ("text", {"prompt": "é"}, "the prompt has symbols the model does not know: ['é']"),
        ("text", {"prompt": "a" * 501}, "the prompt may have 500 characters"),
        ("text", {"temperature": float("nan")}, "temperature: expected a number from 0 to 2"),
        ("line", {"prime": [[[1, 2], [3]]]}, "the drawing: expected strokes, lists of pairs of numbers"),
        ("line", {"prime": [[[1, 1e999]]]}, "the drawing: point 0 is not finite"),
        ("line", {"prime": [[[1, 2]] * 901]}, "the drawing may have 900 points"),
        ("line", {"prime": STROKES}, "the drawing: has no text, but a model with a window"),
        ("line", {"prime": STROKES, "prime_text": "ü"}, "the drawing: contains 'ü'"),
        ("line", {"text": "hü"}, "the model cannot write 'ü', only "),
    ],
)
def test_mistakes_are_one_row(client, path, fields, line):
    sent = json.dumps({"text": TEXT, "line": LINE, "drawings": DRAWINGS}[path] | fields)
    response = client.post(f"/{path}", content=sent, headers={"Content-Type": "application/json"})
    (row,) = rows_of(response)
    assert row.keys() == {"error"} and row["error"].startswith(line) and "\n" not in row["error"]


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"Host": "evil.example:8000"}, None, 400),
        ({"Origin": "http://evil.example"}, None, 403),
        # Another server on this machine.
        ({"Origin": "http://127.0.0.1:9000"}, None, 403),
        ({"Content-Type": "text/plain"}, None, 415),
        ({}, b"{", 400),
        ({}, b" " * 20000, 413),
    ],
)
def test_requests_of_other_pages_are_refused(client, headers, content, status):
    content = json.dumps(TEXT).encode() if content is None else content
    headers = {"Content-Type": "application/json", "Origin": ADDRESS} | headers
    response = client.post("/text", content=content, headers=headers)
    assert response.status_code == status and "access-control-allow-origin" not in response.headers


def test_hosts_and_methods(client):
    assert client.get("/", headers={"Host": "rebound.example"}).status_code == 400
    assert client.get("/", headers={"Host": "localhost:8000"}).status_code == 200
    assert client.get("/text").status_code == 405
    assert client.get("/nowhere").status_code == 404


def test_requests_are_answered_in_turn_and_a_reader_that_leaves_ends_its_own():
    log = []

    def rows(name):
        for number in range(3):
            log.append(name)
            yield {"number": number}

    async def ask():
        turn = asyncio.Lock()
        first, second = (server.in_turn(turn, lambda name=name: rows(name)) for name in "ab")
        assert await anext(first) == {"number": 0}
        assert await anext(second) == {"waiting": True}
        await first.aclose()
        return [row async for row in second]

    assert asyncio.run(ask()) == [{"number": number} for number in range(3)]
    assert log == ["a", "b", "b", "b"]


def test_models_whose_weights_do_not_change():
    models = Models(*build_characters("lstm"), build_strokes("lstm", 2), build_strokes("lstm"))
    about = measure(models)
    assert about["text"]["names"] == [] and about["line"]["names"] == about["drawings"]["names"] == ()
    assert about["text"]["prompt"] == "" and about["line"]["text"] == "abcdeh"
    assert [row["changes"] for row in text_rows(models, "ab", 3, SamplingConfig())] == [[]] * 5
    models.handwriting.symbol_codes.copy_(torch.tensor(list(map(ord, " 012345"))))
    assert measure(models)["line"]["text"] == "012345"
    for model, text in ((models.handwriting, "01"), (models.kanji, None)):
        *rows, last = line_rows(model, text, WritingConfig(points=7))
        assert len(rows) == 8 and {row["change"] for row in rows} == {0.0}
        assert last["finished"] == (text is None)


def test_checkpoints_take_the_place_of_the_packages_models(models, tmp_path):
    kinds = ["handwriting", "characters", "kanji"]
    paths = [str(nn.packaged(name)) for name in kinds]
    assert [demo.kind_of(path) for path in paths] == kinds
    loaded = demo.load_models(paths, None)
    for kind in kinds:
        pairs = zip(getattr(loaded, kind).parameters(), getattr(models, kind).parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(UsageError, match="is of a model of handwriting, as .*handwriting is"):
        demo.load_models(paths[:1] * 2, None)
    nn.LSTM(3, 4).save_pretrained(tmp_path / "layer")
    with pytest.raises(UsageError, match="layer holds LSTM, not CharacterNetwork"):
        demo.load_models([str(tmp_path / "layer")], None)
    with pytest.raises(UsageError, match="--data goes with a --checkpoint of a language model"):
        demo.load_models([], "data-bin/ptb")


def test_checkpoints_of_fairseq(tmp_path):
    corpus = write_corpus(tmp_path)
    model = build_model(build_task(corpus))
    save_characters(model, corpus, tmp_path / "characters.pt")
    config = HandwritingConfig(cell="lstm", hidden_size=8, mixtures=2)
    save_strokes(build_strokes("lstm"), config, tmp_path / "strokes.pt")
    models = demo.load_models([str(tmp_path / "strokes.pt"), str(tmp_path / "characters.pt")], None)
    for own, other in ((models.characters, model), (models.kanji, build_strokes("lstm"))):
        assert all(torch.equal(a, b) for a, b in zip(own.parameters(), other.parameters(), strict=True))
    assert measure(models)["text"]["names"] == list("ifgo")


@pytest.fixture
def address(models, request, monkeypatch):
    """A server in a thread, as the command runs it. An application belongs to one event loop."""
    monkeypatch.setattr(server, "ARRIVAL", getattr(request, "param", server.ARRIVAL))
    with demo.bind(0) as listener:
        running = server.make_server(server.make_app(models))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        while not running.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        running.should_exit = True
        thread.join()


HALF_A_REQUEST = b"POST /text HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("ending", [b"Content-", b"Content-Length: 9\r\n\r\n{"], ids=["head", "body"])
@pytest.mark.parametrize("address", [0.5], indirect=True)
def test_requests_that_do_not_arrive_are_given_up_and_block_no_other(address, ending, capfd):
    place = ("127.0.0.1", int(address.rpartition(":")[2]))
    waiting = [socket.create_connection(place, timeout=60) for _ in range(100)]
    # The last connection is silent after an answer.
    waiting[-1].sendall(b"GET /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    answer = b""
    while not answer.endswith(b"Not Found"):
        answer += waiting[-1].recv(1000)
    for one in waiting:
        one.sendall(HALF_A_REQUEST + ending)
    with urllib.request.urlopen(address, timeout=30) as page:
        assert page.status == 200
    for one in waiting:
        with one:
            assert one.recv(1000) == b""
    assert capfd.readouterr().err == ""


def test_a_reader_that_stands_still_blocks_no_other():
    async def ask():
        turn = asyncio.Lock()
        first = server.in_turn(turn, lambda: iter([{"number": 0}, {"number": 1}]))
        assert await anext(first) == {"number": 0}
        second = server.in_turn(turn, lambda: iter([{"number": 2}]))
        async with asyncio.timeout(30):
            return [row async for row in second if "number" in row]

    assert asyncio.run(ask()) == [{"number": 2}]


@pytest.mark.slow
def test_the_command_serves_until_ctrl_c():
    command = [sys.executable, "-m", "rhhn_fairseq", "demo", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().split()[0]
        with urllib.request.urlopen(address) as page:
            assert b"<title>Weights that change</title>" in page.read()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1100])
def test_the_page_in_a_browser(address, width, tmp_path):
    with opened_page(address, width) as page:
        page.fill("#text [name=length]", "40")
        page.click("#text button.first")
        page.locator("#text .status", has_text="40 characters.").wait_for()
        assert page.inner_text("#text-result").replace("\n", "").startswith("def get_context")
        assert page.locator("#text-result span").count() == 44
        page.hover("#text-result span[data-number='4']")
        assert page.inner_text("#text .readout").startswith("Character 5 of 44: g, probability 13.6 %")
        page.focus("#text-result")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#text .readout").startswith("Character 6 of 44: e")

        # With the keyboard alone, from the field to the button. So long a line takes many seconds.
        page.fill("#line [name=text]", "the quick brown fox jumps over the lazy dog")
        page.press("#line [name=text]", "Enter")
        page.press("#line [name=pause]", "Enter")
        assert page.inner_text("#line .status") == "Paused."
        drawn = page.locator("#line-result path").count()
        page.wait_for_timeout(200)
        assert page.locator("#line-result path").count() == drawn
        page.press("#line [name=pause]", "Space")
        page.locator("#line-result path").nth(drawn).wait_for(state="attached")
        page.fill("#line [name=text]", "hello")
        page.click("#line button.first")
        page.locator("#line .status", has_text="points.").wait_for()
        assert page.locator("#line-result svg").get_attribute("aria-label") == "Handwriting: hello"
        assert page.locator("#line-result path").count() > 30
        colours = page.locator("#line-result path").evaluate_all(
            "all => all.map(one => one.getAttribute('stroke'))"
        )
        assert len(set(colours)) > 20

        with page.expect_download() as download:
            page.click("#line [name=png]")
        assert download.value.path().read_bytes().startswith(b"\x89PNG")

        # Strokes drawn with the mouse, saved as a file that the commands read, and read by the model.
        box = page.locator("#pad").bounding_box()
        for x in (0.1, 0.2):
            page.mouse.move(box["x"] + x * box["width"], box["y"] + 0.3 * box["height"])
            page.mouse.down()
            page.mouse.move(box["x"] + x * box["width"], box["y"] + 0.7 * box["height"], steps=20)
            page.mouse.up()
        with page.expect_download() as download:
            page.click("#line [name=strokes]")
        saved = tmp_path / "strokes.svg"
        download.value.save_as(saved)
        drawn = read_line(saved).points
        heights = np.ptp(np.cumsum(drawn[:, 1]))
        assert drawn[:, 2].sum() == 2 and len(drawn) > 20 and heights > 5
        page.fill("#line [name=prime_text]", "ll")
        page.click("#line button.first")
        page.locator("#line .status", has_text="points.").wait_for()
        assert page.inner_text("#line .error") == ""
        page.click("#line [name=clear]")
        assert page.locator("#pad path").count() == 0 and page.is_disabled("#line [name=strokes]")

        page.fill("#drawings [name=count]", "3")
        page.fill("#drawings [name=points]", "20")
        page.click("#drawings button.first")
        page.locator("#drawings .status", has_text="3 drawings.").wait_for()
        groups = page.locator("#drawings-result g[transform]")
        assert groups.count() == 3
        lefts = [groups.nth(number).bounding_box()["x"] for number in range(3)]
        assert lefts == sorted(lefts) and groups.nth(0).locator("path").count() > 10

        page.fill("#line [name=text]", "hellö")
        page.click("#line button.first")
        page.locator("#line .error", has_text="the model cannot write 'ö'").wait_for()
        # A long error wraps.
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.is_disabled("#line [name=pause]")
        page.fill("#line [name=text]", "a")
        page.click("#line button.first")
        page.locator("#line .status", has_text="points.").wait_for()
        assert page.inner_text("#line .error") == ""
        assert page.evaluate("document.documentElement.scrollWidth") <= width
