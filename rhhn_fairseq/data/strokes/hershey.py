"""Synthetic handwriting: words in the Hershey stroke fonts with random slant, size and jitter.

Nothing is downloaded: the fonts (A. V. Hershey, US National Bureau of Standards, 1967) come with the package
Hershey-Fonts. A line is one or a few words in one font. Its strokes are sheared, turned, scaled and stretched
by numbers drawn once per line; then points are placed along them at a pen's uneven distances and moved by a
smooth random displacement. Glyphs that touch, as in the script fonts, are written without lifting the pen.
"""

import hashlib
import string
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from rhhn_fairseq.data.common.manifest import SPLITS
from rhhn_fairseq.data.strokes.points import Line, Loaded, StrokeCorpus, from_strokes
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.extras import needed_for
from rhhn_fairseq.files import read_regular
from rhhn_fairseq.options import check_fields, option

# Words to write if none are given: frequent English ones, in which every letter occurs.
WORDS = Path(__file__).with_name("words.txt").read_text("ascii").split()

DISTRIBUTION = "Hershey-Fonts"
FONTS = "futural"

# One font height, from descender to ascender, in units; a drawing of this size has steps of a few units.
HEIGHT = 100.0

# Points over which a displacement of the pen fades, about a quarter of a letter.
SMOOTHING = 4


@dataclass(frozen=True)
class HersheyConfig:
    """What lines look like; ``UsageError`` names a value that cannot work."""

    lines: int = option(8000, help="lines to train on; valid and test have a twentieth each", low=1)
    letters: float = option(
        0.5, help="share of words of random letters, so that every pair of letters occurs", low=0, high=1
    )
    max_words: int = option(2, help="largest number of words in a line", low=1)
    fonts: str = option(
        FONTS, help="Hershey fonts, with commas between; futural, cursive, scripts are single-stroke"
    )
    slant: float = option(8.0, help="standard deviation of a line's slant, in degrees", low=0, high=45)
    size: float = option(0.12, help="standard deviation of the logarithm of a line's size", low=0, high=1)
    jitter: float = option(
        0.006, help="standard deviation of a point's displacement, in font heights", low=0, high=0.5
    )
    step: float = option(0.12, help="mean distance between points, in font heights", low=0.01, high=1)
    seed: int = option(1, help="random seed; each seed produces different lines", low=0)

    def __post_init__(self):
        check_fields(self, flags=True)


