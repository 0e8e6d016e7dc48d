"""The layers: one class for each cell in the registry."""

from rhhn_fairseq.cells.registry import CELLS, cell_options
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.nn.describing import STACK
from rhhn_fairseq.nn.recurrent import RecurrentLayer
from rhhn_fairseq.saving import KINDS, Kind, Tensors


class LSTM(RecurrentLayer):
    """LSTM layers (Hochreiter and Schmidhuber 1997).

    Starts with orthogonal recurrent matrices and a constant 1 added to the forget gate, where torch.nn.LSTM
    draws everything uniformly; ``from_torch`` takes over a torch.nn.LSTM with its weights.
    """

    cell = "lstm"
    state_names = ("h", "c")

    def __init__(self, input_size: int, hidden_size: int, *arguments, proj_size: int = 0, **options):
        if len(arguments) > 5:
            # The eighth argument of torch.nn.LSTM.
            proj_size, arguments = arguments[5], (*arguments[:5], *arguments[6:])
        if not isinstance(proj_size, int) or not 0 <= proj_size < max(1, hidden_size):
            raise UsageError(f"LSTM: proj_size={proj_size!r} is not possible, it must be below hidden_size")
        if proj_size:
            self.cell, options["memory_size"] = "projected_lstm", hidden_size
        super().__init__(input_size, proj_size or hidden_size, *arguments, **options)
        self.hidden_size, self.proj_size = hidden_size, proj_size
        self.options.pop("memory_size", None)


class ProjectedLSTM(RecurrentLayer):
    """LSTM layers with a projected output (Sak, Senior and Beaufays 2014): ``LSTM`` with ``proj_size``."""

    cell = "projected_lstm"
    state_names = ("h", "c")


class LNLSTM(RecurrentLayer):
    """LSTM layers with layer normalisation of the gates and of c (Ha, Dai, Le 2016)."""

    cell = "ln_lstm"
    state_names = ("h", "c")


class GRU(RecurrentLayer):
    """GRU layers (Cho et al. 2014), with the reset gate after the recurrent matrix as torch.nn.GRU has it."""

    cell = "gru"
    state_names = ("h",)


class LNGRU(RecurrentLayer):
    """GRU layers with one layer normalisation of the joint sum, as in DreamerV2 (Hafner et al. 2021)."""

    cell = "ln_gru"
    state_names = ("h",)


class MogrifierLSTM(RecurrentLayer):
    """LSTM layers whose input and state gate each other before every step (Melis et al. 2020)."""

    cell = "mogrifier_lstm"
    state_names = ("h", "c")


class NAS(RecurrentLayer):
    """Layers of the cell that a search found (Zoph and Le 2017)."""

    cell = "nas"
    state_names = ("h", "c")


class HyperLSTM(RecurrentLayer):
    """HyperLSTM layers (Ha, Dai, Le 2016, section 3.1): a small LSTM scales the weights of a large one.

    Beside h and c, the state has e and k, output and memory of the hypernetwork, ``hyper_size`` wide.
    """

    cell = "hyperlstm"
    state_names = ("h", "c", "e", "k")


class LNHyperLSTM(RecurrentLayer):
    """HyperLSTM layers with layer normalisation in both networks (Ha, Dai, Le 2016, and supercell).

    Beside h and c, the state has e and k, output and memory of the hypernetwork, ``hyper_size`` wide.
    """

    cell = "ln_hyperlstm"
    state_names = ("h", "c", "e", "k")


class HyperRNN(RecurrentLayer):
    """HyperRNN layers (Ha, Dai, Le 2016, section 3.1); e is the hypernetwork's state, ``hyper_size`` wide."""

    cell = "hyperrnn"
    state_names = ("h", "e")


class Hyper(RecurrentLayer):
    """Layers of a cell scaled by another (Suarez 2017): ``main_cell`` by ``hyper_cell``.

    The state has the entries of the main cell's, then those of the hypernetwork's.
    """

    cell = "hyper"

    def __init__(self, *arguments, **options):
        cells = cell_options(self.cell) | options
        main, inner = (layer_of(str(cells[part])).state_names for part in ("main_cell", "hyper_cell"))
        # The states of a cell of another package have no names.
        self.state_names = (*main, *(f"hyper_{name}" for name in inner)) if main and inner else ()
        super().__init__(*arguments, **options)


