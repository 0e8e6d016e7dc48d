"""Model ``handwriting``: the network of ``nn/strokes.py`` for fairseq.

Graves 2013 (arXiv 1308.0850), sections 4 and 5, and Ha, Dai, Le 2016 (arXiv 1609.09106), section 4.3. With
``--window K`` the model also reads a text, through Graves's window.
"""

from dataclasses import dataclass

import torch
from fairseq.models import BaseFairseqModel, register_model

from rhhn_fairseq.cells.config import option
from rhhn_fairseq.compat.recipes import typed_config
from rhhn_fairseq.data.strokes.normalisation import Normalisation
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.stack import StackConfig
from rhhn_fairseq.layers.window import WindowConfig
from rhhn_fairseq.models.handwriting_table import ARCHITECTURES, BASE_RECIPE, WORDS_RECIPE
from rhhn_fairseq.models.options import STACK, HasRecipe, fairseq_dataclass, register_architectures, taken
from rhhn_fairseq.nn.strokes import POINT_SIZE, StrokeNetwork

# Steps per character in IAM-OnDB, used where the data do not say.
POINTS_PER_SYMBOL = 25.0


@dataclass(frozen=True, kw_only=True)
class StrokeOptions:
    """What the model has besides its layers."""

    mixtures: int = option(20, help="Gaussians in the mixture", low=1)
    window: int = option(
        0, help="Gaussians of the window over the text; 0: no text is read, -1: 10 if lines have one", low=-1
    )


DECLARED = {StackConfig: STACK, StrokeOptions: None, WindowConfig: ("window_start",)}
HandwritingConfig = fairseq_dataclass("HandwritingConfig", __name__, DECLARED, cell="lstm", hidden_size=900)


@register_model("handwriting", dataclass=HandwritingConfig)
class Handwriting(HasRecipe, StrokeNetwork, BaseFairseqModel):
    """See ``StrokeNetwork``. A checkpoint is refused if the data's normalisation or characters differ.

    Args:
        config: checked sizes and options, a ``HandwritingConfig``.
        normalisation: of the offsets. symbols: the characters of the text, in the model's order.
        points_per_symbol: points per character in the training lines, 0 if they have no text.
    """

    RECIPE = WORDS_RECIPE
    # fairseq's own, which reads checkpoints.
    from_pretrained = vars(BaseFairseqModel)["from_pretrained"]

    def __init__(self, config, normalisation: Normalisation, symbols: str, points_per_symbol: float):
        stack = StackConfig(input_size=POINT_SIZE, **taken(config, STACK))
        window = config.window if config.window >= 0 else 10 * bool(symbols)
        if window:
            if not symbols:
                raise UsageError(
                    f"--window {window} reads the text of each line, and the training lines have "
                    "none; prepare a corpus with texts, or leave --window out"
                )
            reading = {"symbols": len(symbols), "window": window, "window_start": config.window_start}
            reading["points_per_symbol"] = points_per_symbol or POINTS_PER_SYMBOL
            stack = WindowConfig(input_size=POINT_SIZE, **taken(config, STACK), **reading)
        super().__init__(stack, normalisation, symbols if window else "", config.mixtures)

    @classmethod
    def build_model(cls, cfg, task):
        """Builds the model for the task's data; UsageError names an invalid option."""
        config = typed_config(cfg, cls)
        manifest = task.manifest
        return cls(config, manifest.normalisation, manifest.symbols, manifest.points_per_symbol)

    @classmethod
    def for_vocabulary(cls, config, vocab_size: int):
        """Returns a model without data, to count its parameters; its window has ``vocab_size`` symbols."""
        symbols = "".join(map(chr, range(32, 32 + vocab_size)))
        return cls(config, Normalisation((0.0, 0.0), (1.0, 1.0)), symbols, POINTS_PER_SYMBOL)

    def load_state_dict(self, state_dict, *arguments, **keywords):
        """Loads a checkpoint's weights; UsageError if its data had other characters or statistics."""
        theirs = "".join(map(chr, state_dict["symbol_codes"].tolist()))
        if theirs != self.symbols:
            raise UsageError(
                f"the checkpoint reads other characters ({len(theirs)} there, {len(self.symbols)} in this "
                "model); use the data directory and the --window it was trained with"
            )
        if not torch.equal(state_dict["statistics"].cpu(), self.statistics.cpu()):
            trained = Normalisation.from_bits(state_dict["statistics"].cpu().numpy())
            here = self.normalisation
            raise UsageError(
                f"the checkpoint was trained on offsets of mean {trained.mean} and deviation {trained.std}, "
                f"the data have {here.mean} and {here.std}; prepare them with --statistics-of the "
                "directory of its training"
            )
        return super().load_state_dict(state_dict, *arguments, **keywords)


register_architectures(ARCHITECTURES, Handwriting, HandwritingConfig, lambda name: BASE_RECIPE)
