"""A tiny parallel corpus, prepared for fairseq's translation task, and a model that has learnt it; and
random models and sentences."""

import random
from pathlib import Path
from types import SimpleNamespace

import sentencepiece
import torch
from fairseq.data import Dictionary
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY

import rhhn_fairseq.plugin  # noqa: F401  (registers the models)
from helpers.cli import fairseq_train, run_module

ENGLISH = "one two three four five six seven eight nine ten the cat".split()
FRENCH = "un deux trois quatre cinq six sept huit neuf dix le chat".split()
VOCABULARY = 48
SPLITS = {"train": 400, "valid": 20, "test": 30}


def french(english: str) -> str:
    """The translation of a sentence, word by word."""
    words = dict(zip(ENGLISH, FRENCH, strict=True))
    return " ".join(words[word] for word in english.split())


def sentences(split: str) -> list[str]:
    """The English side of a split; the splits do not share their sentences by design, only by chance."""
    draw = random.Random(split)
    return [" ".join(draw.choices(ENGLISH, k=draw.randint(1, 5))) for _ in range(SPLITS[split])]


def prepare(folder: Path) -> Path:
    """Writes the corpus in the form of rhhn prepare, less its manifest; its directory."""
    texts = {split: {"en": sentences(split)} for split in SPLITS}
    for sides in texts.values():
        sides["fr"] = [french(line) for line in sides["en"]]
    model = folder / "pieces"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts["train"]["en"] + texts["train"]["fr"]),
        model_prefix=str(model),
        vocab_size=VOCABULARY - 1,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_file=f"{model}.model")
    entries = [pieces.id_to_piece(index) for index in range(3, pieces.get_piece_size())]
    (folder / "dict.txt").write_text("".join(f"{entry} 1\n" for entry in entries), encoding="utf-8")
    options = ["--source-lang", "en", "--target-lang", "fr", "--destdir", folder / "data"]
    options += ["--joined-dictionary", "--srcdict", folder / "dict.txt"]
    for split, sides in texts.items():
        options += [f"--{split}pref", folder / split]
        for language, lines in sides.items():
            encoded = (" ".join(line) + "\n" for line in pieces.encode(lines, out_type=str))
            (folder / f"{split}.{language}").write_text("".join(encoded), encoding="utf-8")
    run_module("fairseq_cli.preprocess", options)
    Path(f"{model}.model").rename(folder / "data" / "pieces.model")
    raw = folder / "data" / "raw"
    raw.mkdir()
    for language, lines in texts["test"].items():
        (raw / f"test.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "data"


def arguments(data, save_dir, *options):
    """Arguments for training on the corpus that no model has a say in."""
    optimizer = ["--optimizer", "adam", "--lr", 0.01, "--clip-norm", 1, "--max-tokens", 100]
    return [data, *optimizer, "--disable-validation", "--cpu", "--save-dir", save_dir, *options]


def lstm(data, save_dir, *options, size=64):
    """Arguments that train fairseq's own ``lstm`` of one layer, without dropout."""
    sizes = ["--encoder-embed-dim", size, "--encoder-hidden-size", size, "--decoder-embed-dim", size]
    sizes += ["--decoder-hidden-size", size, "--decoder-out-embed-dim", size]
    model = ["--arch", "lstm", "--encoder-layers", 1, "--decoder-layers", 1, *sizes, "--dropout", 0]
    return arguments(data, save_dir, "--task", "translation", *model, *options)


def train(data: Path, save_dir: Path) -> Path:
    """A checkpoint of a model that has learnt the corpus by heart, in 16 epochs; about ten seconds."""
    options = ["--encoder-bidirectional", "--max-epoch", 20, "--no-epoch-checkpoints"]
    options += ["--clip-norm", 0.2, "--adam-betas", "(0.9, 0.98)"]
    fairseq_train(lstm(data, save_dir, *options))
    return save_dir / "checkpoint_last.pt"


def _dictionary():
    dictionary = Dictionary()
    for n in range(12):
        dictionary.add_symbol(f"w{n}")
    return dictionary


def random_model(seed=1, arch="lstm_gnmt_small", ends=2.0, **options):
    """A model of large random weights; the more it ``ends``, the shorter its sentences."""
    dictionary = _dictionary()
    config = MODEL_DATACLASS_REGISTRY[arch](hidden_size=7, embed_dim=5)
    for name, value in ({"share_embeddings": "none"} | options).items():
        setattr(config, name, value)
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary, cfg=None)
    model = MODEL_REGISTRY[arch].build_model(config, task)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=2.0)
    with torch.no_grad():
        model.decoder.output.bias[dictionary.eos()] = ends
    return model.double().eval(), dictionary


def random_sentences(lengths, dictionary, seed=0):
    """A batch of random sentences, padded on the left."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.full((len(lengths), max(lengths)), dictionary.pad())
    for row, length in zip(tokens, lengths, strict=True):
        row[-length:] = torch.randint(dictionary.nspecial, len(dictionary), (length,), generator=draw)
        row[-1] = dictionary.eos()
    return {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor(lengths)}}
