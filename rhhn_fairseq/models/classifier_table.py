"""Architectures for the problems of ``--task synthetic``, one per cell and problem.

Ka = Kanuparthi et al. 2019 (arXiv 1810.03023) and their code: one LSTM of 128 units for copying and of 100
for MNIST. Le = Le et al. 2015 (arXiv 1504.00941): 100 units for adding. The other cells are in no paper:
they have the LSTM's width, and a highway network of depth 2 also has nearly its parameter count. The LSTM of
Ka has two biases per gate, of which only the sum matters; here it has one.
"""

from rhhn_fairseq.models.options import Architecture, Recipe

HYPER = {"hyper_size": 32, "hyper_embed_size": 4}
CELLS = {
    "elman": {"cell": "elman"},
    "lstm": {"cell": "lstm"},
    "hyperlstm": {"cell": "hyperlstm"} | HYPER,
    "rhn": {"cell": "rhn", "rhn_depth": 2},
    "hyperrhn": {"cell": "hyperrhn", "rhn_depth": 2, "hyper_size": 32},
}


def _row(cell: str, hidden: int, problem: str, parameters: int, source: str | None = None) -> Architecture:
    """Those for MNIST serve pmnist, digits and pdigits too; that for copying has scalar inputs."""
    return Architecture(
        options=CELLS[cell] | {"hidden_size": hidden},
        problem=problem,
        parameters=parameters,
        source=source,
        figures="a model of this size",
    )


ARCHITECTURES = {
    "lstm_copying": _row("lstm", 128, "copying", 67_721, "Kanuparthi et al. 2019, copying"),
    "hyperlstm_copying": _row("hyperlstm", 128, "copying", 96_169),
    "rhn_copying": _row("rhn", 128, "copying", 67_721),
    "hyperrhn_copying": _row("hyperrhn", 128, "copying", 80_521),
    "lstm_adding": _row("lstm", 100, "adding", 41_301, "Le et al. 2015, adding"),
    "hyperlstm_adding": _row("hyperlstm", 100, "adding", 64_949),
    "rhn_adding": _row("rhn", 100, "adding", 41_101),
    "hyperrhn_adding": _row("hyperrhn", 100, "adding", 52_117),
    "lstm_mnist": _row("lstm", 100, "mnist", 41_810, "Kanuparthi et al. 2019, sequential and permuted MNIST"),
    "hyperlstm_mnist": _row("hyperlstm", 100, "mnist", 65_330),
    "rhn_mnist": _row("rhn", 100, "mnist", 41_810),
    "hyperrhn_mnist": _row("hyperrhn", 100, "mnist", 52_762),
    "elman_xor": _row("elman", 16, "xor", 322),
}

SHARED = {
    "task": "synthetic",
    "criterion": "problem_loss",
    "optimizer": "adam",
    "lr": [1e-3],
    "lr_scheduler": "fixed",
    "clip_norm": 1.0,
    "batch_size": 100,
    "no_epoch_checkpoints": True,
}
MOST_ACCURATE = {"best_checkpoint_metric": "accuracy", "maximize_best_checkpoint_metric": True}
DIGITS = {"lr": [5e-3], "batch_size": 50, "max_epoch": 100} | MOST_ACCURATE
# By problem, because an architecture for one problem serves others as well.
RECIPES = {
    "copying": {"length": 100, "max_epoch": 600} | MOST_ACCURATE,
    "adding": {"length": 200, "batch_size": 50, "max_epoch": 50, "best_checkpoint_metric": "mse"},
    "mnist": {"max_epoch": 200} | MOST_ACCURATE,
    "pmnist": {"max_epoch": 200} | MOST_ACCURATE,
    "digits": DIGITS,
    "pdigits": DIGITS,
    "xor": {"lr": [0.01], "clip_norm": 0.0, "batch_size": 32, "epoch_updates": 250, "max_epoch": 2},
}
BASE_PROBLEM = "digits"


def recipe_of(problem: str) -> Recipe:
    """Returns the training options of a model for the problem."""
    return SHARED | {"problem": problem} | RECIPES.get(problem, {})
