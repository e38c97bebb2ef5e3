"""What the pages say runs: the code of those in docs/, in its order, and the commands of all.
(test_readme.py runs the code of README.md.)

A page's blocks run in one process. Above a block that needs it stands an HTML comment, which
readers do not see: `run first` with code to run before the block, or `not run:` with a reason.
"""

import inspect
import operator
import re
import shlex
from pathlib import Path

import gluon_syncbn as sbn
import gluon_syncbn.__main__ as files
import mxnet_launch.__main__ as launcher
import programs
import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *DOCS, *sorted(ROOT.glob("*/*/README.md"))]
PAGES += sorted(ROOT.glob("benchmarks/*.md"))
BLOCK = re.compile(
    r"(?:^<!-- (?:run first\n(?P<first>.*?)\n|not run: (?P<reason>[^\n]+) )-->\n+)?"
    r"^```python\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
# In fences, indented, or between single backquotes.
CODE = re.compile(r"^```(?:sh)?\n([\s\S]*?)^```$|^    (.*)$|`([^`\n]+)`", re.MULTILINE)
FILES = re.compile(r"(?<![\w./-])(?:benchmarks|docs|examples|src|tests|gluon_syncbn)/[\w./-]+\.\w+")
# Of the pages for developers, which name sources without their root.
SOURCES = re.compile(r"`(\w+/[\w/]+\.(?:py|cc|h|cuh|inc))`")
OPERATOR = ROOT / "src" / "operator"
ROOTS = [ROOT, ROOT / "gluon_syncbn", OPERATOR]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
DESIGN = (ROOT / "docs" / "design.md").read_text("utf-8")
REFERENCE = {p.stem: p.read_text("utf-8") for p in (ROOT / "docs" / "reference").glob("*.md")}


def name_of(path):
    return str(path.relative_to(ROOT))


def program_of(text):
    """The page with all but its code made empty, so that a traceback has the page's lines."""
    lines, blocks = [""] * (text.count("\n") + 1), list(BLOCK.finditer(text))
    marks = re.findall(r"^ *```py", text, re.MULTILINE)
    assert len(blocks) == len(marks), "a block of Python code is not found"
    for block in blocks:
        for part in ("first", "code"):
            if block["reason"] is None and block[part] is not None:
                start = text.count("\n", 0, block.start(part))
                code = block[part].splitlines()
                lines[start : start + len(code)] = code
    return "\n".join(lines).rstrip()


def commands_of(text):
    """The lines of the page's code, but for Python's."""
    text = BLOCK.sub("", text)
    return [line for found in CODE.findall(text) for line in "".join(found).splitlines()]


def is_accepted(parse, words):
    try:
        parse(words)
    except SystemExit as end:
        return end.code == 0  # --help
    return True


@pytest.mark.parametrize("page", [p for p in DOCS if program_of(p.read_text("utf-8"))], ids=name_of)
def test_code(page, tmp_path):
    program = tmp_path / f"{page.stem}.py"
    program.write_text(program_of(page.read_text("utf-8")) + "\nmx.nd.waitall()\n", "utf-8")
    environment = programs.users_environment()
    done = programs.run([program.name], seconds=250, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands(page, monkeypatch):
    monkeypatch.setattr("os.path.isfile", lambda path: True)  # The scripts are the user's.
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in commands_of(page.read_text("utf-8")):
        for target in re.findall(r"^(?:[A-Z_]+=\S+ )*make ([a-z-]+)", line):
            assert target in targets, line
        for module, rest in re.findall(r"python -m (gluon_syncbn(?:\.launch)?) (.+)", line):
            parse = launcher._parse if module.endswith(".launch") else files._parser().parse_args
            words = shlex.split(rest, comments=True)
            if "|" in words[0]:
                assert all(is_accepted(parse, [word, "--help"]) for word in words[0].split("|"))
            else:
                assert is_accepted(parse, words), line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page):
    for name in FILES.findall(page.read_text("utf-8")):
        assert (ROOT / name).exists() or "NAME" in name, name


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_sources_that_are_named_exist(page):
    for name in SOURCES.findall((ROOT / page).read_text("utf-8")):
        assert any((root / name).exists() for root in ROOTS), name


def table(text, head):
    """The rows of the table whose first line begins so: lists of cells, the head first."""
    (lines,) = re.findall(rf"^{re.escape(head)}.*\n(?:^\|.*\n)+", text, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines.splitlines()]
    return [rows[0], *rows[2:]]


def test_figures_of_speed_are_the_same_everywhere():
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    (head, *layers), (_, *steps) = (
        table(text, "| x | contexts | operator / "),
        table(text, "| where "),
    )
    counts = {
        "one context": "1 context",
        "two contexts": "2 contexts",
        "two processes": "2 processes",
    }
    ranges, place = [], None
    for row in table(text, "| with ")[1:-1]:
        place = row[0] or place
        what, to = (cell.split(",")[0].replace("the ", "") for cell in row[1:3])
        if what == "a training step":
            of_place = (cells for cells in steps if cells[0].startswith(counts[place]))
            found = [number for cells in of_place for number in (cells[2], cells[4])]
        else:
            column = head.index(f"{what} / {to}")
            found = [cells[column] for cells in layers if cells[1] == counts[place][0]]
        ends = [f"{end(map(float, found)):.2f}" for end in (min, max)]
        assert row[3].split(" to ") == sorted(set(ends)), row
        ranges.append((place, what, to, re.findall(r"[\d.]+", " ".join(row[3:]))))

    for page, sentence, places, what in (
        ("README.md", r"the operator takes (\S+) to (\S+) of", "one context", "operator"),
        ("README.md", r"step takes (\S+) to (\S+) times", "one context", "a training step"),
        ("README.md", r"and (\S+) to (\S+) times\s+as long", "two", "a training step"),
        ("docs/design.md", r"layouts,\s+(\S+) to (\S+) of", "one context", "block"),
        ("docs/design.md", r"training step (\S+) to (\S+) \(", "", "a training step"),
    ):
        (said,) = re.findall(sentence, (ROOT / page).read_text("utf-8"))
        numbers = [
            n
            for p, w, to, all in ranges
            if p.startswith(places) and w == what and to.endswith("`nn.BatchNorm`")
            for n in all
        ]
        assert said == (min(numbers), max(numbers)), (page, sentence)


def test_the_map_of_contributing_names_what_is_there():
    rows = re.findall(r"^\| .*? ?\| `(\S+)` \| .*?`(\w+)\W", CONTRIBUTING, re.MULTILINE)
    assert len(rows) > 12
    for name, function in rows:
        assert function in (ROOT / name).read_text("utf-8"), (name, function)


def test_reference_has_all_public_names():
    text = "".join(REFERENCE.values())
    found = re.findall(r"^\.\. auto(?:class|exception|function):: (\w+)$", text, re.MULTILINE)
    public = {*sbn.__all__, *sbn.distributed.__all__} - {"__version__", "distributed"}
    assert not public - set(found)


def first_sentence(text):
    """In Markdown, without Sphinx's roles."""
    text = re.sub(r":\w+:(?=`)", "", " ".join(text.split())).replace("``", "`")
    return re.match(r".+?\.(?= |$)", text)[0]


def signature_of(value):
    """Without annotations; of more than eight arguments, the first five. Errors have none."""
    if inspect.ismodule(value) or value.__name__.endswith("Error"):
        return ""
    parameters = inspect.signature(value).parameters.values()
    arguments = [str(parameter.replace(annotation=parameter.empty)) for parameter in parameters]
    if len(arguments) > 8:
        arguments[5:] = ["..."]
    return f"`({', '.join(arguments)})`"


def test_tables_of_the_reference_are_those_of_the_code():
    found = [
        [re.match(r"\[`([\w.]+)`\]\(#", name)[1], *cells]
        for page in REFERENCE.keys() - {"commands"}
        for name, *cells in table(REFERENCE[page], "| name ")[1:]
    ]
    public = {*sbn.__all__, *(f"distributed.{name}" for name in sbn.distributed.__all__)}
    values = {name: operator.attrgetter(name)(sbn) for name in public - {"__version__"}}
    assert sorted(found) == sorted(
        [name, signature_of(value), first_sentence(value.__doc__)] for name, value in values.items()
    )


def test_table_of_commands_is_that_of_their_help(capsys):
    expected = []
    for name in files._parser()._subparsers._group_actions[0].choices:
        with pytest.raises(SystemExit):
            files.main([name, "--help"])
        description = capsys.readouterr().out.split("\n\n")[1]
        expected.append([f"[`{name}`](#{name})", first_sentence(description)])
    assert table(REFERENCE["commands"], "| command ")[1:] == expected
