"""docs/troubleshooting.md has every message of the package, and none that is gone."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    re.match(r"\| `(.+?)` \| (.*) \| (.*) \|$", line)
    for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines()
    if line.startswith("| `")
]
HOLE = "…"
# What is called with the text of a message, and which of the arguments that is.
TELLERS = {"warning": 0, "fix": 1, "_give_up": 0}


def template(node):
    """The text of an expression, with a hole for each part that is not known."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\.3g|[a-z])", HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return HOLE


def python_messages(path):
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef) and function.name.startswith("_why_mxnet"):
            returned = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
            yield from ((node.lineno, template(node.value)) for node in returned)
        if isinstance(function, ast.Raise) and isinstance(function.exc, ast.Call):
            for argument in function.exc.args:
                yield function.lineno, template(argument)
        if isinstance(function, ast.Call) and isinstance(function.func, ast.Attribute):
            number = TELLERS.get(function.func.attr)
            if number is not None and len(function.args) > number:
                yield function.lineno, template(function.args[number])


def native_messages(path):
    text = re.sub(r"//.*", "", path.read_text())
    for found in re.finditer(r"\b(?:throw|fail)\b[^;]*?\((?=[^;]*\")[^;]*;", text):
        literals = re.findall(r'"((?:[^"\\]|\\.)*)"', re.sub(r'"\s*"', "", found.group()))
        yield text[: found.start()].count("\n") + 1, HOLE.join(["", *literals, ""])


def messages():
    for path in sorted((ROOT / "gluon_syncbn").glob("*.py")):
        if not path.name.startswith("_launch_child"):
            for line, text in python_messages(path):
                yield f"{path.name}:{line}", text
    for path in sorted((ROOT / "src" / "operator").glob("*.cc")):
        for line, text in native_messages(path):
            yield f"{path.name}:{line}", text


def says_something(text):
    return any(len(part.strip()) >= 8 for part in text.split(HOLE))


def pattern(cell):
    return re.compile(".*?".join(map(re.escape, re.split(r"\s*…\s*", cell))), re.DOTALL)


MESSAGES = [(where, text) for where, text in messages() if says_something(text)]


def test_there_are_messages():
    assert len(MESSAGES) > 120 and len(ROWS) > 120
    assert all(ROWS), "a row has not three columns, or no message in backticks"


@pytest.mark.parametrize("where, text", MESSAGES, ids=[where for where, _ in MESSAGES])
def test_every_message_is_explained(where, text):
    # A row of holes fits anything.
    cells = [row.group(1) for row in ROWS]
    found = [cell for cell in cells if pattern(cell).search(text) and says_something(cell)]
    assert found, f"{where} says {text!r}: add a row to docs/troubleshooting.md"


def test_no_explanation_is_left_over():
    sources = [*(ROOT / "gluon_syncbn").glob("*.py"), *(ROOT / "src" / "operator").glob("*.cc")]
    # Some are put together elsewhere, so all that stands in the sources counts.
    everything = "\n".join(path.read_text() for path in sources)
    everything = re.sub(r'"\s*\n?\s*(?:f|rb?)?"', "", everything) + "\n".join(
        text for _, text in MESSAGES
    )
    for row in ROWS:
        for part in re.split(r"\s*…\s*", row.group(1)):
            assert part in everything, f"nothing says {part!r} any more"


def test_every_explanation_has_a_cause():
    assert [row.group(1) for row in ROWS if not row.group(2).strip()] == []
