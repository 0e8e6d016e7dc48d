"""fairseq's own models train, validate and generate on today's PyTorch with the plugin loaded.

Without it, nearly every one of these commands ends in an UnpicklingError or in a name that NumPy has removed.
"""

import random
import re

import pytest
from helpers.cli import run_module

SMALL = ["--encoder-layers", 1, "--decoder-layers", 1, "--encoder-embed-dim", 8, "--decoder-embed-dim", 8]
TRANSFORMER = [*SMALL, "--encoder-ffn-embed-dim", 8, "--decoder-ffn-embed-dim", 8]
TRANSFORMER += ["--encoder-attention-heads", 2, "--decoder-attention-heads", 2]
CONVOLUTIONS = ["--encoder-layers", "[(8, 3)]", "--decoder-layers", "[(8, 3)]", "--encoder-embed-dim", 8]
LEVENSHTEIN = ["--task", "translation_lev", "--criterion", "nat_loss", "--noise", "full_mask"]
TRANSLATION = {
    "lstm": [*SMALL, "--encoder-hidden-size", 8, "--decoder-hidden-size", 8, "--decoder-out-embed-dim", 8],
    "fconv": [*CONVOLUTIONS, "--decoder-embed-dim", 8, "--decoder-out-embed-dim", 8],
    "transformer": TRANSFORMER,
    "lightconv": [*TRANSFORMER, "--encoder-conv-type", "lightweight", "--decoder-conv-type", "lightweight"]
    + ["--encoder-kernel-size-list", "[3]", "--decoder-kernel-size-list", "[3]"],
    "cmlm_transformer": [*TRANSFORMER, *LEVENSHTEIN, "--share-all-embeddings"],
}
LANGUAGE_MODELS = {
    "lstm_lm": ["--decoder-layers", 1, "--decoder-embed-dim", 8, "--decoder-hidden-size", 8]
    + ["--decoder-out-embed-dim", 8],
    "fconv_lm": ["--decoder-layers", "[(8, 3)]", "--decoder-embed-dim", 8, "--adaptive-softmax-cutoff", "4"],
    "transformer_lm": ["--decoder-layers", 1, "--decoder-embed-dim", 8, "--decoder-ffn-embed-dim", 8]
    + ["--decoder-attention-heads", 2],
    # Its decoder has biases that nothing sets or uses, and that may hold NaN.
    "lightconv_lm": ["--decoder-layers", 1, "--decoder-embed-dim", 8, "--decoder-ffn-embed-dim", 8]
    + [
        "--decoder-attention-heads",
        2,
        "--decoder-conv-type",
        "lightweight",
        "--decoder-kernel-size-list",
        "[3]",
    ],
}
TRAINING = ["--optimizer", "adam", "--lr", 0.01, "--max-tokens", 200, "--max-update", 2, "--cpu"]
TRAINING += ["--num-workers", 0]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sentences of letters in two languages with one dictionary; as text they are a language model's."""
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(1)
    for name in ("train.a", "train.b", "valid.a", "valid.b"):
        lines = (" ".join(draw.choices("abcdefgh", k=draw.randint(3, 9))) for _ in range(40))
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    texts = ["--trainpref", folder / "train", "--validpref", folder / "valid", "--joined-dictionary"]
    run_module("fairseq_cli.preprocess", [*texts, "-s", "a", "-t", "b", "--destdir", folder / "pairs"])
    texts = ["--trainpref", folder / "train.a", "--validpref", folder / "valid.a", "--only-source"]
    run_module("fairseq_cli.preprocess", [*texts, "--destdir", folder / "text"])
    return folder


def figure(output: str, name: str) -> float:
    return float(re.findall(rf"\b{name}[ =]+([\d.]+)", output)[-1])


def but_slow(names, quick: str) -> list:
    """All of the names, of which those but one are for --slow: each takes half a minute."""
    return [name if name == quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("arch", but_slow(TRANSLATION, "transformer"))
def test_translation(arch, data, tmp_path):
    model = ["--arch", arch, "--source-lang", "a", "--target-lang", "b", *TRANSLATION[arch]]
    run_module("fairseq_cli.train", [data / "pairs", *model, *TRAINING, "--save-dir", tmp_path])
    saved = [data / "pairs", "--path", tmp_path / "checkpoint_last.pt", "--max-tokens", 200, "--cpu"]
    assert figure(run_module("fairseq_cli.validate", saved).stdout, "valid_loss|loss") > 0
    if arch == "cmlm_transformer":
        saved += ["--iter-decode-max-iter", 2]
    result = run_module("fairseq_cli.generate", [*saved, "--gen-subset", "valid", "--beam", 2])
    assert len(re.findall(r"^H-\d+", result.stdout, re.M)) == 40


@pytest.mark.parametrize("arch", but_slow(LANGUAGE_MODELS, "lstm_lm"))
def test_language_models(arch, data, tmp_path):
    model = ["--task", "language_modeling", "--arch", arch, "--tokens-per-sample", 20]
    options = [*model, *LANGUAGE_MODELS[arch], *TRAINING, "--save-dir", tmp_path]
    if "--adaptive-softmax-cutoff" in options:
        options += ["--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp"]
    run_module("fairseq_cli.train", [data / "text", *options])
    saved = [data / "text", "--path", tmp_path / "checkpoint_last.pt", "--max-tokens", 200, "--cpu"]
    result = run_module("fairseq_cli.eval_lm", [*saved, "--gen-subset", "valid"])
    assert figure(result.stdout + result.stderr, "Perplexity:") > 1


def test_a_training_of_fairseqs_model_starts_as_fairseq_starts_it(data, tmp_path):
    """Without the file that it names, and where the last checkpoint is missing beside others."""
    model = ["--arch", "lstm", "--source-lang", "a", "--target-lang", "b", *TRANSLATION["lstm"]]
    line = [data / "pairs", *model, *TRAINING, "--save-dir", tmp_path]
    run_module("fairseq_cli.train", [*line, "--restore-file", "nowhere.pt", "--save-interval-updates", 1])
    (tmp_path / "checkpoint_last.pt").unlink()
    assert list(tmp_path.glob("checkpoint*.pt"))
    run_module("fairseq_cli.train", line)
    # A loss that no model of this package may have ends no other training.
    run_module("fairseq_cli.train", [*line, "--reset-optimizer", "--lr", 1e6, "--max-update", 4])
