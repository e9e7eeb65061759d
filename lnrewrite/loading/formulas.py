"""The grammar of sizes and guards in a torch.export archive, which torch evaluates as Python (sympy, exec).

What is allowed is listed here and nothing else; a formula is also weighed before it is computed: the bits of its
largest number and its terms once multiplied out stay small. A size is what `sympy.srepr` writes (`Add(Symbol('s0'),
Integer(1))`, torch/_export/serde/serialize.py `_print_sympy`) or the same as arithmetic (`s0 + 1`); a guard is Python
over inputs (`L['x'].size()[0] >= 2`, torch/export/_unlift.py `_convert_guards_code_to_fn`), printed by
`ShapeGuardPythonPrinter` (torch/fx/experimental/symbolic_shapes.py, torch/utils/_sympy/printers.py).

Limits hold for the release that does the most work: torch 2.11 and 2.12 compute `2**shift` of a RShift and the
polynomial divisor of sums of any width (torch/utils/_sympy/functions.py). A guard also stands in a string in double
quotes, from 2.14 on as it is where it is nested too deep to print; so no formula has double quotes, `#` or a backslash.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

LENGTH, NODES, BITS, TERMS, EXPONENT, EXTREMES, DIVIDED = 20_000, 2_000, 4_096, 256, 64, 8, 20
"""Limits of one formula: letters, parts, bits of its largest number, terms once multiplied out, a power's exponent,
how many Max and Min (or values of one) a size has, for sympy compares each with each, and the terms of a dividend or
divisor of a size."""

_SUMS, _PRODUCTS = {"Add"}, {"Mul"}
_POWERS = {"Pow", "PowByNatural", "FloatPow", "LShift", "RShift"}
_DIVISIONS = {"FloorDiv", "CleanDiv", "CeilDiv", "IntTrueDiv", "FloatTrueDiv", "Mod", "PythonMod", "ModularIndexing"}
_OTHERS = re.compile(
    "Integer|Rational|Tuple|Max|Min|Abs"
    "|CeilToInt|FloorToInt|TruncToInt|TruncToFloat|RoundToInt|RoundDecimal|ToFloat|Identity|Where"
    "|Piecewise|ExprCondPair|IsNonOverlappingAndDenseIndicator|And|Or|Not|Eq|Ne|Ge|Gt|Le|Lt|Equality|Unequality"
    "|GreaterThan|StrictGreaterThan|LessThan|StrictLessThan|floor|ceiling|sqrt|log|min|max|abs|int|float|ceil|trunc|round"
    "|OpaqueUnaryFn_[a-z0-9]{1,20}|BitwiseFn_bitwise_(and|or|xor)"
)
_ASSUMPTIONS = {"positive", "nonnegative", "negative", "integer", "real", "finite", "zero", "nonzero", "evaluate"}
_CONSTANTS = {"true", "false", "oo", "inf", "int_oo", "nan"}
_SYMBOL = re.compile(r"[a-z]{1,4}\d{1,6}")
_WORD = re.compile(r"[\w.:/ -]{1,200}")
_NUMBER = re.compile(r"-?\d{1,40}(\.\d{0,40})?(e[+-]?\d{1,3})?")
_OF_TENSOR = {"size", "stride", "storage_offset", "shape", "ndim", "dtype"}
_FUNCTIONS = re.compile(
    r"math\.(floor|ceil|trunc|sqrt|isnan|a?(cos|sin|tan)|(cos|sin|tan)h|log2)|torch\.(sym_(float|max|min)|_sym_sqrt)"
)
_ADDED = (ast.Add, ast.Sub)
_DIVIDED = (ast.Div, ast.FloorDiv, ast.Mod, ast.RShift, ast.BitAnd, ast.BitOr)
_COMPARED = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Is, ast.IsNot)


class Forbidden(ValueError):
    """Report that a formula holds what no size and no guard holds, or that it is too much work."""


@dataclass(frozen=True, slots=True)
class _Weight:
    bits: int = 64
    terms: int = 1

    def __post_init__(self) -> None:
        if self.bits > BITS or self.terms > TERMS:
            raise Forbidden("too large")


def check_size(text: str) -> None:
    """Raise Forbidden unless `text` is a size of small weight."""
    _check(text, guard=False)


def check_guard(text: str) -> None:
    """Raise Forbidden unless `text` is a guard of small weight."""
    _check(text, guard=True)


def _check(text: str, guard: bool) -> None:
    tree = _parsed(text)
    extremes = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    extremes = [] if guard else [n for n in extremes if getattr(n.func, "id", "") in ("Max", "Min", "max", "min")]
    if max(len(extremes), *(len(n.args) for n in extremes), 0) > EXTREMES:
        raise Forbidden("too many extremes")
    try:
        _weigh(tree, guard)
    except RecursionError as error:
        raise Forbidden("nested too deep") from error


def _parsed(text: str) -> ast.expr:
    if len(text) > LENGTH or not text.isascii() or not text.isprintable() or {*'"#\\'} & {*text}:
        raise Forbidden("too long, or not plain text")
    try:
        tree = ast.parse(text, mode="eval").body
        nodes = list(ast.walk(tree))
        if len(nodes) > NODES:
            raise Forbidden("too many parts")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Forbidden("no arithmetic") from error
    for node in nodes:  # Python reads 1e-999999999 as 0.0, and sympy the number that is written
        a_float = isinstance(node, ast.Constant) and isinstance(node.value, float)
        if a_float and not _NUMBER.fullmatch(ast.get_source_segment(text, node) or ""):
            raise Forbidden("a number of that form")
    return tree


def _weigh(node: ast.expr, guard: bool) -> _Weight:
    """Return what an expression weighs; raise Forbidden for every form that is not listed here or below."""
    if (leaf := _leaf(node, guard)) is not None:
        return leaf
    if (parts := _one_term(node, guard)) is not None:
        return _joined(None, [_weigh(part, guard) for part in parts])
    match node:
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not(), operand=operand):
            return _weigh(operand, guard)
        case ast.BinOp(left=left, op=ast.Pow() | ast.LShift(), right=right):
            return _power(left, right, guard)
        case ast.BinOp(left=left, op=op, right=right):
            return _joined(op, [_weigh(left, guard), _weigh(right, guard)])
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return _call(name, args, keywords, guard)
    return _forbid(node)


def _leaf(node: ast.expr, guard: bool) -> _Weight | None:
    """Return what a constant, a symbol, or in a guard a property of an input weighs; None for what is none."""
    match node:
        case ast.Constant(value=bool() | None):
            return _Weight(1)
        case ast.Constant(value=int() as number) if number.bit_length() <= 64:
            return _Weight(max(1, number.bit_length()))
        case ast.Constant(value=float()):
            return _Weight()
        case ast.Constant(value=str() as text) if guard and _WORD.fullmatch(text):
            return _Weight()
        case ast.Name(id=name) if name in _CONSTANTS or not guard and _SYMBOL.fullmatch(name):
            return _Weight()
        case ast.Attribute(value=ast.Name(id="math"), attr="inf" | "nan") if guard:
            return _Weight()
    return _Weight() if guard and _is_of_input(node) else None


def _one_term(node: ast.expr, guard: bool) -> list[ast.expr] | None:
    """Return the parts of an expression that is one term whatever they are; None for what is none."""
    match node:
        case ast.BinOp(left=left, op=ast.BitXor(), right=right) if guard:  # in a size, sympy reads a power
            return [left, right]
        case ast.BoolOp(values=values) | ast.Tuple(elts=values):
            return values
        case ast.Compare(left=left, ops=ops, comparators=others) if all(isinstance(o, _COMPARED) for o in ops):
            return [left, *others]
        case ast.IfExp(test=test, body=body, orelse=other) if guard:
            return [test, body, other]
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name), args=args, keywords=[]) if guard:
            return args if _FUNCTIONS.fullmatch(f"{owner}.{name}") else None
    return None


def _forbid(node: ast.AST) -> _Weight:
    raise Forbidden(type(node).__name__)


def _joined(op: ast.operator | None, parts: list[_Weight]) -> _Weight:
    """Return the weight of a sum, a product, or (None) of a function of the parts, which is one term."""
    most = max((p.bits for p in parts), default=1)
    if op is None or isinstance(op, _DIVIDED):
        return _Weight(most, 1)
    if isinstance(op, _ADDED):
        return _Weight(most + len(parts).bit_length(), sum(p.terms for p in parts))
    if not isinstance(op, ast.Mult):
        return _forbid(op)
    terms = 1
    for part in parts:
        terms = _Weight(1, terms * part.terms).terms
    return _Weight(sum(p.bits for p in parts), terms)


def _power(base: ast.expr, exponent: ast.expr, guard: bool) -> _Weight:
    """Weigh a power or a shift: by a small whole number, or a small number to the power of one size."""
    weight = _weigh(base, guard)
    number = _whole(exponent)
    if number is None:
        plain = isinstance(exponent, ast.Name) or _is_symbol(exponent) or guard and _is_of_input(exponent)
        if not plain or _whole(base) is None:
            raise Forbidden("a power of a computed exponent")
        _weigh(exponent, guard)
        return _Weight()
    if abs(number) > EXPONENT:
        raise Forbidden("too large an exponent")
    return _Weight((weight.bits + 1) * max(1, abs(number)), weight.terms ** abs(number) if weight.terms > 1 else 1)


def _whole(node: ast.expr) -> int | None:
    """Return the whole number that is written out: `3`, `-3`, `Integer(-3)`; None for all else."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
            return -number
        case ast.Call(func=ast.Name(id="Integer"), args=[inner], keywords=[]):
            return _whole(inner)
    return None


