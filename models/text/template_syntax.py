"""What is changed in a chat template's syntax before it is compiled, so that nothing in it escapes the counting.

Compiled templates compare, slice and join with Python's own operators, which cannot be intercepted. Here these become calls of
filters, whose names begin with "_"; `models/text/template_sandbox.py` has them.
"""

from __future__ import annotations

from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer


class Generation(Extension):
    """Ignores `{% generation %}`, by which templates mark the assistant's part for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Bounds(NodeTransformer):
    """Makes what compiled templates do by themselves calls, and counts loops and macros."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:  # items that it leaves out are no steps
            node.test = nodes.And(self._call("_item", [nodes.Const(True)], node.lineno), node.test, lineno=node.lineno)
        return self._counted(node)

    def _counted(self, node: Any) -> nodes.Node:
        """Count each time that a body runs, with the characters that it writes of the template itself."""
        self.generic_visit(node)
        length = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.Output([self._call("_step", [nodes.Const(length)], node.lineno)], lineno=node.lineno))
        return node  # type: ignore[no-any-return]

    visit_Macro = visit_CallBlock = visit_Block = _counted

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("_join", node.nodes, node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if all(_is_cheap(operand) for operand in node.ops):
            return node
        args = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
        return self._call("_compare", [node.expr, *args], node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        cuts = [cut or nodes.Const(None) for cut in (node.arg.start, node.arg.stop, node.arg.step)]
        return self._call("_slice", [node.node, *cuts], node.lineno)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = self._call("_key", [node.key], node.lineno)
        return node

    def _refused(self, node: nodes.Node) -> nodes.Node:
        raise jinja2.exceptions.SecurityError("it asks for another file")

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _refused

    @staticmethod
    def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Expr:
        """Return a call as that of a filter, which is a plain call of Python's."""
        return nodes.Filter(arguments[0], name, arguments[1:], [], None, None, lineno=line)


def _is_cheap(operand: nodes.Operand) -> bool:
    """Return whether a comparison with an operand of the template's source works through little of the other."""
    found = operand.expr
    if operand.op in ("in", "notin"):
        return isinstance(found, nodes.List | nodes.Tuple) and all(isinstance(i, nodes.Const) for i in found.items)
    return isinstance(found, nodes.Const)
