"""Sphinx settings: `make docs`, or `sphinx-build -W docs docs/_build/html`. Needs no internet."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import generate

generate.main()

project = "cleanmarl"
author = "The cleanmarl authors"
extensions = ["myst_parser", "sphinx.ext.mathjax"]  # a reader's browser loads MathJax; offline it shows the LaTeX
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_generated/*.md", "results"]  # the last two are included by other pages
smartquotes = False  # they would turn --flag into a dash
html_theme = "furo"
html_title = "cleanmarl"
html_show_copyright = False
html_copy_source = False
