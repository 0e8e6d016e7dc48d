"""Makes the golden checkpoints that ``tests/cells/test_golden.py`` loads.

The files beside this script were made by the code of commit 9966edc, before cells and kernels were rebuilt.
They show that checkpoints of that time still load and still mean the same. Files of later code would only
show that this code agrees with itself, so the script never replaces a file. It adds families that have none.

    python tests/golden/make.py            makes the families that have no file yet
    python tests/golden/make.py --list     names them all

Each model trains for 20 updates by fairseq-train's main function: its weights have left their initial values,
and the checkpoint is fairseq's own. The optimizer's state is removed, because only resuming needs it. Names
replace the paths in the configuration.
"""

import argparse
import copy
import sys
import tempfile
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import fairseq_cli.preprocess  # noqa: E402
import fairseq_cli.train  # noqa: E402
from fairseq.checkpoint_utils import load_model_ensemble_and_task  # noqa: E402
from helpers import golden_models, tiny_translation  # noqa: E402

USER_DIR = str(TESTS.parent / "rhhn_fairseq")

HYPER = "--hyper-size 4 --hyper-embed-size 2"
RHN = "--rhn-depth 2 --first-step skip"
HYPER_RHN = f"{RHN} --hyper-size 4 --hyper-rank 1"
OPTIONS = {
    "ln_hyperlstm": "--hyper-size 8 --hyper-embed-size 2",
    "hyperlstm": HYPER,
    "hyperrnn": HYPER,
    "rhn": RHN,
    "hyperrhn": HYPER_RHN,
}

COMMON = "--cpu --seed 3 --optimizer adam --lr 0.02 --clip-norm 1 --log-format none --num-workers 0"
COMMON += " --max-update 20 --disable-validation --no-epoch-checkpoints"

TASKS = {
    "char_lm": "--task char_lm --arch char_lm --criterion char_cross_entropy --tokens-per-sample 12 "
    "--batching lanes --batch-size 4 --hidden-size 12",
    "gnmt": "--task gnmt_translation --source-lang en --target-lang fr --arch gnmt --batch-size 16 "
    "--criterion label_smoothed_cross_entropy --hidden-size 6 --embed-dim 5 --encoder-layers 2 "
    "--decoder-layers 2",
    "handwriting": "--task handwriting --arch handwriting --criterion mixture_density --batch-size 6 "
    "--hidden-size 7 --mixtures 2 --max-points 40",
    "classifier": "--task synthetic --arch classifier --criterion problem_loss --batch-size 8 "
    "--valid-examples 20 --epoch-updates 20 --length 6 --hidden-size 7",
}

# A third of the test's tolerance, so that other float32 arithmetic has as much room.
AGREEMENT = 3e-7

CELLS = (
    "lstm ln_lstm gru elman irnn jordan hyperlstm ln_hyperlstm hyperrnn rhn hyperrhn mlstm mi_lstm"
).split()

# The name of a family, the kind of data and then what sets it apart, and the options that make it so.
FAMILIES = {f"char_lm-{cell}": f"--cell {cell}" for cell in CELLS}
FAMILIES |= {
    "char_lm-rhn_full": "--cell rhn --rhn-depth 2 --first-step full",
    "char_lm-hyperrhn_full": "--cell hyperrhn --rhn-depth 2 --hyper-size 4 --hyper-rank 1",
    "char_lm-embedded_2layer": "--cell ln_hyperlstm --layers 2 --embed-dim 5 --residual-from 2",
    "gnmt-paper_lstm": "--cell lstm --attention paper",
    "gnmt-paper_ln_hyperlstm": "--cell ln_hyperlstm --attention paper",
    "gnmt-paper_hyperrhn": "--cell hyperrhn --attention paper",
    "gnmt-v2_lstm": "--cell lstm --attention v2 --attention-normalised --decoder-start encoder",
    "gnmt-v2_ln_hyperlstm": "--cell ln_hyperlstm --attention v2",
    "gnmt-v2_hyperrhn": "--cell hyperrhn --attention v2",
    "handwriting-lstm": "--cell lstm",
    "handwriting-ln_hyperlstm": "--cell ln_hyperlstm",
    "handwriting-lstm_window": "--cell lstm --window 2",
    "handwriting-hyperrhn_window": "--cell hyperrhn --window 2",
    "classifier-lstm": "--cell lstm --problem adding",
    "classifier-hyperrhn": "--cell hyperrhn --problem copying",
    "classifier-gru_both_ways": "--cell gru --bidirectional-layers 1 --problem adding",
}


def write_data(kind: str, folder: Path) -> str | None:
    """The data directory; for translation with sentences, which only training needs."""
    data = golden_models.data_directory(kind, folder)
    if kind == "gnmt":
        sentences = tiny_translation.sentences("train")
        (folder / "train.en").write_text("\n".join(sentences) + "\n")
        (folder / "train.fr").write_text("\n".join(map(tiny_translation.french, sentences)) + "\n")
        dictionaries = ["--srcdict", f"{data}/dict.en.txt", "--tgtdict", f"{data}/dict.fr.txt"]
        binarised = str(folder / "binary")
        run(
            fairseq_cli.preprocess,
            ["--trainpref", f"{folder}/train", "-s", "en", "-t", "fr", "--destdir", binarised, *dictionaries],
        )
        return binarised
    return data


