"""Translation architectures: GNMT's sizes as the papers use them, and sizes for one machine.

Wu = Wu et al. 2016 (arXiv 1609.08144); Ha = Ha, Dai, Le 2016 (arXiv 1609.09106), section 4.4. Both report
WMT'14 En-Fr with 32,000 wordpieces on newstest2014 as tokenised BLEU. A row without a source is in no
paper.
"""

from rhhn_fairseq.models.recipes import Architecture, Recipe

# The sizes of the paper's hypernetwork are not printed; these come closest to its count.
HYPER = {"hyper_size": 192, "hyper_embed_size": 32}
# On one machine's corpora a model gets a few thousand updates, and its initialisation and the place of its
# attention decide what they achieve; experiments/notes/gnmt_initialisation.md has the measurements.
CELLS = {
    "lstm": {"cell": "lstm"},
    "hyperlstm": {"cell": "ln_hyperlstm", "init_cells": "own"},
    "rhn": {"cell": "rhn", "init_cells": "own", "rhn_depth": 2},
    "hyperrhn": {"cell": "hyperrhn", "rhn_depth": 2, "hyper_bias": 1.0},
}
SMALL_CELLS = {
    "lstm": {"forget_bias": 0.0},
    "hyperlstm": {"hyper_size": 128, "hyper_embed_size": 16, "forget_bias": 0.0},
    "rhn": {},
    "hyperrhn": {"hyper_size": 128},
}
SIZES = {
    "gnmt": {"lstm": {}, "hyperlstm": HYPER, "rhn": {}, "hyperrhn": {"hyper_size": 192}},
    "gnmt_iwslt": SMALL_CELLS,
    "gnmt_small": SMALL_CELLS,
}
SMALL = {
    "hidden_size": 512,
    "attention": "v2",
    "decoder_start": "encoder",
    "attention_score": "general",
    "context_to_output": True,
    "init_range": 0.1,
    "init_width": 512,
    "dropout": 0.3,
}
SHARED = {
    "gnmt": {},
    "gnmt_iwslt": SMALL | {"embed_dim": 512, "encoder_layers": 4, "decoder_layers": 4},
    "gnmt_small": SMALL
    | {"embed_dim": 256, "encoder_layers": 2, "decoder_layers": 2, "share_embeddings": "all"},
}

PRINTED = {
    "lstm_gnmt": {
        "printed": "280.7 M",
        "source": "Ha, WMT'14 En-Fr",
        "figures": "BLEU 38.95, log-perplexity 1.027",
    },
    "hyperlstm_gnmt": {
        "printed": "325.5 M",
        "source": "Ha, WMT'14 En-Fr",
        "figures": "BLEU 40.03, log-perplexity 0.993",
    },
}
COUNTS = {
    "lstm_gnmt": 280_859_904,
    "hyperlstm_gnmt": 325_345_408,
    "rhn_gnmt": 226_368_768,
    "hyperrhn_gnmt": 245_838_208,
    "lstm_gnmt_iwslt": 36_169_536,
    "hyperlstm_gnmt_iwslt": 43_695_808,
    "rhn_gnmt_iwslt": 29_363_008,
    "hyperrhn_gnmt_iwslt": 32_852_544,
    "lstm_gnmt_small": 13_993_792,
    "hyperlstm_gnmt_small": 17_723_584,
    "rhn_gnmt_small": 11_115_328,
    "hyperrhn_gnmt_small": 12_828_224,
}
VOCABULARIES = {"gnmt": 32_000, "gnmt_iwslt": 8_000, "gnmt_small": 8_000}

ARCHITECTURES = {
    f"{cell}_{size}": Architecture(
        options=CELLS[cell] | SHARED[size] | hyper,
        vocab_size=VOCABULARIES[size],
        parameters=COUNTS[f"{cell}_{size}"],
        **PRINTED.get(f"{cell}_{size}", {}),
    )
    for size, cells in SIZES.items()
    for cell, hyper in cells.items()
}

# Wu et al. 2016, section 8.3, without its second phase of plain gradient descent.
PAPER = {
    "task": "gnmt_translation",
    "criterion": "label_smoothed_cross_entropy",
    "optimizer": "adam",
    "lr": [2e-4],
    "lr_scheduler": "fixed",
    "clip_norm": 5.0,
    "batch_size": 128,
    "max_update": 1_000_000,
    "no_epoch_checkpoints": True,
}
# experiments/notes/gnmt_initialisation.md has the measurements behind these.
ONE_MACHINE = {
    "task": "gnmt_translation",
    "criterion": "label_smoothed_cross_entropy",
    "label_smoothing": 0.1,
    "optimizer": "adam",
    "adam_betas": "(0.9, 0.98)",
    "warmup_updates": 400,
    "clip_norm": 5.0,
    "max_tokens": 2000,
    "no_epoch_checkpoints": True,
}
RECIPES = {
    "gnmt": PAPER,
    "gnmt_iwslt": ONE_MACHINE | {"lr_scheduler": "inverse_sqrt", "lr": [1e-3], "max_epoch": 30},
    # 3,468 updates are 12 epochs of Multi30k.
    "gnmt_small": ONE_MACHINE
    | {"lr_scheduler": "polynomial_decay", "total_num_update": 3468.0, "lr": [2e-3], "max_epoch": 12}
    # The validation set is translated in seconds, also by a model that never ends a sentence.
    | {"eval_bleu": True, "eval_bleu_args": '{"beam": 1, "max_len_a": 1.5, "max_len_b": 10}'},
}
# ``--arch gnmt`` has the papers' sizes.
BASE_RECIPE = PAPER


def recipe_of(name: str) -> Recipe:
    """Returns the training options of the architecture."""
    _, size = name.split("_", 1)
    return RECIPES[size]
