"""Model ``gnmt``: the encoder-decoder of GNMT with attention, on any registered cell.

Wu et al. 2016 (arXiv 1609.08144), section 3, and Ha, Dai, Le 2016 (arXiv 1609.09106), section 4.4. The first
encoder layer reads in both directions, residual connections start at the third layer of either side and
add the layer's input, and every decoder layer reads the context. See ``layers/decoder.py`` for the two forms
of the attention.

Shapes: S source time, T target time, B batch, V dictionary, H hidden, E embedding.
"""

import re
from dataclasses import dataclass
from typing import Optional

import torch
from fairseq.data import Dictionary
from fairseq.models import (
    FairseqEncoder,
    FairseqEncoderDecoderModel,
    FairseqIncrementalDecoder,
    register_model,
)
from torch import Tensor, nn

from rhhn_fairseq.cells.config import DEEPEST, WIDEST, check_fields, option
from rhhn_fairseq.cells.running import Cell
from rhhn_fairseq.compat.configuration import typed_config
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.attention import Memory
from rhhn_fairseq.layers.decoder import AttentionDecoder, DecoderConfig
from rhhn_fairseq.layers.decoding import decoding_step
from rhhn_fairseq.layers.stack import Stack, StackConfig
from rhhn_fairseq.models.gnmt_table import ARCHITECTURES, BASE_RECIPE, recipe_of
from rhhn_fairseq.models.options import (
    fairseq_dataclass,
    register_architectures,
    taken,
)
from rhhn_fairseq.models.recipes import HasRecipe
from rhhn_fairseq.ops.loop import State
from rhhn_fairseq.ops.matmul.gemm import affine

FINGERPRINT_BYTES = 32

# Options of both sides, and those of the decoder alone.
SIDES = ("cell", "hidden_size", "residual_from", "dropout_mask")
DECODER = (
    *("attention", "attention_score", "attention_size", "attention_normalised"),
    *("context_dropout", "context_to_output"),
)


@dataclass(frozen=True, kw_only=True)
class TranslationOptions:
    """What the model has besides its layers."""

    embed_dim: int = option(1024, help="width of the embeddings", low=1, high=WIDEST)
    encoder_layers: int = option(8, help="recurrent layers of the encoder", low=1, high=DEEPEST)
    decoder_layers: int = option(8, help="recurrent layers of the decoder", low=1, high=DEEPEST)
    decoder_start: str = option(
        "zeros",
        help="the decoder's first state: 'zeros', or the last state of the 'encoder', layer by layer",
        choices=("zeros", "encoder"),
    )
    share_embeddings: str = option(
        "none",
        help="'decoder': the output layer's table is the decoder's embeddings; 'all': the encoder's too, "
        "which needs a joint dictionary; 'none': three tables",
        choices=("none", "decoder", "all"),
    )
    dropout: float = option(0.2, help="dropout on the input of every layer", low=0, below=1)
    output_dropout: Optional[float] = option(
        None, help="dropout on the last decoder layer's output (default: --dropout)", low=0, below=1
    )
    init_range: float = option(
        0.04, help="initialise weights uniformly within plus and minus this; 0: each layer's default", low=0
    )
    init_width: int = option(
        0,
        help="the --hidden-size that --init-range is meant for; other widths use the range times "
        "sqrt(this / width), so that signals keep their size; 0: the same range for all",
        low=0,
    )
    init_cells: str = option(
        "uniform",
        help="initialisation of the cells: 'uniform' within --init-range, unless they have gains or scaling "
        "vectors, or each cell's 'own'",
        choices=("uniform", "own"),
    )
    init_attention: float = option(
        0.0, help="--init-range of the attention's maps of query and source; 0: --init-range", low=0
    )


GNMTConfig = fairseq_dataclass(
    "GNMTConfig",
    __name__,
    {DecoderConfig: (*SIDES, "bidirectional_layers", *DECODER), TranslationOptions: None},
    cell="lstm",
    hidden_size=1024,
    bidirectional_layers=1,
    residual_from=3,
)


