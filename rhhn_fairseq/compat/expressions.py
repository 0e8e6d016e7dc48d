"""Strings in a configuration are data: fairseq's `eval` of them is replaced by a small evaluator."""

import ast
import operator
import sys

from rhhn_fairseq.errors import UsageError

# The most members of a list that an expression repeats.
LONGEST = 10_000
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def evaluate(text: str):
    """Returns the value of an expression of literals and + - * /, such as "[(512, 3)] * 15".

    Raises UsageError for everything else: names, calls, attributes, comprehensions. Like the builtin,
    it raises TypeError for arguments that are no strings; some callers rely on that.
    """
    if not isinstance(text, str):
        raise TypeError(f"an expression must be a string, not {type(text).__name__}")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise UsageError(
            f"{text!r} in the configuration is not made of numbers, strings, lists, tuples, "
            "dictionaries and + - * / only"
        ) from error


def _value(node: ast.expr):
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple():
            return tuple(map(_value, node.elts))
        case ast.List():
            return list(map(_value, node.elts))
        case ast.Set():
            return set(map(_value, node.elts))
        case ast.Dict() if None not in node.keys:
            return dict(zip(map(_value, node.keys), map(_value, node.values), strict=True))
        case ast.UnaryOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](_value(node.operand))
        case ast.BinOp() if type(node.op) in OPERATORS:
            left, right = _value(node.left), _value(node.right)
            for many, times in ((left, right), (right, left)):
                if hasattr(many, "__len__") and isinstance(times, int) and len(many) * times > LONGEST:
                    raise ValueError(many)
            return OPERATORS[type(node.op)](left, right)
    raise ValueError(ast.dump(node))


def configuration_is_data() -> bool:
    """A checkpoint holds its model's configuration, and several of fairseq's models `eval` parts of it.

    So a file could run code although its pickle holds none (`decoder_layers` of `fconv_lm`,
    `adaptive_softmax_cutoff` of many models through `fairseq.utils.eval_str_list`). A module's own
    name shadows the builtin, so each fairseq module gets an `eval` that supports only literals and
    arithmetic, which is all that fairseq's defaults and documentation use. The command-line programs
    (`fairseq_cli`) evaluate what the user typed and are left unchanged.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("fairseq.") and "eval" not in vars(module):
            module.eval = evaluate
    return True
