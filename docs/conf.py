"""Sphinx settings: `make docs`, or `sphinx-build -W docs docs/_build/html`. Needs no internet."""

import re
import sys
import textwrap
from pathlib import Path

from docutils import nodes

sys.path.insert(0, str(Path(__file__).parent))
import generate
from latex2mathml.converter import convert

generate.main()

project = "cleanmarl"
author = "The cleanmarl authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_generated/*.md", "results"]  # the last two are included by other pages
smartquotes = False  # they would turn --flag into a dash
html_theme = "furo"
html_title = "cleanmarl"
html_show_copyright = False
html_copy_source = False
html_extra_path = ["results/report.html"]  # the interactive page, at the root of the site
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_theme_options = {"navigation_with_keys": True}
html_math_renderer = "mathml"  # below: equations that need no network
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True


def as_mathml(latex: str, display: str) -> str:
    """An equation that browsers draw by themselves. Lines that are aligned at & stand in an environment for that."""
    latex = latex.replace("\\langle", "⟨").replace("\\rangle", "⟩")  # which the converter does not know after \bigl
    aligned = display == "block" and ("\\\\" in latex or "&" in latex) and "\\begin{" not in latex
    return convert(f"\\begin{{align*}}{latex}\\end{{align*}}" if aligned else latex, display=display)


def visit_math(translator, node) -> None:
    translator.body.append(as_mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def visit_math_block(translator, node) -> None:
    translator.body.append(f'<div class="equation">{as_mathml(node.astext(), "block")}</div>')
    raise nodes.SkipNode


def plain_docstring(app, what, name, obj, options, lines: list[str]) -> None:
    """Our docstrings are plain text with `names`; the reference is read as reStructuredText."""
    paragraphs = []
    for paragraph in "\n".join(lines).strip().split("\n\n"):
        if re.search("^ {2}", paragraph, re.MULTILINE):  # code, or a list of arrays
            paragraphs.append("::\n\n" + textwrap.indent(paragraph, "    "))
            continue
        parts = paragraph.split("`")
        parts[::2] = [re.sub(r"([*_|\\])", r"\\\1", part) for part in parts[::2]]
        parts[1::2] = [f"``{part}``\\ " for part in parts[1::2]]
        paragraphs.append("".join(parts))
    lines[:] = "\n\n".join(paragraphs).splitlines()


def setup(app) -> None:
    app.connect("autodoc-process-docstring", plain_docstring)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