class GNMTEncoder(FairseqEncoder):
    """Embeddings and a stack of recurrent layers; returns a ``Memory``.

    Args:
        start_sizes: widths of the decoder's state, which starts from the forward layers' last states,
            then zeros; None for a decoder that starts from zeros.
    """

    def __init__(self, dictionary, padding_idx, embedding: nn.Embedding, stack: Stack, memory, start_sizes):
        super().__init__(dictionary)
        self.padding_idx, self.start_sizes = padding_idx, start_sizes
        self.embed_tokens, self.stack, self.memory = embedding, stack, memory

    def forward(self, src_tokens: Tensor, src_lengths: Optional[Tensor] = None) -> Memory:
        """Returns the memory of source sentences [B, S], padded on either side; padding gives the lengths."""
        mask_SB = src_tokens.T != self.padding_idx
        # On the CPU this check is cheap and saves the masks; on a GPU it would wait for the device.
        needed = mask_SB.is_cuda or not bool(mask_SB.all())
        return self.read(src_tokens.T, mask_SB, padded=needed)

    def read(self, tokens_SB: Tensor, mask_SB: Tensor, padded: bool) -> Memory:
        """Returns the memory of source sentences; without padding the mask is the memory's alone."""
        values, last = self.stack(self.embed_tokens(tokens_SB), None, mask_SB if padded else None)
        start = None
        if self.start_sizes is not None:
            B = tokens_SB.shape[1]
            more = self.start_sizes[len(last) :]
            start = (*last[: len(self.start_sizes)], *(values.new_zeros(B, size) for size in more))
        return self.memory(values, mask_SB, start)

    def reorder_encoder_out(self, encoder_out: Memory, new_order: Tensor) -> Memory:
        """Returns the memory of the chosen rows."""
        return encoder_out.reorder(new_order)

    def max_positions(self):
        """Returns fairseq's number for no limit; the task's --max-source-positions limits what is read."""
        return 1_000_000


class GNMTDecoder(FairseqIncrementalDecoder):
    """Embeddings, recurrent layers with attention, and the output layer.

    Args:
        masked: whether padding may precede a sentence and so must not change the state.
        output: an ``OutputLayer``.
    """

    def __init__(self, dictionary, padding_idx, embedding, decoder: AttentionDecoder, output, masked=False):
        super().__init__(dictionary)
        self.padding_idx, self.masked = padding_idx, masked
        self.embed_tokens, self.decoder, self.output = embedding, decoder, output

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[Memory] = None,
        incremental_state=None,
        features_only: bool = False,
        **unused,
    ):
        """Returns the scores of the piece after each position.

        Args:
            prev_output_tokens: [B, T]. encoder_out: the encoder's memory.
            incremental_state: holds the recurrent state between calls; if it has one, only the last
                column of the tokens is read.

        Returns:
            logits [B, T, V] (or the last layer's outputs [B, T, H]); and a dictionary whose ``attn`` holds
            the attention weights [B, T, S].
        """
        cached = self.get_incremental_state(incremental_state, "state") if incremental_state else None
        step = self._features if features_only else self._scores
        if cached is None:
            y, weights, state = step(prev_output_tokens, encoder_out, None)
        else:
            order = cached.pop("order", None)
            state = tuple(cached[str(i)] for i in range(len(cached)))
            tokens = prev_output_tokens[:, -1:]
            y, weights, state = decoding_step(self, step, tokens, encoder_out, state, order)
        if incremental_state is not None:
            after = {str(i): tensor for i, tensor in enumerate(state)}
            self.set_incremental_state(incremental_state, "state", after)
        return y, {"attn": [weights]}

    def _features(self, tokens_BT: Tensor, memory: Memory, state: State | None):
        """Returns the last layer's outputs [B, T, H], attention weights and state."""
        mask_TB = tokens_BT.T != self.padding_idx if self.masked else None
        y, weights, state = self.decoder(self.embed_tokens(tokens_BT.T), memory, state, mask_TB)
        return y.transpose(0, 1), weights, state

    def _scores(self, tokens_BT: Tensor, memory: Memory, state: State | None):
        """Returns logits [B, T, V], attention weights and state."""
        y, weights, state = self._features(tokens_BT, memory, state)
        return self.output(y), weights, state

    def reorder_incremental_state(self, incremental_state, new_order: Tensor):
        """Records which rows beam search keeps; the next step reorders their state."""
        cached = self.get_incremental_state(incremental_state, "state")
        if cached is not None:
            before = cached.get("order")
            cached["order"] = new_order if before is None else before.index_select(0, new_order)
            self.set_incremental_state(incremental_state, "state", cached)