class RHN(RecurrentLayer):
    """Recurrent highway networks (Zilly et al. 2016), ``rhn_depth`` highway layers a time step."""

    cell = "rhn"
    state_names = ("s",)


class HyperRHN(RecurrentLayer):
    """Recurrent highway hypernetworks (Suarez 2017).

    Beside s, the state has e, that of the hypernetwork, ``hyper_size`` wide.
    """

    cell = "hyperrhn"
    state_names = ("s", "e")


class RolledHyperRHN(RecurrentLayer):
    """HyperRHNs whose hypernetwork is a part of the main network's state (Suarez 2017, section 4).

    Beside s, the state has e, that of the hypernetwork, ``hyper_size`` wide.
    """

    cell = "rolled_hyperrhn"
    state_names = ("s", "e")


class GridRHN(RecurrentLayer):
    """Recurrent highway networks with the horizontal connections of a grid (Suarez 2017, section 6).

    Beside s, the state has the states of the other layers, ``(rhn_depth - 1) * hidden_size`` wide.
    """

    cell = "grid_rhn"
    state_names = ("s", "layers")


class MLSTM(RecurrentLayer):
    """Multiplicative LSTM layers (Krause et al. 2016)."""

    cell = "mlstm"
    state_names = ("h", "c")


class MILSTM(RecurrentLayer):
    """LSTM layers with multiplicative integration (Wu et al. 2016)."""

    cell = "mi_lstm"
    state_names = ("h", "c")


class MinGRU(RecurrentLayer):
    """minGRU layers, whose gates read the input alone (Feng et al. 2024)."""

    cell = "mingru"
    state_names = ("h",)


class MinLSTM(RecurrentLayer):
    """minLSTM layers, whose gates read the input alone (Feng et al. 2024)."""

    cell = "minlstm"
    state_names = ("h",)


class Elman(RecurrentLayer):
    """Elman's network (1990), the plain recurrent network."""

    cell = "elman"
    state_names = ("h",)


class IRNN(RecurrentLayer):
    """Recurrent network of rectified linear units, at first the identity (Le, Jaitly and Hinton 2015)."""

    cell = "irnn"
    state_names = ("h",)


class Jordan(RecurrentLayer):
    """Jordan's network (1986), whose recurrence runs through its output."""

    cell = "jordan"
    state_names = ("y",)


def layer_of(cell: str) -> type[RecurrentLayer]:
    """Returns the layer class of a cell; for a cell that has none above, one is created.

    Args:
        cell: a name in ``rhhn_fairseq.cells.CELLS``.

    Raises:
        UsageError: no cell has that name.
    """
    cell_options(cell)
    for layer in RecurrentLayer.__subclasses__():
        if layer.cell == cell:
            return layer
    return type(cell, (RecurrentLayer,), {"cell": cell, "state_names": (), "__module__": __name__})


def __getattr__(name: str) -> type[RecurrentLayer]:
    """Returns the class that ``layer_of`` makes for a cell of another package; pickle looks it up here."""
    if name in CELLS:
        return layer_of(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _describe(layer: RecurrentLayer) -> dict:
    own = layer_of(type(layer).cell)
    if type(layer) is not own:
        raise UsageError(
            f"save_pretrained: a {type(layer).__name__} would be loaded as {own.__name__}; "
            "save its state_dict instead"
        )
    names = "input_size hidden_size num_layers batch_first dropout bidirectional lstm_state".split()
    if layer.context_size:
        names += ["context_size", "context_to"]
    if layer.initial_state != "zeros":
        names.append("initial_state")
    names += ["bias"] * (not layer.bias) + ["proj_size"] * bool(layer.proj_size)
    config = layer.stack.config
    joining = {name: getattr(config, name) for name in STACK if getattr(config, name) != STACK[name].default}
    described = {"cell": own.cell} | {name: getattr(layer, name) for name in names}
    return described | {"options": layer.options | joining}


def _build(config: dict, tensors: Tensors) -> RecurrentLayer:
    layer, options = layer_of(config.pop("cell")), config.pop("options")
    # Before this width followed the layer's, it was stored only where it was not the cell's default.
    if isinstance(width := cell_options(layer.cell).get("hyper_size"), int):
        options.setdefault("hyper_size", width)
    return layer(**options, **config)


KINDS["layer"] = Kind(_describe, _build)
