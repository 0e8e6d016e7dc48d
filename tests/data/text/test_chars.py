"""Character vocabulary, stream format and reading of text, against fairseq's own code."""

import gzip
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, indexed_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from rhhn_fairseq.data.common.sources import CHUNK, FileSource, MemorySource, next_character, read_codes
from rhhn_fairseq.data.text import stream as stream_module
from rhhn_fairseq.data.text.stream import (
    LONGEST_ITEM,
    StreamWriter,
    open_stream,
    read_index,
    storage_dtype,
)
from rhhn_fairseq.data.text.vocabulary import (
    EOS,
    FIRST_SYMBOL,
    UNK,
    CharVocabulary,
    escape,
    escape_byte,
    unescape,
)
from rhhn_fairseq.errors import UsageError

# Everything that Python or fairseq could take for white space, a line end or a comment.
AWKWARD = " \t\r\x0b\x0c\x1c\x1d\x1e\x85\xa0\u2028\u2029\u3000\ufeff\u200b\ud800\x00#\\\U000e0001é"


@pytest.mark.parametrize(
    ("symbol", "escaped"),
    [
        ("#", "#"),
        ("\\", "\\\\"),
        (" ", "\\x20"),
        ("\x85", "\\x85"),
        ("\u2028", "\\u2028"),
        ("\ud800", "\\ud800"),
        ("😀", "😀"),
    ],
)
def test_escape_of_known_symbols(symbol, escaped):
    assert escape(symbol) == escaped
    assert unescape(escaped) == symbol


def test_every_code_point_survives_and_has_a_form_of_its_own():
    escaped = [escape(chr(code)) for code in range(0x110000)]
    assert all(unescape(text) == chr(code) for code, text in enumerate(escaped))
    assert len(set(escaped)) == len(escaped)
    assert all(text.split() == [text] and text.splitlines() == [text] for text in escaped)


@pytest.mark.parametrize(
    "text", ["", "\\", "ab", "\\x2", "\\x2G", "\\u20", "\\U00110000", "\\n", "madeupword0000", "aa"]
)
def test_unescape_refuses_what_escape_never_writes(text):
    with pytest.raises(UsageError, match="not an escaped character"):
        unescape(text)


symbol_sets = st.sets(
    st.one_of(st.sampled_from(AWKWARD), st.integers(0, 0x10FFFF).filter(lambda code: code != 10).map(chr)),
    max_size=40,
)


@settings(deadline=None)
@given(symbol_sets)
def test_fairseq_reloads_exactly_the_symbols(symbols):
    symbols = sorted(symbols)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "dict.txt"
        lines = [f"{escape(symbol)} {count + 1}\n" for count, symbol in enumerate(symbols)]
        path.write_bytes("".join(lines).encode("utf-8"))
        dictionary = Dictionary.load(str(path))
        vocabulary = CharVocabulary.load(directory)
    assert dictionary.symbols[FIRST_SYMBOL:] == [escape(symbol) for symbol in symbols]
    assert dictionary.count[FIRST_SYMBOL:] == list(range(1, len(symbols) + 1))
    assert len(dictionary) == len(vocabulary) == FIRST_SYMBOL + len(symbols)
    assert vocabulary.symbols == tuple(symbols)
    assert (dictionary.eos(), dictionary.unk()) == (EOS, UNK)
    text = "".join(symbols)
    expected = [dictionary.index(escape(symbol)) for symbol in symbols]
    assert vocabulary.encode(text).tolist() == expected
    assert vocabulary.decode(expected) == text


def test_model_order_has_the_newline_first_if_it_occurs():
    vocabulary = CharVocabulary(["\\x20", "e", "a"])
    assert vocabulary.model_indices().tolist() == [2, 4, 5, 6]
    assert vocabulary.codes().tolist() == [10, 32, 101, 97]
    without = CharVocabulary(["\\x20", "e", "a"], newline_occurs=False)
    assert without.model_indices().tolist() == [4, 5, 6]
    assert without.codes().tolist() == [32, 101, 97]
    for array in (vocabulary.model_indices(), vocabulary.codes(), vocabulary.encode("ea")):
        assert array.dtype == np.int64


