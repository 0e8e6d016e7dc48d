"""Model ``char_lm``: the network of ``nn/character.py`` for fairseq.

Shapes: T time, B batch, V symbols that occur, D entries of the dictionary.
"""

from dataclasses import dataclass
from typing import Optional

from fairseq.models import BaseFairseqModel, register_model
from torch import Tensor

from rhhn_fairseq.cells.config import WIDEST, option
from rhhn_fairseq.compat.recipes import typed_config
from rhhn_fairseq.data.text.vocabulary import PAD, UNK, CharVocabulary, escape
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.stack import StackConfig
from rhhn_fairseq.models.char_lm_table import ARCHITECTURES, BASE_RECIPE, recipe_of
from rhhn_fairseq.models.options import STACK, HasRecipe, fairseq_dataclass, register_architectures, taken
from rhhn_fairseq.nn.character import CharacterNetwork

LAYERS = (*STACK, "weight_drop")


@dataclass(frozen=True, kw_only=True)
class CharacterOptions:
    """What the model has besides its layers."""

    embed_dim: int = option(0, help="width of the symbol embeddings; 0: one-hot input", low=0, high=WIDEST)
    embedding_dropout: float = option(
        0.0,
        help="probability of dropping a symbol's embedding, the same symbols in the whole batch",
        low=0,
        below=1,
    )
    output_init: str = option(
        "glorot",
        help="output layer and embeddings: 'glorot' with zero bias, or 'orthogonal' with uniform bias",
        choices=("glorot", "orthogonal"),
    )


CharLMConfig = fairseq_dataclass(
    "CharLMConfig",
    __name__,
    {StackConfig: LAYERS, CharacterOptions: None},
    cell="ln_hyperlstm",
    hidden_size=1000,
)


@register_model("char_lm", dataclass=CharLMConfig)
class CharLM(HasRecipe, CharacterNetwork, BaseFairseqModel):
    """Character language model; see ``CharacterNetwork``.

    Args:
        config: checked sizes and options, a ``CharLMConfig``.
        vocabulary: the symbols that occur.
    """

    RECIPE = BASE_RECIPE
    # fairseq's own, which reads checkpoints.
    from_pretrained = vars(BaseFairseqModel)["from_pretrained"]

    def __init__(self, config, vocabulary):
        inputs = config.embed_dim or len(vocabulary.model_indices())
        stack = StackConfig(input_size=inputs, **taken(config, LAYERS))
        orthogonal = config.output_init == "orthogonal"
        super().__init__(stack, vocabulary, config.embed_dim, config.embedding_dropout, orthogonal)

    @classmethod
    def build_model(cls, cfg, task):
        """Builds the model for the task's vocabulary; UsageError names an invalid option."""
        config = typed_config(cfg, cls)
        return cls(config, task.vocabulary)

    @classmethod
    def for_vocabulary(cls, config, vocab_size: int):
        """Returns a model of ``vocab_size`` symbols without data, for counting its parameters."""
        symbols = [escape(chr(code)) for code in range(256, 256 + vocab_size)]
        return cls(config, CharVocabulary(symbols, newline_occurs=False))

    def forward(self, src_tokens: Tensor, mask: Optional[Tensor] = None, carry=None):
        """Calls the network; see there.

        Args:
            carry: a ``Carry`` that holds the state to start from and receives the last one; None for zeros.
        """
        state = None if carry is None else carry.read(src_tokens.device)
        logits, extra = super().forward(src_tokens, mask, state)
        after = extra.pop("state")
        if carry is not None:
            carry.write(after)
        return logits, extra

    def get_targets(self, sample, net_output):
        """Returns the targets [B, T]; unknown symbols are padding, which fairseq's criterions skip."""
        target = sample["target"]
        return target.masked_fill(target == UNK, PAD)

    def get_normalized_probs(self, net_output, log_probs, sample=None):
        """Returns probabilities or log-probabilities [B, T, D]; a sample's tally, if any, counts them."""
        logits = net_output[0].float()
        scores = logits.log_softmax(dim=-1) if log_probs else logits.softmax(dim=-1)
        if sample is not None and "tally" in sample:
            sample["tally"].see(id(self), scores, sample["target"], log_probs)
        return scores

    def load_state_dict(self, state_dict, *arguments, **keywords):
        """Loads a checkpoint's weights; UsageError if it was trained on other symbols."""
        theirs, ours = state_dict["symbol_codes"].tolist(), self.symbol_codes.tolist()
        if theirs == ours:
            return super().load_state_dict(state_dict, *arguments, **keywords)
        raise UsageError(
            f"the checkpoint was trained on other symbols ({len(theirs)} there, {len(ours)} in the data); "
            "use the data directory it was trained with"
        )


register_architectures(ARCHITECTURES, CharLM, CharLMConfig, recipe_of)
