"""The documentation site: MyST pages, and a reference made of the docstrings. `make docs` builds it, with warnings as errors."""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for the page of commands

from command_help import write_page

import inloop

project = "inloop"
author = "The inloop developers"
copyright = author  # noqa: A001
release = version = inloop.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "fully-qualified"
autodoc_typehints_description_target = "documented"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False

html_theme = "furo"
pygments_style = "friendly"  # shows what a diff adds and removes
pygments_dark_style = "monokai"
html_title = "inloop"
html_static_path = ["_static"]
html_css_files = ["page.css"]
html_show_sphinx = False
html_copy_source = False

write_page(Path(__file__).parent / "command-line.md")


def let_names_break(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Long names in tables break after a dot, an underscore or a slash, not within a word."""
    break_after = re.compile(r"(?<=\w)([._/(])(?!(?:py|json|md|sh)\b)(?=\w)")
    in_code = re.compile(r'(?<=<span class="pre">)[^<]+')
    in_cells = re.compile(r"<td>.*?</td>", re.DOTALL)
    context["body"] = in_cells.sub(
        lambda cell: in_code.sub(lambda name: break_after.sub(r"\1<wbr>", name[0]), cell[0]), context.get("body", "")
    )


def setup(app: Any) -> None:
    app.connect("html-page-context", let_names_break)