def test_unknown_symbols_and_specials_decode_to_one_replacement_each():
    text = CharVocabulary(["a", "b"])
    indices = text.encode("a\nb😀c")
    assert indices.tolist() == [4, EOS, 5, UNK, UNK]
    assert text.decode(indices) == "a\nb\ufffd\ufffd"
    assert text.decode([0, 1, 3, 4]) == "\ufffd\ufffd\ufffda"
    binary = CharVocabulary(["a", "\\xff"], mode="bytes")
    assert binary.decode(binary.encode(b"a\n\xff\x00")) == b"a\n\xff?"


def test_bytes_mode_takes_str_as_utf8_and_text_mode_refuses_bytes():
    binary = CharVocabulary(["\\xc3", "\\xa9"], mode="bytes")
    assert binary.encode("é").tolist() == [4, 5]
    # A byte of the command line that is not UTF-8 arrives as a surrogate.
    assert binary.encode("\udcc3\udca9").tolist() == [4, 5] and binary.split("\udcc3") == b"\xc3"
    with pytest.raises(TypeError, match="str, not bytes"):
        CharVocabulary(["a"]).encode(b"a")


@pytest.mark.parametrize("index", [-1, 6])
def test_decoding_an_index_outside_of_the_dictionary_raises(index):
    with pytest.raises(ValueError, match="dictionary of 6 symbols"):
        CharVocabulary(["a", "b"]).decode([4, index])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["a", "a"],), "'a' occurs twice"),
        ((["é", "€"], "bytes"), "not a byte"),
    ],
)
def test_impossible_vocabularies_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        CharVocabulary(*arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a 1\nb\n", r"line 2 is 'b', not 'SYMBOL COUNT'"),
        (b"the 5\n", r"'the' is not an escaped character"),
    ],
)
def test_broken_dictionary_files_are_named(tmp_path, content, message):
    (tmp_path / "dict.txt").write_bytes(content)
    with pytest.raises(UsageError, match=message) as error:
        CharVocabulary.load(tmp_path)
    assert str(tmp_path / "dict.txt") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 99}'])
def test_broken_manifest_is_named(tmp_path, content):
    (tmp_path / "dict.txt").write_text("a 1\n")
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(UsageError, match=r"manifest.json: .*prepare the corpus again"):
        CharVocabulary.load(tmp_path)


def test_without_manifest_the_vocabulary_is_text_with_newline(tmp_path):
    (tmp_path / "dict.txt").write_text("a 1\n")
    vocabulary = CharVocabulary.load(tmp_path)
    assert (vocabulary.mode, vocabulary.newline_occurs, vocabulary.corpus) == ("text", True, None)


def test_incremental_decoder_never_gives_half_a_character():
    data = "aé€😀\n".encode()
    vocabulary = CharVocabulary([escape_byte(value) for value in sorted(set(data) - {10})], "bytes")
    decoder = vocabulary.incremental_decoder()
    pieces = [decoder.feed([index]) for index in vocabulary.encode(data)]
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "\n"]
    assert decoder.finish() == ""
    decoder = vocabulary.incremental_decoder()
    assert decoder.feed(vocabulary.encode(data[:2])) == "a"
    assert decoder.finish() == "\ufffd"


def write_stream(prefix, indices, vocab_size, pieces=(), newline=EOS):
    """Write ``indices`` with StreamWriter, split into chunks at the offsets ``pieces``."""
    with StreamWriter(prefix, vocab_size) as writer:
        for chunk in np.split(indices, pieces):
            writer.write(chunk, chunk == newline)
    return writer


def fairseq_files(prefix, items, vocab_size):
    """What fairseq's own builder writes for these items."""
    builder = indexed_dataset.make_builder(f"{prefix}.bin", impl="mmap", vocab_size=vocab_size)
    for item in items:
        builder.add_item(torch.tensor(item, dtype=torch.int64))
    builder.finalize(f"{prefix}.idx")


