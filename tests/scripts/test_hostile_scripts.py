"""The commands in careless and hostile hands: one line, nothing written, nothing waited for."""

import os
import signal
from pathlib import Path

import pytest
from helpers import script_cli
from helpers.cli import HANGS

from rhhn_fairseq import cli

# Each line is a command; a word in capitals is what ``places`` makes of it.
COMMANDS = """
describe
describe --arch
describe --arch nope
describe --arch é
describe --arch lstm
describe --arch char_lm
describe --arch lstm_ptb --device cuda
describe --arch lstm_ptb --dtype bfloat16
describe --arch char_lm --vocab-size 0
describe --arch char_lm --vocab-size -5
describe --arch char_lm --vocab-size abc
describe --arch char_lm --vocab-size 1e400
describe --arch char_lm --vocab-size 99999999999999999999
plot
plot nope
plot curves
plot curves NOWHERE
plot curves FOLDER
plot curves LOOP
plot curves EMPTY
plot curves NOISE
plot curves TEXT
plot curves BRACES
plot curves ZERO
plot curves TEXT --metric é
plot curves TEXT --subsets ,
plot curves TEXT --threshold x
plot curves TEXT --output TEXT
plot curves TEXT --output TEXT.gif
plot curves TEXT --x weeks
plot curves TEXT --table TEXT
plot weights
plot weights --text a --output TEXT
plot weights NOWHERE --pretrained --text a --output NOWHERE.png
plot weights --pretrained --text a --output NOWHERE.gif
plot weights --pretrained --text é --output NOWHERE.png
plot weights --pretrained --file NOISE --output NOWHERE.html
plot weights --pretrained --file EMPTY --output NOWHERE.html
plot weights --pretrained --file ZERO --output NOWHERE.html
plot weights --pretrained --text a --output NOWHERE/x.html
plot weights NOISE --text a --output NOWHERE.html
sample --pretrained --weights NOWHERE.gif
sample --pretrained --length 20001 --weights NOWHERE.html
plot gradients NOISE --output NOWHERE.png
plot gradients NOISE --output TEXT
plot gradients NOISE --steps 1 --output NOWHERE.png
plot gradients NOISE --h-detach nan --output NOWHERE.png
plot norms
plot norms NOWHERE --output TEXT
plot norms NOWHERE --output NOWHERE.png
plot norms NOISE --output NOWHERE.png
plot norms FOLDER --output NOWHERE.png
plot rank NOISE --output NOWHERE.png
plot rank NOISE --symbols 0 --output NOWHERE.png
plot attention NOISE --text a --output NOWHERE.png
plot attention NOISE --text a --output TEXT
score_bleu
score_bleu NOWHERE
score_bleu FOLDER
score_bleu EMPTY
score_bleu NOISE
score_bleu LOOP
score_bleu ZERO
score_bleu TEXT
score_bleu TEXT --reference NOWHERE
score_bleu TEXT --reference LINES
score_bleu TEXT --reference TEXT --samples 0
score_bleu TEXT --reference TEXT --samples x
score_bleu TEXT --reference TEXT --seed -1
score_bleu TEXT --reference TEXT --language klingon
score_bleu TEXT --reference TEXT --baseline LINES
score_bleu TEXT --reference TEXT --baseline FOLDER
score_bleu LINES --reference LINES --baseline LINES --samples 999999999999999999999
score_bleu TEXT --reference TEXT --json FOLDER
score_bleu TEXT --reference TEXT --json NOWHERE/x
score_bleu TEXT --reference TEXT --json LOOP
score_bleu TEXT --reference TEXT --json /dev/full
score_bleu TEXT --reference TEXT --json TEXT
prepare_chars
prepare_chars nope
prepare_chars text
prepare_chars text --train TEXT
prepare_chars text --input NOWHERE --split 90/5/5
prepare_chars text --input FOLDER --split 90/5/5
prepare_chars text --input PIPE --split 90/5/5
prepare_chars text --input LOOP --split 90/5/5
prepare_chars text --input ZERO --split 90/5/5
prepare_chars text --input EMPTY --split 90/5/5
prepare_chars text --input NOISE --split 90/5/5
prepare_chars text --input TEXT --split 1/2/3
prepare_chars text --input TEXT --split nan/5/5
prepare_chars text --input TEXT --split 1e400/5/5
prepare_chars text --input TEXT --split 100/0/0
prepare_chars text --input TEXT --split é
prepare_chars text --input TEXT --split 90/5/5 --errors ignore
prepare_chars text --input TEXT --split 34/33/33 --dest TEXT
prepare_chars text --input TEXT --split 34/33/33 --dest TEXT/x
prepare_chars text --input TEXT --split 34/33/33 --dest LOOP
prepare_chars text --input TEXT --split 34/33/33 --dest /dev/null
prepare_chars text --input TEXT --split 34/33/33 --dest /proc/x
prepare_chars text --input TEXT --split 34/33/33 --dest /
prepare_chars text --input TEXT --split 34/33/33 --dest HERE
prepare_chars text --input TEXT --split 34/33/33 --dest PIPE
prepare_chars ptb --from-dir NOWHERE
prepare_chars ptb --from-dir FOLDER
prepare_chars ptb --from-dir TEXT
prepare_chars ptb --from-dir LOOP
prepare_chars ptb --variant x
prepare_chars ptb --variant mikolov-char
prepare_chars ptb --variant char --from-dir FOLDER
prepare_chars enwik8 --from-dir FOLDER
prepare_chars text8
prepare_chars text8 --from-dir FOLDER
prepare_chars wikitext103 --from-dir NOWHERE
prepare_chars wikitext103 --from-dir FOLDER --variant x
prepare_chars stdlib --size 0
prepare_chars stdlib --size x
prepare_chars stdlib --size 99999999999999999999999
prepare_strokes nope
prepare_strokes stroke3
prepare_strokes stroke3 --input NOWHERE
prepare_strokes stroke3 --input FOLDER
prepare_strokes stroke3 --input PIPE
prepare_strokes stroke3 --input LOOP
prepare_strokes stroke3 --input ZERO
prepare_strokes stroke3 --input EMPTY
prepare_strokes stroke3 --input NOISE
prepare_strokes stroke3 --input TEXT --split x
prepare_strokes iam
prepare_strokes iam --from-dir NOWHERE
prepare_strokes iam --from-dir FOLDER
prepare_strokes iam --from-dir LOOP
prepare_strokes hershey --lines 0
prepare_strokes hershey --lines x
prepare_strokes hershey --lines 3 --seed -1
prepare_strokes hershey --lines 3 --max-words 0
prepare_strokes hershey --lines 3 --slant nan
prepare_strokes hershey --lines 3 --step 0
prepare_strokes hershey --lines 3 --step nan
prepare_strokes hershey --lines 3 --jitter nan
prepare_strokes hershey --lines 3 --fonts nope
prepare_strokes hershey --lines 3 --fonts ,
prepare_strokes hershey --words NOWHERE
prepare_strokes hershey --words PIPE
prepare_strokes hershey --words ZERO
prepare_strokes hershey --words EMPTY
prepare_strokes hershey --words NOISE
prepare_strokes hershey --words FOLDER
prepare_strokes hershey --lines 3 --dest LOOP
prepare_strokes hershey --lines 3 --dest TEXT
prepare_strokes hershey --lines 3 --dest /
prepare_strokes hershey --lines 3 --statistics-of FOLDER
prepare_strokes hershey --lines 3 --statistics-of NOWHERE
prepare_strokes hershey --lines 3 --statistics-of LOOP
prepare_strokes hershey --lines 3 --min-points -1
prepare_strokes hershey --lines 3 --normalise x
prepare_translation
prepare_translation nope
prepare_translation files
prepare_translation files --train-src NOWHERE --train-tgt TEXT --valid-src TEXT --valid-tgt TEXT
prepare_translation synthetic --pairs 0 --dest NOWHERE
prepare_translation synthetic --pairs x
prepare_translation synthetic --workers 0 --dest NOWHERE
prepare_translation synthetic --vocab-size -1 --dest NOWHERE
prepare_translation synthetic --dest LOOP
prepare_translation synthetic --dest TEXT
prepare_translation multi30k --from-dir NOWHERE
prepare_translation multi30k --from-dir FOLDER
prepare_translation multi30k --from-dir LOOP
prepare_translation wmt14-en-fr --parts nope
prepare_translation wmt14-en-fr --from-dir FOLDER
sample
sample NOWHERE
sample FOLDER
sample EMPTY
sample NOISE
sample TEXT
sample LOOP
sample BRACES
sample NOWHERE --length 0
sample NOWHERE --temperature nan
sample NOWHERE --temperature -1
sample NOWHERE --top-k -1
sample NOWHERE --seed x
sample NOWHERE --seed 18446744073709551616
write
write NOWHERE
write FOLDER
write EMPTY
write NOISE
write LOOP
write NOWHERE --output NOWHERE/x
write NOWHERE --lines 0
write NOWHERE --points -1
write NOWHERE --bias nan
write NOWHERE --temperature 0
write NOWHERE --columns 0
write NOWHERE --temperature 1e300
write NOWHERE --prime-text a
write NOWHERE --data FOLDER
write NOWHERE --y-up
translate
translate --checkpoint NOWHERE
translate --checkpoint FOLDER
translate --checkpoint EMPTY
translate --checkpoint NOISE
translate --checkpoint LOOP
translate --checkpoint NOWHERE:EMPTY
translate --checkpoint TEXT --input NOWHERE
translate --checkpoint TEXT --input FOLDER
translate --checkpoint TEXT --input LINES --output LINES
translate --checkpoint TEXT --input LINES --output TEXT
translate --checkpoint TEXT --input LINES --output LOOP
translate --checkpoint TEXT --buffer-size 0
translate --checkpoint TEXT --beam 0
translate --checkpoint TEXT --nbest 2
translate --checkpoint TEXT --max-len-a nan
translate --checkpoint TEXT --max-tokens 0
average_checkpoints
average_checkpoints NOWHERE --output NOWHERE
average_checkpoints FOLDER --output NOWHERE
average_checkpoints EMPTY --output NOWHERE
average_checkpoints NOISE --output NOWHERE
average_checkpoints FOLDER --last 1 --output NOWHERE
average_checkpoints FOLDER --best 1 --output NOWHERE
average_checkpoints FOLDER --best 0 --output NOWHERE
average_checkpoints FOLDER --last 1 --best 1 --output NOWHERE
average_checkpoints NOWHERE --best 1 --output NOWHERE
average_checkpoints TEXT --metric loss --output NOWHERE
average_checkpoints TEXT --output TEXT
convert_checkpoint NOWHERE --output NOWHERE
convert_checkpoint FOLDER --output NOWHERE
convert_checkpoint FOLDER --data FOLDER --output NOWHERE
average_checkpoints PIPE --output NOWHERE
translate --checkpoint PIPE
sample PIPE
convert_checkpoint PIPE --output NOWHERE
convert_checkpoint LOOP --output NOWHERE
convert_checkpoint EMPTY --output NOWHERE
sample --pretrained --data FOLDER
sample --pretrained --prompt é
convert_checkpoint
convert_checkpoint NOISE --output NOWHERE
convert_checkpoint NOWHERE --vocabulary TEXT --data FOLDER --output NOWHERE
convert_checkpoint FOLDER --vocabulary TEXT --data FOLDER --output NOWHERE
convert_checkpoint PIPE --vocabulary TEXT --data FOLDER --output NOWHERE
convert_checkpoint LOOP --vocabulary TEXT --data FOLDER --output NOWHERE
convert_checkpoint EMPTY --vocabulary TEXT --data FOLDER --output NOWHERE
convert_checkpoint NOISE --vocabulary TEXT --data FOLDER --output NOWHERE
convert_checkpoint TEXT --vocabulary TEXT --data FOLDER --output TEXT
""".strip().splitlines()