class OutputLayer(nn.Module):
    """Logits over the dictionary from the decoder's output.

    The table is the layer's own or that of the embeddings (``shared``, [V, E]). Before a shared table, an
    output of another width is mapped to E.
    """

    def __init__(self, hidden_size: int, vocab_size: int, shared: Optional[nn.Embedding] = None):
        super().__init__()
        self.project, self.shared = None, shared
        if shared is None:
            self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
            nn.init.xavier_uniform_(self.weight)
        elif shared.embedding_dim != hidden_size:
            self.project = nn.Parameter(torch.empty(hidden_size, shared.embedding_dim))
            nn.init.xavier_uniform_(self.project)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def factors(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the logits' factors: features [..., E or H], and the weight and bias that multiply them."""
        if self.project is not None:
            y = affine(y, self.project)
        return y, self.weight if self.shared is None else self.shared.weight, self.bias

    def forward(self, y: Tensor) -> Tensor:
        """Returns logits [..., V] from y [..., H]."""
        y, weight_VK, bias_V = self.factors(y)
        return affine(y, weight_VK.t(), bias_V)


@register_model("gnmt", dataclass=GNMTConfig)
class GNMT(HasRecipe, FairseqEncoderDecoderModel):
    """See the module's docstring.

    ``pieces_sha256`` holds the bytes of the SHA-256 of the sentencepiece model that segmented the training
    data, zeros if it is not known; a checkpoint of other pieces is refused.
    """

    RECIPE = BASE_RECIPE

    def __init__(self, encoder, decoder):
        super().__init__(encoder, decoder)
        # As int64, so that averaging checkpoints neither rounds nor overflows it.
        self.register_buffer("pieces_sha256", torch.zeros(FINGERPRINT_BYTES, dtype=torch.long))

    @classmethod
    def build_model(cls, cfg, task):
        """Builds the model for the task's dictionaries; UsageError names an invalid option."""
        config = typed_config(cfg, cls)
        masked = bool(getattr(task.cfg, "left_pad_target", False))
        model = cls._assemble(config, task.source_dictionary, task.target_dictionary, masked)
        fingerprint = getattr(task, "pieces_sha256", None)
        if fingerprint is not None:
            model.pieces_sha256.copy_(torch.tensor(list(bytes.fromhex(fingerprint))))
        return model

    @classmethod
    def for_vocabulary(cls, config, vocab_size: int):
        """Returns a model without data, for counting its parameters."""
        entries = Dictionary()
        entries.symbols = range(vocab_size)
        return cls._assemble(config, entries, entries, False)

    @classmethod
    def _assemble(cls, config, source, target, masked: bool):
        check_fields(config, flags=True)
        if config.share_embeddings == "all" and source.symbols != target.symbols:
            raise UsageError(
                f"--share-embeddings all: the dictionaries differ ({len(source)} and {len(target)} entries); "
                "prepare the data with a joint dictionary, or take --share-embeddings decoder"
            )
        source_table = _embedding(len(source), config.embed_dim, source.pad())
        target_table = source_table
        if config.share_embeddings != "all":
            target_table = _embedding(len(target), config.embed_dim, target.pad())
        stack = Stack(
            StackConfig(
                **_layers(config, config.encoder_layers), bidirectional_layers=config.bidirectional_layers
            )
        )
        dropped = config.dropout if config.output_dropout is None else config.output_dropout
        decoder_config = DecoderConfig(
            **_layers(config, config.decoder_layers, DECODER),
            output_dropout=dropped,
            context_size=stack.output_size,
        )
        decoder, memory = AttentionDecoder(decoder_config), decoder_config.build_memory()
        start_sizes = decoder.state_sizes if config.decoder_start == "encoder" else None
        shared = None if config.share_embeddings == "none" else target_table
        output = OutputLayer(config.hidden_size, len(target), shared)
        model = cls(
            GNMTEncoder(source, source.pad(), source_table, stack, memory, start_sizes),
            GNMTDecoder(target, target.pad(), target_table, decoder, output, masked),
        )
        if config.init_range:
            bound = config.init_range
            if config.init_width:
                bound *= (config.init_width / config.hidden_size) ** 0.5
            _init_uniform(model, bound, cells=config.init_cells == "uniform")
        if config.init_attention:
            weights = (memory.weight_m, decoder.bottom.attention.weight_q)
            for weight in filter(torch.is_tensor, weights):
                nn.init.uniform_(weight, -config.init_attention, config.init_attention)
        return model

    def forward(self, src_tokens, src_lengths, prev_output_tokens, features_only: bool = False):
        """Returns the decoder's result over whole sentences; see ``GNMTDecoder.forward``."""
        memory = self.encoder(src_tokens, src_lengths)
        return self.decoder(prev_output_tokens, memory, features_only=features_only)

    def prepare_for_inference_(self, cfg):
        """Prepares for a search; ``--retain-dropout`` leaves the model's parts, or those named, in training.

        Raises:
            UsageError: ``--retain-dropout-modules`` names a class that no part of the model has.
        """
        super().prepare_for_inference_(cfg)
        if not getattr(cfg.generation, "retain_dropout", False):
            return
        names = cfg.generation.retain_dropout_modules
        parts: dict[str, list[nn.Module]] = {}
        for part in list(self.modules())[1:]:
            parts.setdefault(type(part).__name__, []).append(part)
        # A command line gives the list as a text.
        for name in re.findall(r"\w+", names) if isinstance(names, str) else names or parts:
            if name not in parts:
                known = ", ".join(sorted(parts))
                raise UsageError(
                    f"--retain-dropout-modules {name}: no part of the model is one, choose from {known}"
                )
            for part in parts[name]:
                part.train()

    def diagnostics(self) -> dict[str, float]:
        """Returns figures about the weights for the log."""
        sides = {"encoder": self.encoder.stack, "decoder": self.decoder.decoder}
        return {
            f"{side}_{key}": value
            for side, tensor in sides.items()
            for key, value in tensor.diagnostics().items()
        }

    def load_state_dict(self, state_dict, *arguments, **keywords):
        """Loads a checkpoint's weights; UsageError if it was trained on other pieces."""
        check_pieces(state_dict.get("pieces_sha256"), self.pieces_sha256, "the data directory")
        return super().load_state_dict(state_dict, *arguments, **keywords)


def check_pieces(trained: Tensor | None, given: Tensor, where: object) -> None:
    """Raises UsageError for a checkpoint of other pieces than those ``where`` has; zeros are not known."""
    if trained is None or not trained.any() or not given.any() or torch.equal(trained.cpu(), given.cpu()):
        return
    names = [bytes(tensor.tolist()).hex()[:12] for tensor in (trained, given)]
    raise UsageError(
        "the checkpoint was trained on data cut with another sentencepiece model (SHA-256 "
        f"{names[0]}... there, {names[1]}... in {where}); use the one it was trained with"
    )


def _layers(config, layers: int, more: tuple[str, ...] = ()) -> dict:
    """Returns the fields of ``StackConfig`` for one side of the model, and those named in ``more``."""
    options = taken(config, (*SIDES, *more))
    # On a side with fewer layers there is no residual connection.
    options["residual_from"] *= config.residual_from <= layers
    rates = {"input_dropout": config.dropout, "layer_dropout": config.dropout}
    return options | rates | {"input_size": config.embed_dim, "layers": layers}


def _embedding(entries: int, width: int, padding_idx: int) -> nn.Embedding:
    table = nn.Embedding(entries, width, padding_idx)
    nn.init.normal_(table.weight, std=width**-0.5)
    with torch.no_grad():
        table.weight[padding_idx].zero_()
    return table


def _init_uniform(model: nn.Module, bound: float, cells: bool) -> None:
    """Draws all weights uniformly within the bound (Wu et al. 2016, section 8.3), those of cells if asked.

    Cells with gains or with weights that scale others keep their own initial values: near zero, these would
    multiply signals and gradients down to nothing. What a cell's options say of initial values still holds.
    """
    inner = [module for module in model.modules() if isinstance(module, Cell)]
    kept = {id(p) for cell in inner if not (cells and _is_plain(cell)) for p in cell.parameters()}
    for name, parameter in model.named_parameters():
        # The normalised attention's g has its own initial value.
        if id(parameter) not in kept and not name.endswith("attention.g"):
            nn.init.uniform_(parameter, -bound, bound)
    for cell in inner:
        if not kept & {id(p) for p in cell.parameters()}:
            cell.adjust_initial_values()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()


def _is_plain(cell: Cell) -> bool:
    """Whether a cell has matrices and biases only, none of which scale others."""
    if cell.keeps_initial_values:
        return False
    for name, _ in cell.named_parameters():
        words = name.split(".")
        if "scaling" in words or not any(word.startswith(("weight", "bias")) for word in words):
            return False
    return True


register_architectures(ARCHITECTURES, GNMT, GNMTConfig, recipe_of)