def hershey(config: HersheyConfig, words_file: Path | None = None) -> StrokeCorpus:
    """Returns a corpus of words of ``words_file``, or frequent English ones, in Hershey fonts.

    Raises:
        UsageError: the fonts' package is missing, a font is unknown, or the words cannot be read.
    """
    fonts = _load_fonts(config.fonts)
    words, inputs = WORDS, []
    if words_file is not None:
        words, inputs = _read_words(Path(words_file))
    counts = {"train": config.lines} | dict.fromkeys(("valid", "test"), max(1, config.lines // 20))
    options = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return StrokeCorpus(
        "hershey",
        f"words in the Hershey fonts {config.fonts} (seed {config.seed})",
        options | {"package": f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}"},
        lambda: Loaded(
            {
                split: [_line(config, fonts, words, split, number) for number in range(count)]
                for split, count in counts.items()
            },
            inputs,
        ),
    )


def _load_fonts(names: str) -> dict:
    with needed_for("the Hershey fonts need"):
        from HersheyFonts import HersheyFonts
    fonts = {}
    for name in names.split(","):
        font = HersheyFonts()
        if name not in font.default_font_names:
            raise UsageError(
                f"--fonts {names}: {name!r} is unknown, choose from {', '.join(font.default_font_names)}"
            )
        font.load_default_font(name)
        font.normalize_rendering(1.0)
        fonts[name] = font
    return fonts


def _read_words(path: Path) -> tuple[list[str], list[dict]]:
    content = read_regular(path, 1 << 26)
    words = content.decode("utf-8", "replace").split()
    if not words:
        raise UsageError(f"{path}: has no words")
    for word in words:
        if not word.isascii() or not word.isprintable():
            raise UsageError(
                f"{path}: {word!r} has characters that no Hershey font has; they are printable ASCII"
            )
    return words, [{"name": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}]


def _line(config: HersheyConfig, fonts: dict, words: list[str], split: str, number: int) -> Line:
    rng = np.random.default_rng([config.seed, SPLITS.index(split), number])
    numbers = rng.integers(len(words), size=rng.integers(1, config.max_words + 1))
    text = " ".join(_word(config, words[number], rng) for number in numbers)
    if rng.random() < 0.25:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.15:
        text += rng.choice(list(",.?!"))
    name = f"{split}-{number}"
    font = fonts[str(rng.choice(list(fonts)))]
    strokes = _joined([np.array(list(stroke), dtype=np.float64) for stroke in font.strokes_for_text(text)])
    if not strokes:
        raise UsageError(f"{name}: the font has no strokes for {text!r}")
    form = _form(config, rng)
    return Line(name, from_strokes([_pen(config, stroke @ form, rng) for stroke in strokes], name), text)


def _word(config: HersheyConfig, word: str, rng: np.random.Generator) -> str:
    """Returns the word, or one to eight random letters, a third of which have a doubled one."""
    if not config.letters or rng.random() >= config.letters:
        return word
    letters = list(rng.choice(list(string.ascii_lowercase), size=rng.integers(1, 9)))
    if rng.random() < 1 / 3:
        letters.insert(place := rng.integers(len(letters)), letters[place])
    return "".join(letters)


def _joined(strokes: list[np.ndarray]) -> list[np.ndarray]:
    """Joins strokes that begin where the one before ends, and drops empty ones."""
    joined: list[np.ndarray] = []
    for stroke in strokes:
        if not len(stroke):
            continue
        if joined and np.allclose(joined[-1][-1], stroke[0], atol=1e-6):
            joined[-1] = np.concatenate([joined[-1], stroke[1:]])
        else:
            joined.append(stroke)
    return joined


def _form(config: HersheyConfig, rng: np.random.Generator) -> np.ndarray:
    """Returns the matrix [2, 2] from a font's coordinates (y upwards) to the line's (y downwards)."""
    slant = np.tan(np.radians(np.clip(rng.normal(0, config.slant), -60, 60)))
    # A line is rarely level, and its letters are wider or narrower than the font's.
    turn = np.radians(rng.normal(0, config.slant / 8))
    size = HEIGHT * np.exp(rng.normal(0, config.size))
    stretch = np.exp(rng.normal(0, config.size / 2))
    shear = np.array([[stretch, 0.0], [slant, 1.0]])
    rotation = np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
    return size * shear @ np.diag([1.0, -1.0]) @ rotation


def _pen(config: HersheyConfig, stroke: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns points [n, 2] at uneven distances along a stroke, moved by smooth noise."""
    along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(stroke, axis=0).T))])
    count = max(1, round(along[-1] / (config.step * HEIGHT)))
    # The pen's speed changes smoothly by about a quarter.
    speed = np.exp(0.25 * _smooth(rng, count))
    places = along[-1] * np.concatenate([[0.0], np.cumsum(speed)]) / speed.sum()
    # A dot is one point.
    places = places if along[-1] > 0 else places[:1]
    points = np.stack([np.interp(places, along, stroke[:, axis]) for axis in range(2)], axis=1)
    noise = np.stack([_smooth(rng, len(points)) for _ in range(2)], axis=1)
    return points + config.jitter * HEIGHT * noise


def _smooth(rng: np.random.Generator, count: int) -> np.ndarray:
    """Returns random numbers [count] of variance 1 that change smoothly."""
    kernel = np.ones(SMOOTHING) / SMOOTHING**0.5
    return np.convolve(rng.normal(size=count + SMOOTHING - 1), kernel, mode="valid")
