"""An option is declared once, by the layer that has it: the command line and the checks read that."""

import argparse
import dataclasses
import re

import pytest

from rhhn_fairseq.cells.config import check_fields
from rhhn_fairseq.errors import UsageError
from rhhn_fairseq.layers.decoder import DecoderConfig
from rhhn_fairseq.models.char_lm import CharLMConfig
from rhhn_fairseq.models.classifier import ClassifierConfig
from rhhn_fairseq.models.gnmt import GNMT, GNMTConfig
from rhhn_fairseq.models.handwriting import HandwritingConfig
from rhhn_fairseq.models.options import CELL_OPTIONS, flag
from rhhn_fairseq.tasks.char_lm import CharLMTaskConfig
from rhhn_fairseq.tasks.gnmt_translation import GNMTTranslationConfig
from rhhn_fairseq.tasks.handwriting import HandwritingTaskConfig
from rhhn_fairseq.tasks.synthetic import SyntheticTaskConfig


def outside(limits) -> list:
    """Values that an option's limits exclude."""
    values = ["nonsense"] if limits["choices"] else []
    values += [limits["low"] - 1] if limits["low"] is not None else []
    values += [limits["high"] + 1] if limits["high"] is not None else []
    return values + ([limits["below"]] if limits["below"] is not None else [])


@pytest.mark.parametrize(
    "config, least",
    [
        (CharLMConfig, 17),
        (GNMTConfig, 26),
        (HandwritingConfig, 13),
        (ClassifierConfig, 12),
        (CharLMTaskConfig, 7),
        (GNMTTranslationConfig, 6),
        (HandwritingTaskConfig, 5),
        (SyntheticTaskConfig, 4),
    ],
)
def test_a_value_outside_of_a_declared_limit_is_refused_by_its_option(config, least):
    check_fields(config(), flags=True)
    count = 0
    for spec in dataclasses.fields(config):
        for value in outside(spec.metadata) if "low" in spec.metadata else ():
            count += 1
            with pytest.raises(
                UsageError, match=f"^{re.escape(flag(spec.name))} {re.escape(str(value))} is "
            ):
                check_fields(config(**{spec.name: value}), flags=True)
    assert count >= least


def test_the_command_line_says_what_the_layer_declares():
    parser = argparse.ArgumentParser()
    GNMT.add_args(parser)
    shown = {action.dest: action.help for action in parser._actions}
    declared = {spec.name: spec for spec in dataclasses.fields(DecoderConfig)}
    for name in ("attention", "attention_score", "attention_size", "context_dropout", "context_to_output"):
        assert shown[name] == declared[name].metadata["help"]
        assert getattr(GNMTConfig(), name) == declared[name].default


def test_models_have_no_option_that_hides_their_input():
    """The last columns of a model's input are symbols, not a condition for the hypernetwork."""
    assert "hyper_size" in CELL_OPTIONS and "hyper_context" not in CELL_OPTIONS
