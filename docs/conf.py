"""The site that `make docs` builds. Its pages are all Markdown files of the repository, so the
source folder is the repository's root, and links between files hold here as they do there. The home
page is README.md; docs/index.md is added to its end, and has the sidebar."""

import html
import os
import re
import shutil
import sys
from pathlib import Path

import ziamath
from docutils import nodes
from sphinx.errors import SphinxError

ROOT = Path(__file__).resolve().parents[1]
# What is on a page may not come from elsewhere: the site works offline. Links may lead there.
FROM_ELSEWHERE = re.compile(
    r"""<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)\s*=\s*["']?(?:https?:)?//[^\s>]*"""
    r"""|(?:url\(|@import)\s*["']?(?:https?:)?//[^\s)]*"""
)

project = author = "gluon_syncbn"
version = release = re.search(r'"(.+)"', (ROOT / "gluon_syncbn/_version.py").read_text())[1]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "examples/*.ipynb", "examples/*/README.md"]
include_patterns += ["benchmarks/README.md"]
exclude_patterns = [".*", "build", "dist", "runs", "docs/index.md"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinxcontrib.programoutput",
]

# The tutorial runs each time, so what it prints is of the code as it is.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 240
nb_output_stderr = "remove"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
highlight_language = "none"
default_role = "py:obj"
nitpicky = True
# The site has no pages on MXNet, and names in single backquotes may be arguments.
nitpick_ignore_regex = [(r"py:.*", r"(mxnet|mx)\..*"), (r"py:obj", r".*")]
nitpick_ignore = [("py:exc", "MXNetError")]

# Public names have headings of their own.
toc_object_entries = False
autodoc_member_order = "bysource"
# The docstrings say the types.
autodoc_typehints = "none"
napoleon_use_param = napoleon_use_rtype = False
napoleon_custom_sections = [
    ("Attributes", "params_style"),
    ("Parameters of the layer", "params_style"),
    "Inputs and outputs",
]

# Commands whose output a page shows are run with the Python that builds it.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ["COLUMNS"] = "90"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"{project} {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = html_show_copyright = html_copy_source = False
html_math_renderer = "svg"


def _visit_math(self, node):
    """Draws an equation, which then needs no script and no font of the reader's."""
    block = isinstance(node, nodes.math_block)
    tex = node.astext()
    if "&" in tex:
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}"
    drawn = ziamath.Latex(tex, size=17, inline=not block, color="currentColor")
    style = "" if block else f' style="vertical-align: {drawn.getyofst():.1f}px"'
    label = html.escape(tex, quote=True)
    self.body.append(f'<span class="{"block " * block}equation" role="img" aria-label="{label}"')
    self.body.append(f"{style}>{drawn.svg()}</span>")
    raise nodes.SkipNode


def _add_sidebar(app, name, text):
    if name == root_doc:
        text[0] += "\n" + (ROOT / "docs/index.md").read_text()


def _leave_out_of_search(app, env):
    for name in ("CHANGELOG", "CONTRIBUTING"):
        env.metadata[name]["nosearch"] = True


def _finish(app, error):
    if error or app.builder.name != "html":
        return
    folder = Path(app.outdir)
    # The page that a server or browser opens for the folder.
    shutil.copyfile(folder / "README.html", folder / "index.html")
    for path in sorted(p for e in ("html", "css") for p in folder.rglob(f"*.{e}")):
        text = path.read_text()
        for found in FROM_ELSEWHERE.findall(text):
            raise SphinxError(f"{path} loads {found}: the site has to work offline")
        if "$$" in text:
            raise SphinxError(f"{path} shows TeX between $$: it has to be drawn")


def setup(app):
    app.add_html_math_renderer("svg", (_visit_math, None), (_visit_math, None))
    app.connect("source-read", _add_sidebar)
    app.connect("env-updated", _leave_out_of_search)
    app.connect("build-finished", _finish)