def run(program, arguments: list[str]) -> None:
    """One of fairseq's programs, in this process."""
    sys.argv[1:] = arguments
    program.cli_main()


def train(name: str, data: str | None, folder: Path) -> dict:
    """Trains a family; its checkpoint without the optimizer's state and without paths."""
    cell = FAMILIES[name].split()[1]
    sizes = OPTIONS.get(cell, "") if "_full" not in name else ""
    options = f"{TASKS[golden_models.kind_of(name)]} {COMMON} {FAMILIES[name]} {sizes}".split()
    paths = ["--user-dir", USER_DIR, "--save-dir", str(folder)]
    run(fairseq_cli.train, [*([data] if data else []), *options, *paths])
    state = torch.load(folder / "checkpoint_last.pt", weights_only=True)
    state["last_optimizer_state"] = None
    state["cfg"]["common"]["user_dir"] = "rhhn_fairseq"
    state["cfg"]["checkpoint"]["save_dir"] = "checkpoints"
    for section in state["cfg"].values():
        if isinstance(section, dict) and data and section.get("data") == data:
            section["data"] = "data"
    check_without_paths(state["cfg"], (str(folder.parent), str(TESTS.parent)))
    return state


def check_without_paths(values, paths: tuple[str, ...]) -> None:
    """Raises AssertionError if a configuration still names a directory of this machine."""
    assert not any(path in repr(values) for path in paths), values


def padded_tokens(lowest: int, size: int, lengths: list[int], padding: int, left: bool = False):
    """Random tokens of several lengths [B, T], padded."""
    T = max(lengths)
    tokens = torch.full((len(lengths), T), padding)
    for row, length in enumerate(lengths):
        drawn = torch.randint(lowest, size, (length,))
        tokens[row, T - length :] = drawn if left else tokens[row, T - length :]
        if not left:
            tokens[row, :length] = drawn
    return tokens


def batch(kind: str, task, model) -> dict:
    """Inputs of the model: random, of different lengths where it reads padded batches."""
    lengths = torch.tensor([9, 4, 7])
    mask = torch.arange(9) < lengths.unsqueeze(1)
    if kind == "char_lm":
        return {"src_tokens": padded_tokens(4, len(task.source_dictionary), [9, 4, 7], 1), "mask": mask}
    if kind == "gnmt":
        entries = len(task.source_dictionary), len(task.target_dictionary)
        return {
            "src_tokens": padded_tokens(4, entries[0], [9, 4, 7], 1, left=True),
            "src_lengths": lengths,
            "prev_output_tokens": padded_tokens(4, entries[1], [5, 8, 3], 1),
        }
    if kind == "handwriting":
        pen = (torch.rand(3, 9, 1) < 0.2).float()
        inputs = {"points": torch.cat([torch.randn(3, 9, 2), pen], -1), "mask": mask}
        if model.window:
            inputs["text"] = padded_tokens(0, len(model.symbol_codes), [3, 2, 4], -1)
        return inputs
    return {"inputs": torch.randn(3, 9, task.problem.input_size)}


def make(name: str, folder: Path) -> None:
    """Writes the two files of a family."""
    kind = golden_models.kind_of(name)
    data = write_data(kind, folder / "corpus")
    state = train(name, data, folder / "checkpoints")
    torch.save(state, golden_models.checkpoint(name))
    (model,), _, task = load_model_ensemble_and_task(
        [str(golden_models.checkpoint(name))], {"data": data} if data else None
    )
    inputs, logits = well_conditioned(kind, task, model.eval())
    torch.save({"inputs": inputs, "logits": logits}, golden_models.expected(name))


def well_conditioned(kind: str, task, model) -> tuple[dict, torch.Tensor]:
    """A batch and its logits in float32, which float64's agree with.

    Layer normalisation divides by the deviation of a few units. Where that is tiny, any order of sums gives
    other digits, and the comparison would show rounding in place of mistakes.
    """
    double = copy.deepcopy(model).double()
    for seed in range(100):
        torch.manual_seed(seed)
        inputs = batch(kind, task, model)
        with torch.no_grad():
            logits = golden_models.logits_of(model(**inputs))
            exact = golden_models.logits_of(double(**as_double(inputs)))
        if torch.allclose(logits.double(), exact, rtol=0, atol=AGREEMENT):
            return inputs, logits
    raise AssertionError(f"no batch of 100 has logits that float32 and float64 agree on to {AGREEMENT}")


def as_double(inputs: dict) -> dict:
    return {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="makes the golden checkpoints that are missing")
    parser.add_argument("--list", action="store_true", help="only name the families")
    options = parser.parse_args()
    for name in FAMILIES:
        if options.list:
            print(name)
        elif not golden_models.expected(name).exists():
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "corpus").mkdir()
                make(name, Path(folder))


if __name__ == "__main__":
    main()