@pytest.fixture
def places(tmp_path, tmp_path_factory, monkeypatch):
    """Files of all kinds in the current directory, by the words of ``COMMANDS``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Where matplotlib puts its list of fonts, the first time that it is imported.
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
    (tmp_path / "a.txt").write_text("a b c\n")
    (tmp_path / "lines.txt").write_text("a\nb\n")
    (tmp_path / "noise").write_bytes(bytes(range(255, -1, -1)) * 2)
    (tmp_path / "empty").touch()
    (tmp_path / "braces").write_text("{" * 50_000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    names = {"TEXT": "a.txt", "LINES": "lines.txt", "ZERO": "/dev/zero", "HERE": ".", "NOWHERE": "no-such"}
    return names | {name.upper(): name for name in ("noise", "empty", "braces", "folder", "loop", "pipe")}


def listing(folder: Path) -> dict:
    """Names, sizes and contents below a folder, pipes and links not followed."""
    paths = sorted(path for path in folder.rglob("*"))
    return {
        str(path): path.read_bytes() if path.is_file() and not path.is_symlink() else None for path in paths
    }


def expand(word: str, places: dict) -> str:
    for name in sorted(places, key=len, reverse=True):
        word = word.replace(name, places[name])
    return word


class Waits(BaseException):
    """The program waits. It is no Exception, which a program might report as an error of its own."""


def too_slow(*_):
    raise Waits


@pytest.mark.parametrize("command", COMMANDS)
def test_one_line_and_nothing_written(command, places, tmp_path, capsys):
    script, *words = command.split()
    module = script_cli.load(script)
    before = listing(tmp_path)
    before_alarm = signal.signal(signal.SIGALRM, too_slow)
    signal.alarm(HANGS)
    try:
        words = [expand(word, places) for word in words]
        status = cli.run(lambda: _checked(module.main(words)))
    except SystemExit as ended:
        status = ended.code
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before_alarm)
    # argparse ends with 2, after a line that shows what is possible.
    assert status in (1, 2)
    said = capsys.readouterr().err.strip().splitlines()
    assert "error: " in said[-1] and (status == 2 or len(said) == 1), said
    assert listing(tmp_path) == before


def _checked(status) -> None:
    """Some programs return their status and have printed their line."""
    if status:
        raise SystemExit(status)