def reference_items(indices):
    """One item a line, cut after LONGEST_ITEM symbols, one symbol at a time."""
    items, item = [], []
    for index in indices:
        item.append(int(index))
        if index == EOS or len(item) == LONGEST_ITEM:
            items.append(item)
            item = []
    return items + [item] if item else items


@settings(deadline=None)
@given(
    st.lists(st.integers(2, 9), max_size=60),
    st.lists(st.integers(0, 60), max_size=5),
    st.sampled_from([10, 70_000]),
)
def test_stream_writer_writes_fairseqs_bytes(indices, pieces, vocab_size):
    indices = np.array(indices, dtype=np.int64)
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory)
        writer = write_stream(prefix / "ours", indices, vocab_size, sorted(pieces))
        items = reference_items(indices)
        fairseq_files(prefix / "theirs", items, vocab_size)
        for kind in ("bin", "idx"):
            ours, theirs = (prefix / f"{who}.{kind}" for who in ("ours", "theirs"))
            assert ours.read_bytes() == theirs.read_bytes()
        assert (writer.items, writer.symbols) == (len(items), indices.size)


@pytest.mark.parametrize(
    "length, pieces",
    [
        (LONGEST_ITEM - 1, ()),
        (LONGEST_ITEM, (65_535,)),
        (LONGEST_ITEM + 1, (1, 65_536, 65_537)),
        (200_000, (70_000, 140_000)),
    ],
)
def test_long_lines_are_cut_wherever_the_chunks_end(tmp_path, length, pieces):
    indices = np.full(length + 3, 4, dtype=np.int64)
    indices[[0, length]] = EOS
    write_stream(tmp_path / "ours", indices, 5, [piece for piece in pieces if piece < indices.size])
    items = reference_items(indices)
    fairseq_files(tmp_path / "theirs", items, 5)
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()
    assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "theirs.bin").read_bytes()
    assert max(map(len, items)) <= LONGEST_ITEM


def test_an_index_is_written_and_read_in_several_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_module, "_BLOCK", 3)
    indices = np.array([4, EOS, EOS, 5, 6, 4, EOS, 5, EOS, EOS, 4, 4, EOS, 6, EOS, 5, EOS], dtype=np.int64)
    write_stream(tmp_path / "ours", indices, 7)
    fairseq_files(tmp_path / "theirs", reference_items(indices), 7)
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()
    index = read_index(tmp_path / "ours")
    assert (index.items, index.symbols) == (8, 17)
    assert open_stream(tmp_path / "ours", 7).tolist() == indices.tolist()
    # Two bytes a symbol: the eleventh becomes <s>.
    damage(tmp_path / "ours.bin", 20, b"\0\0")
    with pytest.raises(UsageError, match="ours.bin: symbol 10 is <s>, which fairseq reserves"):
        open_stream(tmp_path / "ours", 7)
    # The offset of the last item.
    damage(tmp_path / "ours.idx", 26 + 8 * 4 + 7 * 8, struct.pack("<q", 28))
    with pytest.raises(UsageError, match="ours.idx: its items do not follow one another"):
        read_index(tmp_path / "ours")


@pytest.mark.parametrize("vocab_size", [5, 65_499, 65_500, 1_114_112])
def test_storage_type_is_fairseqs(vocab_size):
    assert storage_dtype(vocab_size) == indexed_dataset.best_fitting_int_dtype(vocab_size)


def damage(path, offset, data):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: (p / "t.bin").write_bytes(b"\4\0" * 9), "expected 12 bytes .* found 18"),
        (lambda p: (p / "t.idx").write_bytes(b""), "is cut off, or not an index"),
        (lambda p: (p / "t.idx").write_bytes(b"MMIDIDX\0\0\1"), "is cut off"),
        (lambda p: damage(p / "t.idx", 9, b"\7"), "version 7 and type 8 of integers"),
        (lambda p: damage(p / "t.idx", 17, b"\6"), "version 1 and type 6 of integers"),
        (lambda p: damage(p / "t.idx", 18, b"\3"), "expected 62 bytes for 3 items, found 50"),
        (lambda p: damage(p / "t.idx", 26, struct.pack("<i", -1)), "do not follow one another"),
        (lambda p: damage(p / "t.idx", 34, struct.pack("<q", 8)), "do not follow one another"),
        (lambda p: (p / "t.idx").write_bytes(b"TNTIDX\0\0" + bytes(40)), "--dataset-impl mmap"),
        (lambda p: damage(p / "t.bin", 4, b"\7"), r"symbol 2 is 7, outside .* of 7 symbols"),
    ],
)
def test_damaged_streams_are_named(tmp_path, spoil, message):
    write_stream(tmp_path / "t", np.array([4, 5, EOS, 6, 4, EOS]), 7)
    assert open_stream(tmp_path / "t", 7).size == 6
    spoil(tmp_path)
    with pytest.raises(UsageError, match=message) as error:
        open_stream(tmp_path / "t", 7)
    assert "\n" not in str(error.value)


