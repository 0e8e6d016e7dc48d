"""The handwriting models of the paper's table, one architecture a row.

Ha = Ha, Dai, Le 2016 (arXiv 1609.09106), section 4.3: a mixture of 20 Gaussians, no window. "exact" is the
count that the printed sizes give; it equals the paper's figure unless a comment says otherwise.
"""

from rhhn_fairseq.models.options import Architecture

SOURCE = "Ha section 4.3, IAM-OnDB"


def _row(options: dict, parameters: int, loss: int, printed: str | None = None) -> Architecture:
    """``loss`` is the paper's validation loss in nats per sequence. Without a window any vocabulary fits."""
    return Architecture(
        options=options,
        parameters=parameters,
        vocab_size=1,
        source=SOURCE,
        valid=loss,
        figures=f"{printed or f'{parameters / 1e6:.2f} M'}; loss {loss:,} nats per sequence",
    )


def _ha(cell: str, hidden: int = 900, layers: int = 1, **hyper) -> dict:
    """Ha's sizes and dropout: keep 0.95 on the recurrent update and on the output, and between layers."""
    rates = {"output_dropout": 0.05, "recurrent_dropout": 0.05}
    rates |= {"layer_dropout": 0.05} if layers > 1 else {}
    return {"cell": cell, "hidden_size": hidden, "layers": layers} | hyper | rates


HYPER = {"hyper_size": 128, "hyper_embed_size": 4}

ARCHITECTURES = {
    "lstm_900_iam": _row(_ha("lstm"), 3_363_421, -1055),
    "lstm_1000_iam": _row(_ha("lstm", 1000), 4_137_121, -1048),
    "lstm_3x400_iam": _row(_ha("lstm", 400, 3), 3_258_121, -1068),
    "lstm_2x650_iam": _row(_ha("lstm", 650, 2), 5_161_771, -1135),
    "ln_lstm_900_iam": _row(_ha("ln_lstm"), 3_372_421, -1096),
    # The gains and shifts of layer normalisation are 10,000 numbers; the paper prints the LSTM's count.
    "ln_lstm_1000_iam": _row(_ha("ln_lstm", 1000), 4_147_121, -1106, printed="4.14 M"),
    "hyperlstm_900_iam": _row(_ha("hyperlstm", **HYPER), 3_941_181, -1162),
    "ln_hyperlstm_900_iam": _row(_ha("ln_hyperlstm", **HYPER), 3_951_461, -1067),
}

# No paper gives the number of epochs.
BASE_RECIPE = {
    "task": "handwriting",
    "criterion": "mixture_density",
    "optimizer": "adam",
    "lr": [1e-4],
    "lr_scheduler": "fixed",
    "clip_norm": 5.0,
    "batch_size": 32,
    "max_epoch": 100,
    "no_epoch_checkpoints": True,
}

# Of ``--arch handwriting``: legible words in a quarter of an hour of one core (docs/results/handwriting.md).
WORDS_RECIPE = BASE_RECIPE | {
    "hidden_size": 256,
    "mixtures": 8,
    "window": -1,
    "window_start": "first",
    "optimizer": "fused_adam",
    "lr": [0.005],
    "lr_scheduler": "polynomial_decay",
    "warmup_updates": 50,
    "total_num_update": 2000.0,
    "max_epoch": 8,
}