def _is_symbol(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Symbol"


def _call(name: str, args: list[ast.expr], keywords: list[ast.keyword], guard: bool) -> _Weight:
    """Weigh a call of a listed function; `Symbol` and `Float` take a string, and only they."""
    if name in ("Symbol", "Float") and args and isinstance(args[0], ast.Constant):
        pattern = re.compile(r"\w{1,80}") if name == "Symbol" else _NUMBER
        known = {k.arg: k.value.value for k in keywords if isinstance(k.value, ast.Constant)}
        right = all(v in (True, False) for v in known.values()) and known.keys() <= _ASSUMPTIONS
        if name == "Float":
            right = known.keys() <= {"precision"} and known.get("precision", 53) == 53
        if len(args) == 1 and right and len(known) == len(keywords) and pattern.fullmatch(str(args[0].value)):
            return _Weight(BITS // 8 if name == "Float" else 64)
        raise Forbidden(name)
    if keywords:
        raise Forbidden(f"{name} with keywords")
    if name in _POWERS and len(args) == 2:
        return _power(args[0], args[1], guard)
    parts = [_weigh(a, guard) for a in args]
    if name in _DIVISIONS and any(part.terms > DIVIDED for part in parts):
        raise Forbidden("too wide a division")
    if name in _SUMS | _PRODUCTS:
        return _joined(ast.Add() if name in _SUMS else ast.Mult(), parts)
    if name in _DIVISIONS or _OTHERS.fullmatch(name):
        return _joined(None, parts)
    raise Forbidden(name[:40])


def _is_of_input(node: ast.expr) -> bool:
    """Return whether an expression is an input (`L['x'][0]`), or a size, stride, offset or dtype of one."""
    match node:
        case ast.Name(id="L"):
            return True
        case ast.Attribute(value=inner, attr=name) if name in _OF_TENSOR:
            return _is_of_input(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr=name), args=[], keywords=[]) if name in _OF_TENSOR:
            return _is_of_input(inner)
        case ast.Subscript(value=inner, slice=ast.Constant(value=int())):
            return _is_of_input(inner)
        case ast.Subscript(value=inner, slice=ast.Constant(value=str() as key)) if _WORD.fullmatch(key):
            return _is_of_input(inner)
    return False