def test_an_empty_stream_is_refused(tmp_path):
    write_stream(tmp_path / "t", np.zeros(0, dtype=np.int64), 7)
    with pytest.raises(UsageError, match="holds no symbols"):
        open_stream(tmp_path / "t", 7)


def test_an_index_outside_of_the_dictionary_is_found_in_a_later_block(tmp_path):
    indices = np.full(2_500_000, 4, dtype=np.int64)
    indices[2_400_000] = 9
    write_stream(tmp_path / "t", indices, 10)
    with pytest.raises(UsageError, match="symbol 2,400,000 is 9"):
        open_stream(tmp_path / "t", 9)


def test_an_unfinished_writer_leaves_no_readable_index(tmp_path):
    with pytest.raises(KeyboardInterrupt), StreamWriter(tmp_path / "t", 7) as writer:
        writer.write(np.array([4, EOS]), np.array([False, True]))
        raise KeyboardInterrupt
    with pytest.raises(UsageError, match="expected 26 bytes for 0 items, found 30"):
        open_stream(tmp_path / "t", 7)


def codes_of(data, mode="text", **stretch):
    chunks = list(read_codes(MemorySource("memory", data), mode, **stretch))
    return np.concatenate([np.zeros(0, dtype=np.int64), *chunks]).tolist()


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_text_is_read_as_it_is(text):
    assert codes_of(text.encode("utf-8")) == [ord(character) for character in text]


@pytest.mark.parametrize("shift", range(5))
def test_characters_across_chunks_are_whole(shift):
    text = "x" * (CHUNK - shift) + "😀" * 3
    assert codes_of(text.encode()) == [ord(character) for character in text]


@pytest.mark.parametrize(
    ("data", "offset", "problem"),
    [
        (b"ab\0c", 2, "NUL"),
        (b"ab\xffc", 2, "not UTF-8"),
        ("ab😀".encode()[:-1], 2, "not UTF-8"),
        (b"a" * (CHUNK - 1) + b"\xc3(", CHUNK - 1, "not UTF-8"),
        (b"\xed\xa0\x80", 0, "not UTF-8"),
    ],
)
def test_binary_data_in_text_mode_is_located(data, offset, problem):
    with pytest.raises(UsageError, match=rf"memory: byte {offset} is {problem}.*--bytes"):
        codes_of(data)


def test_a_stretch_begins_and_ends_where_asked_and_errors_count_from_the_start():
    assert codes_of(b"abcdef", start=2, stop=4) == [ord("c"), ord("d")]
    with pytest.raises(UsageError, match="byte 3 is NUL"):
        codes_of(b"abc\0", start=2)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.data())
def test_cuts_fall_between_characters(text, data):
    raw = text.encode()
    position = data.draw(st.integers(0, len(raw)))
    cut = next_character(MemorySource("memory", raw), position)
    assert position <= cut <= position + 3
    assert (raw[:cut].decode() + raw[cut:].decode()) == text


def test_packed_files_give_the_same_stretch(tmp_path):
    data = bytes(range(256)) * 10_000
    (tmp_path / "plain").write_bytes(data)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(data))
    for name in ("plain", "packed.gz"):
        chunks = FileSource(tmp_path / name).chunks(1_000, 2_000_000)
        assert b"".join(chunks) == data[1_000:2_000_000]
